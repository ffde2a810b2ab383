"""Snapshots on real ranks: a file holds the state of its very step, whatever the writer and the steps after it do meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.config import TrainConfig
from nbddp.errors import CheckpointError
from nbddp.events import EventReader, EventWriter
from nbddp.planning import Machine, make_plan
from nbddp.rundir import RunDir
from support.ranks import RankError

pytestmark = pytest.mark.distributed


@dataclass
class Saved:
    run: RunDir
    results: list[Any]

    def load(self, name):
        return checkpoint.read(self.run.checkpoints / f"{name}.pt")

    @property
    def files(self):
        return sorted(path.stem for path in self.run.checkpoints.iterdir())

    @property
    def events(self):
        reader, events = EventReader(self.run.events), []
        while new := reader.poll():
            events += new
        return [event.data for event in events if event.kind == "checkpoint"]


@pytest.fixture
def saving(ranks, tmp_path):
    """Calls ``function(saver, model, rank)`` on ranks that have nothing else of the loop, and closes the saver."""

    def call(nproc, make, function, *, timeout=60, **options):
        run = RunDir.create(tmp_path / "runs", "test")
        return Saved(run, ranks(nproc, on_rank, str(run.path), make, function, options, timeout=timeout))

    return call


def on_rank(rank, path, make, function, options):
    from pathlib import Path

    import torch.distributed as dist

    from nbddp.evaluation.ranks import Ranks
    from nbddp.worker.context import Context
    from nbddp.worker.position import Position
    from nbddp.worker.saver import Saver

    world_size, run, config, model = dist.get_world_size(), RunDir(Path(path)), TrainConfig(**options), make()
    plan = make_plan(config.replace(nproc=world_size, devices="cpu"), n_train=100 * world_size, n_val=0, machine=Machine((), 2))
    group = dist.new_group(backend="gloo") if world_size > 1 else None
    ranks = Ranks(rank, world_size, rank, torch.device("cpu"), "gloo", group)
    events = EventWriter(run.rank_events(rank, 0), run=run.id, rank=rank)
    context = Context(run, {}, config, plan, ranks, events, Position(), hooks=None, model=model, train_data=None, val_data=None)
    saver = Saver(context)
    result = function(saver, model, rank)
    saver.close()
    return result


def state(step, **more):
    """What the loop gives of itself, at the end of an epoch of 10 steps or within it."""
    done, within = divmod(step, 10)
    at = {"epoch": done + bool(within), "step": step, "epochs_done": done, "stage": 0, "stage_name": "0", "stage_step": step, "stage_epochs_done": done}
    sampler = {"seed": 0, "stage": 0, "epoch": at["epoch"], "step": within or 10, "samples": 0, "n": 100}
    others = {"optimizer": {"state": {}, "param_groups": []}, "scheduler": None, "scaler": None, "precision": "fp32", "elapsed_s": 1.0}
    judged = {"early_stop": {"without_gain": 0, "validated_at": -1}, "best": {"name": "loss", "mode": "min", "value": None, "epoch": 0, "step": 0}}
    sums = {"loss": 1.0, "weight": 2.0, "scalars": {}, "samples": 2, "steps": 1, "times": [0.0] * 3}
    return {**others, **at, "sampler": sampler, "epoch_sums": sums, "values": {}, "metrics": {}, **judged, **more}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))


def fill(model, value):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(value)


def slow_disk(seconds):
    """In this rank every file takes so long."""
    import io

    write = torch.save

    def save(content, file, **options):
        if isinstance(file, io.BufferedWriter):
            time.sleep(seconds)
        write(content, file, **options)

    torch.save = save


def exactly(value):
    """A state as something to compare: every bit of its tensors."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), bytes(raw.view(torch.uint8).numpy())
    if isinstance(value, dict):
        return [(key, exactly(item)) for key, item in value.items()]
    return [exactly(item) for item in value] if isinstance(value, list | tuple) else value


# -- a snapshot is of its step


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_follows_while_a_file_is_written_does_not_reach_into_it(saving, nproc):
    def function(saver, model, rank):
        slow_disk(0.15)
        moment = torch.zeros(1000)
        pauses = []
        for step in range(1, 8):
            fill(model, step)
            moment.fill_(step)
            began = time.monotonic()
            saver.save(state(step, optimizer={"state": {0: moment}, "param_groups": []}), value=None, best=False, last=True)
            pauses.append(time.monotonic() - began)
            fill(model, -1)
            moment.fill_(-1)
        return pauses, 0 if saver._writer is None else saver._writer._stagings

    saved = saving(nproc, net, function, keep_last=10)
    for step in range(1, 8):
        content = saved.load(f"step-{step:08d}")
        assert content["step"] == step
        assert {float(part) for tensor in [*content["model"].values(), content["optimizer"]["state"][0]] for part in (tensor.min(), tensor.max())} == {step}
    pauses, stagings = saved.results[0]
    assert stagings == 2, "one that is written, one that waits: the memory is bounded"
    assert max(pauses[:2]) < 0.15 < 0.15 * 4 < sum(pauses), "training waits for the disk only where both are in use"


