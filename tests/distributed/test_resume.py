"""Going on from a checkpoint is the same as never having stopped: bit for bit on as many ranks, sample for sample on another number."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from nbddp import Stage
from nbddp.evaluation.errors import StepError

pytestmark = pytest.mark.distributed


class Augmented(Dataset):
    """Samples with noise from all three random streams, drawn wherever they are fetched."""

    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.rand(6) + float(np.random.rand()) + random.random()
        x = self.x[index] + 0.1 * noise
        return x, (self.x[index, :2] * 3).sin()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.two(self.drop(torch.tanh(self.norm(self.one(x)))))


def make():
    torch.manual_seed(4)
    return Net(), Augmented(116), Augmented(13)


def step(model, batch):
    x, y = batch
    output = model(x)
    return {"loss": nn.functional.mse_loss(output, y), "size": output.abs().mean()}


def decayed(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


EVERY_THREE = {"checkpoint_every": "3 steps", "keep_last": 99, "epochs": 3, "lr": 0.01}


def run(training, nproc, *, hooks=None, make=make, resume=None, ask=None, timeout=110, **options):
    return training(nproc, make, {"training_step": step, **(hooks or {})}, resume=resume, ask=ask, timeout=timeout, **{**EVERY_THREE, **options})


def files(result):
    return sorted(result.run.checkpoints.glob("step-*.pt")) + sorted(result.run.checkpoints.glob("epoch-*.pt"))


def at(path):
    return int(torch.load(path, weights_only=True)["step"])


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def assert_goes_on(whole, resumed, after):
    """Weights of every rank, optimizer, scheduler, scaler and history are those of the run that never stopped."""
    for rank, weights in enumerate(whole.weights):
        assert_same_bits(weights, resumed.weights[rank])
    ends = [torch.load(result.run.checkpoints / "last.pt", weights_only=True) for result in (whole, resumed)]
    for part in (
        "optimizer",
        "scheduler",
        "scaler",
        "comm_hook",
        "rng",
        "sampler",
        "early_stop",
        "best",
        "epoch",
        "step",
        "epochs_done",
        "stage",
        "stage_step",
    ):
        assert_equal(ends[0][part], ends[1][part], part)
    tail = whole.history["step"] > after
    assert tail.sum() > 0
    for name in ("step", "epoch", "stage", "loss", "lr", "samples", "size"):
        np.testing.assert_array_equal(whole.history[name][tail], resumed.history[name], err_msg=name)
    rows = len(resumed.epochs["epoch"])
    for name in ("epoch", "step", "loss", "val_loss"):
        np.testing.assert_array_equal(whole.epochs[name][-rows:], resumed.epochs[name], err_msg=name)


def assert_equal(one, other, where):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    else:
        assert one == other or (one != one and other != other), f"{where}: {one} and {other}"


HARD = {"optimizer": "adam", "accumulate": 2, "precision": "fp16", "clip_norm": 1.0, "drop_last": False}


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_from_any_checkpoint_with_all_that_is_hard(training, nproc):
    """Adam, scheduler, fp16 scaler, accumulation, dropout, BatchNorm, loader workers, shuffling, a ragged tail: in the middle of epochs and at their ends."""
    options = {**HARD, "batch_size": 24, "num_workers": nproc}
    whole = run(training, nproc, hooks={"scheduler": decayed}, **options)
    places = files(whole)
    assert {at(path) for path in places} >= {3, 6, 9, 12}
    assert len({torch.load(path, weights_only=True)["epoch"] for path in places}) == 3
    for path in (places[0], places[2]):
        resumed = run(training, nproc, hooks={"scheduler": decayed}, resume=path, **options)
        assert_goes_on(whole, resumed, at(path))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "schedule": "cosine", "warmup_steps": 4, "fused": True},
        {"optimizer": "sgd", "momentum": 0.9, "schedule": "plateau", "precision": "bf16"},
        {"optimizer": "lbfgs", "lr": 0.1, "epochs": 2},
        {"optimizer": "rmsprop", "grad_compression": "powersgd", "accumulate": 2},
        {"optimizer": "adagrad", "grad_compression": "bf16", "schedule": "linear", "patience": 50},
    ],
    ids=lambda options: options["optimizer"],
)
def test_from_the_middle_of_an_epoch_with_every_optimizer_and_schedule(training, options):
    options = {"batch_size": 16, **options}
    whole = run(training, 2, **options)
    (path,) = [path for path in files(whole) if at(path) == 9]
    assert_goes_on(whole, run(training, 2, resume=path, **options), 9)


def test_without_loader_workers_the_ranks_own_streams_go_on(training):
    whole = run(training, 2, batch_size=16)
    (path,) = [path for path in files(whole) if at(path) == 9]
    assert_goes_on(whole, run(training, 2, resume=path, batch_size=16), 9)


def test_of_a_run_that_was_resumed_itself(training):
    whole = run(training, 2, batch_size=16)
    first = run(training, 2, resume=files(whole)[0], batch_size=16)
    (path,) = [path for path in files(first) if at(path) == 9]
    assert_goes_on(whole, run(training, 2, resume=path, batch_size=16), 9)


def test_where_a_run_was_stopped_or_reached_its_limit_does_not_show(training):
    """A run that ends by max_steps validates there, which the run that goes on would not have done."""
    options = {"batch_size": 16, "val_every": 2, "patience": 9, "schedule": "plateau"}
    whole = run(training, 2, **options)
    part = run(training, 2, max_steps=7, **options)
    assert at(part.run.checkpoints / "last.pt") == 7
    assert_goes_on_but_for_best(whole, run(training, 2, resume=part.run.checkpoints / "last.pt", **options), 7)


def test_what_was_to_come_after_the_step_of_a_stop_comes_when_it_goes_on(training):
    options = {"batch_size": 16, "val_every": "1 step", "patience": 99, "checkpoint_every": 1}
    whole = run(training, 2, **options)
    part = run(training, 2, ask="stop", **options)
    path = part.run.checkpoints / "last.pt"
    stopped_at = at(path)
    assert 1 <= stopped_at < 7
    assert part.progress[0][2:] == (True, "asked")
    assert_goes_on(whole, run(training, 2, resume=path, **options), stopped_at)


def assert_goes_on_but_for_best(whole, resumed, after):
    for rank, weights in enumerate(whole.weights):
        assert_same_bits(weights, resumed.weights[rank])
    tail = whole.history["step"] > after
    np.testing.assert_array_equal(whole.history["loss"][tail], resumed.history["loss"])


def stages():
    return [Stage("head", train_only="two.*", lr=0.1, freeze_batch_norm=True), Stage("all", epochs=2, lr=0.01, batch_size=12, optimizer="sgd", momentum=0.5)]


def test_in_any_stage_and_at_the_end_of_one(training):
    options = {"batch_size": 16, "hooks": {"stages": stages()}}
    whole = run(training, 2, **options)
    ends = whole.run.checkpoints / "stage-0.pt"
    inner = [path for path in files(whole) if torch.load(path, weights_only=True)["stage"] == 1]
    for path in (files(whole)[0], ends, inner[0]):
        assert_goes_on(whole, run(training, 2, resume=path, **options), at(path))


def float64_make():
    torch.manual_seed(4)
    x = torch.randn(53, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = (x[:, :2] * 3).sin()
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double(), TensorDataset(x, y), TensorDataset(x[:11], y[:11])


@pytest.mark.parametrize("before, after", [(1, 2), (2, 3), (3, 1)])
def test_on_another_number_of_ranks_the_curve_goes_on(training, before, after):
    options = {"batch_size": 12, "make": float64_make, "optimizer": "adam", "epochs": 2, "drop_last": False}
    whole = run(training, before, **options)
    path = files(whole)[0]
    assert at(path) == 3
    resumed = run(training, after, resume=path, **options)
    tail = whole.history["step"] > 3
    np.testing.assert_allclose(resumed.history["loss"], whole.history["loss"][tail], rtol=1e-10)
    np.testing.assert_allclose(resumed.epochs["val_loss"][-1], whole.epochs["val_loss"][-1], rtol=1e-10)
    np.testing.assert_allclose(resumed.epochs["loss"], whole.epochs["loss"], rtol=1e-10)  # the sums of the epoch that was under way go on
    assert any("the order of the samples goes on" in event.data["text"] for event in resumed.of_kind("message"))


class Marked(nn.Module):
    """Its gradient says which samples a step had: with SGD at lr 1 the weights count them."""

    def __init__(self, n):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(n, dtype=torch.float64))

    def forward(self, rows):
        return self.counts[rows]


def marked_make():
    return Marked(41), TensorDataset(torch.arange(41)), None


def counting_step(model, batch):
    return -model(batch[0]).mean()


@pytest.mark.parametrize("nproc, batch_size", [(1, 8), (2, 10), (3, 6)])
def test_no_sample_is_repeated_or_lost_in_an_epoch_that_goes_on_elsewhere(training, nproc, batch_size):
    options = {"make": marked_make, "hooks": {"training_step": counting_step}, "epochs": 1, "drop_last": False, "optimizer": "sgd", "lr": 1.0}
    before = run(training, 2, batch_size=8, **options)
    (path,) = [path for path in files(before) if at(path) == 3]
    seen = torch.load(path, weights_only=True)["model"]["counts"] > 0
    assert int(seen.sum()) == 24
    after = run(training, nproc, batch_size=batch_size, resume=path, **options)
    late = after.weights[0]["counts"] - torch.load(path, weights_only=True)["model"]["counts"].numpy()
    np.testing.assert_array_equal(late > 1e-12, ~seen.numpy())
    assert after.history["samples"].sum() == 41 - 24


def test_a_changed_lr_wins_over_the_checkpoints_and_the_schedule_keeps_its_shape(training):
    options = {"batch_size": 16, "schedule": "linear", "optimizer": "sgd"}
    whole = run(training, 2, **options)
    (path,) = [path for path in files(whole) if at(path) == 9]
    resumed = run(training, 2, resume=path, **{**options, "lr": 0.05})
    tail = whole.history["step"] > 9
    np.testing.assert_allclose(resumed.history["lr"], whole.history["lr"][tail] * 5, rtol=1e-12)


def test_another_schedule_is_entered_at_its_step(training):
    whole = run(training, 2, batch_size=16, optimizer="sgd")
    cosine = run(training, 2, batch_size=16, optimizer="sgd", schedule="cosine")
    (path,) = [path for path in files(whole) if at(path) == 9]
    resumed = run(training, 2, resume=path, batch_size=16, optimizer="sgd", schedule="cosine")
    np.testing.assert_allclose(resumed.history["lr"], cosine.history["lr"][cosine.history["step"] > 9], rtol=1e-12)
    assert any("the schedule is another one" in event.data["text"] for event in resumed.of_kind("message"))


def test_another_optimizer_begins_anew_and_says_so(training):
    whole = run(training, 2, batch_size=16, optimizer="sgd")
    (path,) = [path for path in files(whole) if at(path) == 9]
    resumed = run(training, 2, resume=path, batch_size=16, optimizer="adam")
    assert any("the optimizer is another one" in event.data["text"] for event in resumed.of_kind("message"))
    assert resumed.history["step"][0] == 10


def test_a_state_that_does_not_fit_the_hooks_optimizer_is_said(training):
    whole = run(training, 2, batch_size=16, optimizer="sgd")
    path = files(whole)[0]
    hook = {"optimizer": lambda model: torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)}
    with pytest.raises(StepError, match="the checkpoint's optimizer state does not fit the optimizer"):
        training(2, make, {"training_step": step, **hook}, resume=path, epochs=3, batch_size=16)
