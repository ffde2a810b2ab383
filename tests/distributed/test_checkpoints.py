"""Checkpoints as ranks write them: when, what is in them, and that a file is complete however the run ended."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp import checkpoint
from nbddp.errors import CheckpointError
from nbddp.stage import Stage
from support.ranks import RankError

pytestmark = pytest.mark.distributed


def make(width=4):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 5, generator=generator)
    torch.manual_seed(5)
    data = TensorDataset(x, x[:, :2] * 2)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2)), data, data


def with_clocks(at_most_s=None, at_least_s=None):
    """A `make` that sets the saver's own cadences in the rank."""

    def make_so():
        import nbddp.worker.saver as saver

        saver.AT_MOST_EVERY_S = saver.AT_MOST_EVERY_S if at_most_s is None else at_most_s
        saver.AT_LEAST_EVERY_S = saver.AT_LEAST_EVERY_S if at_least_s is None else at_least_s
        return make()

    return make_so


def mse(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def run(training, nproc=2, make=make, hooks=None, **options):
    return training(nproc, make, {"training_step": mse, **(hooks or {})}, **{"batch_size": 8, **options})


def written(result, name):
    return [event.data["step"] for event in result.of_kind("checkpoint") if event.data["name"] == name]


def files(result):
    return sorted(path.name for path in result.run.checkpoints.iterdir())


def load(result, name):
    return torch.load(result.run.checkpoints / f"{name}.pt", weights_only=True)


# -- what is in a file


def test_a_checkpoint_holds_all_of_the_schema_as_plain_types(training, ranks):
    hooks = {"scheduler": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3])}
    result = run(training, hooks=hooks, epochs=2, lr=0.1, name="x")
    content = load(result, "last")
    assert set(content) == {
        *("format", "version", "run", "versions", "config", "precision", "matmul_precision", "world_size"),
        *("model", "optimizer", "scheduler", "scaler", "comm_hook", "rng"),
        *("stage", "stage_name", "stage_step", "stage_epochs_done", "epoch", "step", "epochs_done", "sampler"),
        *("epoch_sums", "values", "metrics", "early_stop", "best", "value", "finite", "elapsed_s", "pause_s", "norm"),
    }
    checkpoint.read_resumable(result.run.checkpoints / "last.pt", verify=True)
    assert (content["format"], content["version"], content["run"]) == ("nbddp.checkpoint", 1, result.run.id)
    assert (content["stage"], content["epoch"], content["step"], content["epochs_done"], content["world_size"]) == (0, 2, 8, 2, 2)
    assert (content["stage_step"], content["stage_epochs_done"], content["comm_hook"], content["scaler"]) == (8, 2, [None, None], None)
    assert content["sampler"].items() >= {"seed": 0, "stage": 0, "epoch": 2, "step": 4, "samples": 32, "n": 32}.items()
    assert content["config"] == {"batch_size": 8, "epochs": 2, "lr": 0.1, "name": "x"}
    assert (content["precision"], content["matmul_precision"], content["finite"]) == ("fp32", "highest", True)
    assert content["values"] == {"val_loss": pytest.approx(result.epochs["val_loss"][-1], rel=1e-12)}
    assert content["value"] == content["values"]["val_loss"]
    assert content["best"]["value"] == pytest.approx(result.epochs["val_loss"].min(), rel=1e-12)
    sums = content["epoch_sums"]
    assert sums["loss"] / sums["weight"] == pytest.approx(result.epochs["loss"][-1], rel=1e-12)
    assert (sums["samples"], sums["steps"], sums["weight"]) == (32, 4, 32.0)
    assert set(content["versions"]) == {"nbddp", "torch"}
    assert list(content["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, value in content["model"].items():
        np.testing.assert_array_equal(value.numpy(), result.weights[1][name])

    def into_torch(rank):
        net = make()[0]
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.load_state_dict(content["optimizer"])
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
        scheduler.load_state_dict(content["scheduler"]["own"])
        return int(optimizer.state[net[0].weight]["step"]), scheduler.last_epoch, scheduler.get_last_lr()

    assert ranks(1, into_torch) == [(8, 8, [pytest.approx(0.01)])]


def test_the_random_streams_of_every_rank_are_in_it(training, ranks):
    def step(model, batch):
        torch.rand(1 + torch.distributed.get_rank())
        return mse(model, batch)

    def next_draws(rank, state):
        import random

        from nbddp import rng

        rng.restore(state[rank], torch.device("cpu"))
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    def streams(rank):
        from nbddp import rng

        rng.seed_rank(0, rank)
        for _ in range(4):
            torch.rand(1 + rank)
        import random

        return torch.rand(3).tolist(), random.random(), np.random.rand()

    content = load(run(training, 3, hooks={"training_step": step}, batch_size=6, max_steps=4), "last")
    assert len(content["rng"]) == 3
    drawn = ranks(3, next_draws, content["rng"])
    assert len({str(draw) for draw in drawn}) == 3
    assert drawn == ranks(3, streams), "those that the next step would draw from"


def test_initial_weights_are_those_that_were_bundled(training):
    result = run(training)
    initial = load(result, "initial")
    assert (initial["epoch"], initial["step"], initial["finite"]) == (0, 0, True)
    for name, value in make()[0].state_dict().items():
        torch.testing.assert_close(initial["model"][name], value, rtol=0, atol=0)


def test_tied_tensors_are_one_in_the_file(training):
    def tied():
        net, train, val = make(width=5)
        net.append(nn.Linear(2, 5)).append(nn.Linear(5, 2))
        net[4].weight = net[2].weight
        return net, train, val

    result = run(training, make=tied)
    model = load(result, "last")["model"]
    assert model["2.weight"].data_ptr() == model["4.weight"].data_ptr()
    net = checkpoint.load_checkpoint(result.run.path, tied()[0])
    assert net[2].weight is net[4].weight


# -- when files are written


def test_of_quick_epochs_the_first_is_written_and_the_last_and_one_in_20_s(training):
    result = run(training, epochs=3)
    assert written(result, "last") == [4, 12]
    assert files(result) == ["best.pt", "initial.pt", "last.pt"]


def test_every_epoch_is_written_where_20_s_have_passed(training):
    result = run(training, make=with_clocks(at_most_s=0), epochs=3)
    assert written(result, "last") == [4, 8, 12]


def test_every_second_epoch_and_the_last_however_quick_where_that_is_written_out(training):
    result = run(training, epochs=5, checkpoint_every=2)
    assert written(result, "last") == [8, 16, 20]


@pytest.mark.parametrize("nproc", [1, 2])
def test_steps_are_written_however_quick_they_are(training, nproc):
    result = run(training, nproc, epochs=2, checkpoint_every="3 steps", keep_last=2)
    assert written(result, "last") == [3, 6, 8]
    assert files(result) == ["best.pt", "epoch-0002.pt", "initial.pt", "last.pt", "step-00000006.pt"]
    assert load(result, "epoch-0002")["step"] == load(result, "last")["step"] == 8
    assert load(result, "step-00000006")["sampler"]["step"] == 2


def test_a_step_that_ends_an_epoch_is_written_once_with_its_validation(training):
    result = run(training, epochs=2, checkpoint_every="4 steps")
    assert written(result, "last") == [4, 8]
    content = load(result, "last")
    assert content["epochs_done"] == 2
    assert content["value"] is not None


def test_keep_last_keeps_so_many_epochs_and_says_what_it_removed(training):
    result = run(training, epochs=5, keep_last=3)
    assert files(result) == ["best.pt", "epoch-0003.pt", "epoch-0004.pt", "epoch-0005.pt", "initial.pt", "last.pt"]
    removed = {event.data["name"]: event.data["removed"] for event in result.of_kind("checkpoint") if event.data["name"].startswith("epoch")}
    assert removed == {"epoch-0001": [], "epoch-0002": [], "epoch-0003": [], "epoch-0004": ["epoch-0001"], "epoch-0005": ["epoch-0002"]}
    for name in ("epoch-0003", "epoch-0004"):
        assert load(result, name)["epoch"] == int(name[-1])


def slow(model, batch):
    time.sleep(0.01)
    return mse(model, batch)


@pytest.mark.parametrize("every", ["10 min", "1000 epochs"])
def test_the_clock_of_rank_0_decides_for_all(training, every):
    def make_long():
        net, train, _ = with_clocks(at_least_s=0.3)()
        return net, TensorDataset(*(part.repeat(40, 1) for part in train.tensors)), None

    result = run(training, 2, make_long, {"training_step": slow}, max_steps=200, checkpoint_every=every)
    steps = written(result, "last")
    assert 3 <= len(steps) <= 9, "every 0.3 s, and up to half a second until all ranks know"
    assert len({event.data["epoch"] for event in result.of_kind("checkpoint") if event.data["name"] == "last"}) <= 2, "within epochs"
    assert steps[-1] == 200


def test_a_decision_that_falls_into_a_validation_is_not_lost(training):
    def validation_step(model, batch):
        time.sleep(0.15)
        return mse(model, batch)

    hooks = {"validation_step": validation_step}
    result = run(training, 2, with_clocks(at_least_s=0.4), hooks, epochs=4, checkpoint_every="10 min", val_batch_size=8)
    assert written(result, "last") == [4, 8, 12, 16], "each validation takes 0.6 s: a checkpoint is due after it"


# -- the best


def values(*per_epoch, scalar="loss", step=mse):
    """A validation that gives these values, one per epoch of four steps."""
    steps = []

    def training_step(model, batch):
        steps.append(1)
        return step(model, batch)

    def validation_step(model, batch):
        loss = mse(model, batch).detach() * 0
        return {"loss": loss, scalar: loss + per_epoch[max(0, len(steps) // 4 - 1)]}

    return {"training_step": training_step, "validation_step": validation_step}


@pytest.mark.parametrize(
    "given, options, epoch",
    [
        ((3.0, 1.0, 2.0), {}, 2),
        ((3.0, 1.0, 0.9375), {"min_delta": 0.125}, 2),
        ((3.0, 1.0, 0.75), {"min_delta": 0.125}, 3),
        ((3.0, 1.0, 2.0), {"mode": "max"}, 1),
        ((3.0, float("nan"), 2.0), {}, 3),
        ((3.0, float("-inf"), 4.0), {}, 1),
        ((1.0, 1.0, 1.0), {}, 1),
    ],
    ids=str,
)
def test_the_best_is_by_the_monitored_value(training, given, options, epoch):
    result = run(training, 2, hooks=values(*given), epochs=3, val_batch_size=32, **options)
    content = load(result, "best")
    assert (content["epoch"], content["value"]) == (epoch, given[epoch - 1])
    assert content["best"] == {
        "name": "val_loss",
        "value": content["value"],
        "epoch": epoch,
        "step": 4 * epoch,
        "mode": options.get("mode", "min"),
        "min_delta": options.get("min_delta", 0.0),
    }


def test_a_scalar_of_the_validation_is_monitored_by_its_name(training):
    result = run(training, 2, hooks=values(0.5, 0.875, 0.75, scalar="acc"), epochs=3, val_batch_size=32, monitor="val_acc", mode="max")
    assert load(result, "best")["epoch"] == 2
    assert load(result, "best")["values"] == {"val_loss": 0.0, "val_acc": 0.875}


def test_the_loss_of_the_training_is_monitored_although_there_is_validation(training):
    result = run(training, 2, hooks=values(1.0, 2.0, 3.0), epochs=3, val_batch_size=32, monitor="loss")
    assert load(result, "best")["value"] == pytest.approx(result.epochs["loss"].min(), rel=1e-12)


def test_the_best_of_quick_epochs_is_written_with_the_first_and_at_the_end(training):
    result = run(training, 2, hooks=values(3.0, 2.0, 1.0, 4.0), epochs=4, val_batch_size=32)
    steps = written(result, "best")
    assert (steps[0], steps[-1]) == (4, 12)
    assert set(steps) <= {4, 8, 12}, "in between where the last was written a while ago"


def test_the_best_is_released_while_training_goes_on(training):
    hooks = values(*[3.0] * 100, step=slow)
    result = run(training, 2, with_clocks(at_most_s=0.2), hooks, epochs=25, val_batch_size=32, checkpoint_every="1000 epochs")
    events = [(event.data["name"], event.data["step"], event.time) for event in result.of_kind("checkpoint")]
    (best,) = [event for event in events if event[0] == "best"]
    last = next(event for event in events if event[0] == "last")
    assert best[1] == 4
    assert best[2] < last[2] - 0.3, "held back for 0.2 s, and not to the end of the run, a second later"


def test_the_best_that_was_held_back_survives_a_failure(training):
    calls = []

    def step(model, batch):
        calls.extend([1] * model.training)
        if len(calls) == 10:
            raise ArithmeticError("in step 10")
        return mse(model, batch)

    class Kept:
        run = None

    original = training._ranks
    training._ranks = lambda nproc, function, path, *rest, **options: (setattr(Kept, "run", path), original(nproc, function, path, *rest, **options))[1]
    with pytest.raises(ArithmeticError):
        run(training, 2, hooks=values(2.0, 3.0, 4.0, step=step), epochs=3, val_batch_size=32)
    content = torch.load(f"{Kept.run}/checkpoints/best.pt", weights_only=True)
    assert content["epoch"] == 1


# -- what goes wrong


def test_an_optimizer_whose_state_cannot_be_written_is_found_at_the_first_step(training):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["notes"]["where"] = [object()]

    hooks = {"optimizer": lambda model: Odd(model.parameters(), lr=0.1)}
    with pytest.raises(CheckpointError, match=r"optimizer\['state'\]\['notes'\]\['where'\]\[0\] is a object: checkpoints hold tensors and plain types only"):
        run(training, hooks=hooks, epochs=100)


def test_a_file_that_cannot_be_written_is_an_error_that_says_why(training):
    def small_files():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        return make(width=20_000)

    with pytest.raises(CheckpointError, match=r"the checkpoint .+initial\.pt can't be written: .+; what was written before stays"):
        run(training, make=small_files, epochs=1)


@pytest.mark.parametrize("lives_s", [0.7, 1.0, 1.3])
def test_a_run_that_is_killed_while_it_writes_leaves_complete_files(training, tmp_path, lives_s):
    """They write a file of 3 MB after every step, with two links to it, and after ten steps that of a stage."""

    def make_mortal():
        import os
        import signal
        import threading

        timer = threading.Timer(lives_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return make(width=30_000)

    stages = [Stage("head", max_steps=10), Stage("all")]
    with pytest.raises(RankError, match="exit code -9"):
        run(training, make=make_mortal, hooks={"stages": stages}, checkpoint_every="1 step", keep_last=2, epochs=10_000)
    (folder,) = tmp_path.glob("runs/*/checkpoints")
    content = checkpoint.read_resumable(folder / "last.pt", verify=True)
    assert content["step"] >= 2
    assert content["model"]["0.weight"].shape == (30_000, 5)
    for path in folder.glob("*.pt"):
        checkpoint.read(path)
        if path.name != "initial.pt":
            checkpoint.read_resumable(path, verify=True)
    path, newest = checkpoint.newest_complete(folder, exclude=(folder / "last.pt",))
    assert path.stem != "initial"
    assert content["step"] - 1 <= newest["step"] <= content["step"]
    checkpoint.clear_unfinished(folder)
    assert not list(folder.glob(".*"))


def test_a_model_with_an_infinite_mask_has_finite_checkpoints_and_a_best(training):
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(5, 2)
            self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))

    result = run(training, make=lambda: (Masked(), *make()[1:]), epochs=2, lr=0.01)
    assert load(result, "last")["finite"] is True
    assert "best.pt" in files(result)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_scalar_of_the_step_decides_which_is_the_best(training, nproc):
    def step(model, batch):
        return {"loss": mse(model, batch), "scale": sum(p.square().sum() for p in model.parameters())}

    result = training(nproc, make, {"training_step": step}, batch_size=12, epochs=4, lr=0.05, weight_decay=0.9, monitor="scale", mode="max")
    scales = result.epochs["scale"]
    assert load(result, "best")["epoch"] == int(np.argmax(scales)) + 1
    assert load(result, "best")["value"] == pytest.approx(float(scales.max()), rel=1e-12)