def test_a_writer_in_time_needs_the_memory_of_one_snapshot(saving):
    def function(saver, model, rank):
        for step in range(1, 4):
            fill(model, step)
            saver.save(state(step), value=None, best=False, last=True)
            deadline = time.monotonic() + 30
            while rank == 0 and saver._writer._free.empty() and time.monotonic() < deadline:
                time.sleep(0.001)
        return rank or saver._writer._stagings

    assert saving(2, net, function).results == [1, 1]


def test_states_of_optimizers_that_grow_and_hold_numbers_are_those_of_their_step(saving):
    """LBFGS's history grows up to its size; Adagrad's and NAdam's states are tensors and numbers; a custom one has whatever it likes."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for parameter in self.param_groups[0]["params"]:
                known = self.state[parameter]
                known["seen"] = known.get("seen", 0) + 1
                known.setdefault("window", []).append(float(parameter.mean()))
                known["tuple"] = (parameter.detach() * 2, "word", None, {3: torch.tensor(known["seen"])})

    def function(saver, model, rank):
        slow_disk(0.02)
        torch.manual_seed(1)
        x, y = torch.randn(20, 40), torch.randn(20, 2)
        expected = {}
        step = 0
        for make in (lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4), torch.optim.Adagrad, torch.optim.NAdam, lambda p: Odd(p, lr=0.1)):
            optimizer = make(list(model.parameters()))
            for _ in range(6):

                def closure(optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    return loss

                closure()
                optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
                step += 1
                expected[step] = exactly(optimizer.state_dict()), exactly(model.state_dict())
                saver.save(state(step, optimizer=optimizer.state_dict()), value=None, best=False, last=True)
        return expected

    saved = saving(1, net, function, keep_last=30)
    for step, (optimizer, model) in saved.results[0].items():
        content = saved.load(f"step-{step:08d}" if step % 10 else f"epoch-{step // 10:04d}")
        assert exactly(content["optimizer"]) == optimizer
        assert exactly(content["model"]) == model


class Strange(nn.Module):
    """Parameters and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        flat = torch.randn(12)
        self.first, self.second = nn.Parameter(flat[:8]), nn.Parameter(flat[4:])
        self.tied = self.first
        self.same_place = nn.Parameter(flat[:8])
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.channels = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.of_half = nn.Parameter(torch.randn(7).bfloat16())
        self.of_double = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0))


@pytest.mark.parametrize("nproc", [1, 3])
def test_parameters_of_all_kinds_are_saved_bit_for_bit_and_alike_on_all_ranks(saving, nproc):
    def function(saver, model, rank):
        for step in (1, 2):
            saver.save(state(step), value=None, best=False, last=True)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    saved = saving(nproc, Strange, function)
    model = saved.load("last")["model"]
    for name, value in saved.results[0].items():
        assert (model[name].dtype, model[name].shape) == (value.dtype, value.shape)
        torch.testing.assert_close(model[name], value, rtol=0, atol=0)
    assert model["tied"].data_ptr() == model["first"].data_ptr() == model["same_place"].data_ptr() != model["second"].data_ptr()


# -- the files


def test_stage_files_are_links_and_stay(saving):
    def function(saver, model, rank):
        for step in range(1, 7):
            fill(model, step)
            names = {2: ("stage-0",), 4: ("stage-1",)}.get(step, ())
            saver.save(state(step), value=float(step), best=step == 2, last=True, names=names)
            if step == 2 and rank == 0:
                saver._writer.stage()  # once it is written
                links = {path.stem: path.stat().st_nlink for path in saver._folder.iterdir()}
        return links if rank == 0 else None

    saved = saving(2, net, function, keep_last=2)
    assert saved.files == ["best", "last", "stage-0", "stage-1", "step-00000005", "step-00000006"]
    assert [int(saved.load(name)["step"]) for name in saved.files] == [2, 6, 2, 4, 5, 6]
    assert {int(saved.load(name)["model"]["0.bias"][0]) for name in ("best", "stage-0")} == {2}
    announced = [event["name"] for event in saved.events]
    assert announced[2:7] == ["last", "step-00000002", "stage-0", "best", "last"]
    assert [event["removed"] for event in saved.events if event["name"].startswith("stage")] == [[], []]
    assert [removed for event in saved.events for removed in event["removed"]] == [f"step-{step:08d}" for step in range(1, 5)]


def test_a_stage_file_needs_no_other(saving):
    saved = saving(2, net, lambda saver, model, rank: saver.save(state(3), value=None, best=True, last=False, names=("stage-0", "stage-1")))
    assert saved.files == ["best", "stage-0", "stage-1"]
    assert {(saved.run.checkpoints / f"{name}.pt").stat().st_ino for name in saved.files} == {(saved.run.checkpoints / "best.pt").stat().st_ino}


def test_weights_that_are_not_finite_are_never_the_best(saving):
    def function(saver, model, rank):
        fill(model, 1.0)
        saver.save(state(1), value=1.0, best=True, last=True)
        fill(model, float("inf"))
        saver.save(state(2), value=0.5, best=True, last=True)

    saved = saving(2, net, function)
    assert saved.load("best")["step"] == 1
    assert (saved.load("last")["step"], saved.load("last")["finite"], saved.load("best")["finite"]) == (2, False, True)
    assert [event["name"] for event in saved.events] == ["last", "best", "last"]


def test_a_best_that_is_held_back_gives_way_to_a_better_one_that_is_finite(saving):
    def function(saver, model, rank):
        saver._last_best = time.monotonic() + 1e6  # none is written before the end
        for step, value in ((1, 1.0), (2, 2.0), (3, float("nan")), (4, 4.0), (5, float("inf"))):
            fill(model, value)
            saver.save(state(step), value=value, best=True, last=False)
        return rank or saver._writer._stagings

    saved = saving(2, net, function)
    assert saved.results[0] <= 2
    assert saved.files == ["best"]
    assert (saved.load("best")["step"], float(saved.load("best")["model"]["0.bias"][0])) == (4, 4.0)


def test_the_best_of_the_run_before_is_adopted(saving, tmp_path):
    earlier = saving(1, net, lambda saver, model, rank: saver.save(state(3), value=0.5, best=True, last=True))

    def function(saver, model, rank):
        from pathlib import Path

        saver.adopt_best(Path(path))

    path = str(earlier.run.checkpoints / "best.pt")
    saved = saving(2, net, function)
    assert saved.files == ["best"]
    (event,) = saved.events
    assert (event["name"], event["step"], event["value"]) == ("best", 3, 0.5)
    path = str(earlier.run.checkpoints / "bets.pt")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*bets\.pt; .* has best\.pt, last\.pt"):
        saving(2, net, function)


# -- what every rank has of its own


def own(rank):
    """As gradient compression has it: errors of its own per rank, of any size and dtype."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "comm_hook": {
            "errors": [torch.randn(50_000 + rank, generator=generator), torch.randn(3, 4, generator=generator).T, torch.zeros(0)],
            "half": torch.randn(9, generator=generator).bfloat16(),
            "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
            "count": torch.tensor(rank),
            "iteration": 7 + rank,
            "seeds": {rank: "x"},
        }
    }


@pytest.mark.parametrize("nproc", [1, 3])
def test_what_ranks_have_of_their_own_is_in_the_file_by_rank(saving, nproc):
    def function(saver, model, rank):
        for step in (1, 2):
            mine = own(rank if step == 2 else 10 + rank)
            saver.save(state(step), value=None, best=False, last=True, own=mine)
            for tensor in (*mine["comm_hook"]["errors"], mine["comm_hook"]["half"]):
                tensor.zero_()

    saved = saving(nproc, net, function)
    assert exactly(saved.load("last")["comm_hook"]) == [exactly(own(rank)["comm_hook"]) for rank in range(nproc)]
    assert checkpoint.read_resumable(saved.run.checkpoints / "last.pt", verify=True)["step"] == 2


def test_without_any_there_is_none_per_rank(saving):
    def function(saver, model, rank):
        saver.save(state(1), value=None, best=False, last=True)
        saver.save(state(2), value=None, best=False, last=True, names=("stage-0",), own={"comm_hook": None})

    saved = saving(2, net, function, keep_last=2)
    assert [saved.load(name)["comm_hook"] for name in ("step-00000001", "stage-0")] == [[None, None], [None, None]]
    assert len(saved.load("last")["rng"]) == 2


# -- replicas


def differ(name, how):
    def function(saver, model, rank):
        saver.save(state(1), value=None, best=False, last=True)
        if rank == 1:
            parameter = dict(model.named_parameters())[name]
            bits = parameter.detach().view(torch.int32)
            bits[..., -1] ^= 1 if how == "bit" else -(2**31)
        saver.save(state(2), value=None, best=True, last=True, names=("stage-0",))
        if rank == 0:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:  # as the loop does, with every report
                saver.release_best()
                time.sleep(0.01)
        else:
            torch.distributed.barrier()

    return function


@pytest.mark.parametrize("how", ["bit", "sign"])
@pytest.mark.parametrize("nproc", [2, 3])
def test_a_checkpoint_of_replicas_that_differ_is_an_error_and_not_written(saving, tmp_path, nproc, how):
    with pytest.raises(RankError, match=r"the replicas of the model differ: 1 parameter of rank 1 \(1\.weight\) are not those of rank 0"):
        saving(nproc, net, differ("1.weight", how))
    (folder,) = tmp_path.glob("runs/*/checkpoints")
    assert [path.name for path in folder.iterdir()] == ["last.pt"]
    assert checkpoint.read(folder / "last.pt")["step"] == 1


@pytest.mark.parametrize("where", ["save", "close"])
def test_it_is_told_at_the_next_checkpoint_or_the_end_at_the_latest(saving, where):
    def function(saver, model, rank):
        fill(model, float(rank))
        saver.save(state(1), value=None, best=False, last=True)
        if where == "save":
            while saver._writer is not None and saver._writer._error is None:
                time.sleep(0.001)
            saver.save(state(2), value=None, best=False, last=True)

    with pytest.raises(RankError, match=r"the replicas of the model differ: 4 parameters of rank 1 \(0\.weight, 0\.bias, 1\.weight, 1\.bias\)"):
        saving(2, net, function)


def test_buffers_are_those_of_rank_0_and_no_difference(saving):
    def function(saver, model, rank):
        model[0].running_mean.fill_(float(rank + 1))
        saver.save(state(1), value=None, best=False, last=True)

    saved = saving(2, lambda: nn.Sequential(nn.BatchNorm1d(3)), function)
    assert saved.load("last")["model"]["0.running_mean"].tolist() == [1.0] * 3


def test_a_model_that_saves_itself_otherwise_is_compared_by_its_parameters(saving):
    """A state dict may hold what the parameters are not: other names, other values of the same shape."""

    class Merged(nn.Linear):
        def state_dict(self, *args, **options):
            own = super().state_dict(*args, **options)
            return {"kernel": own["weight"], "bias": own["bias"] + torch.distributed.get_rank() + 1}

    saved = saving(2, lambda: Merged(2, 2), lambda saver, model, rank: saver.save(state(1), value=None, best=False, last=True))
    assert sorted(saved.load("last")["model"]) == ["bias", "kernel"]

    def function(saver, model, rank):
        model.bias.data += rank
        saver.save(state(1), value=None, best=False, last=True)

    with pytest.raises(RankError, match=r"1 parameter of rank 1 \(bias\)"):
        saving(2, lambda: Merged(2, 2), function)


# -- memory that is there before it is needed


def test_memory_is_provided_after_the_first_step(saving):
    def function(saver, model, rank):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(40)).sum().backward()
        optimizer.step()
        parts = {"optimizer": optimizer.state_dict(), "scheduler": None}
        saver.write_initial()
        saver.prepare(parts)
        if rank:
            saver.save(state(1, **parts), value=None, best=False, last=True)
            return None
        writer = saver._writer
        staging = writer.stage()
        provided = {name: kept.data_ptr() for name, (_, kept) in staging._kept.items()}
        writer.release(staging)
        saver.save(state(1, **parts), value=None, best=False, last=True)
        used = {name: kept.data_ptr() for name, (_, kept) in staging._kept.items()}
        return provided == used, len(used), writer._stagings

    saved = saving(2, net, function)
    assert saved.results[0] == (True, 4 + 4 * 3, 1)
    assert saved.files == ["initial", "last"]


def test_what_cannot_be_saved_is_found_when_memory_is_provided(saving):
    with pytest.raises(CheckpointError, match=r"optimizer\['state'\]\[0\] is a object: checkpoints hold tensors and plain types only"):
        saving(2, net, lambda saver, model, rank: saver.prepare({"optimizer": {"state": {0: object()}}}))


def test_after_a_failure_a_slow_disk_is_not_waited_for(saving):
    def function(saver, model, rank):
        slow_disk(600)
        saver.save(state(1), value=None, best=False, last=True)
        saver._last_best = time.monotonic() + 1e6
        saver.save(state(2), value=1.0, best=True, last=False)
        began = time.monotonic()
        saver.give_up()
        saver._writer = None
        return time.monotonic() - began

    saved = saving(1, net, function)
    assert saved.results[0] < 10
    assert not [name for name in saved.files if not name.startswith(".")]
