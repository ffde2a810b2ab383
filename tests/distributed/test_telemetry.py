"""What is measured of every step, on real ranks: complete, in order, and naming the rank that the others wait for."""

from __future__ import annotations

import re
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from nbddp.events import Event
from nbddp.state import PHASES, RunState
from nbddp.worker.tracker import values_of

pytestmark = pytest.mark.distributed

SLEEP_S = 0.03


def make(n=56):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 5, generator=generator)
    torch.manual_seed(5)
    return nn.Linear(5, 2), TensorDataset(x, x[:, :2] * 2), None


def mse(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("options", [{"epochs": 3}, {"max_steps": 11}, {"max_steps": 2}], ids=str)
def test_every_step_is_recorded_once_and_in_order(training, nproc, options):
    result = training(nproc, make, {"training_step": mse}, batch_size=8, **options)
    steps = options.get("max_steps", 21)
    assert result.history["step"].tolist() == list(range(1, steps + 1))
    assert result.history["epoch"].tolist() == [1 + step // 7 for step in range(steps)]
    assert result.history["samples"].tolist() == [8] * steps
    assert sum(len(event.data["step"]) for event in result.of_kind("steps")) == steps
    for name, column in result.history.items():
        assert np.isfinite(column).all(), name
    for phase in PHASES:
        assert (result.history[f"{phase}_s"] >= 0).all()
    assert sum(sum(event.data["warmup"]) for event in result.of_kind("steps")) == min(3, steps)


def test_other_ranks_write_no_steps(training):
    result = training(2, make, {"training_step": mse}, batch_size=8)
    assert {event.rank for event in result.of_kind("steps") + result.of_kind("epoch") + result.of_kind("checkpoint")} == {0}


def test_slow_steps_are_told_at_least_every_quarter_of_a_second(training):
    def slow(model, batch):
        time.sleep(0.05)
        return mse(model, batch)

    result = training(2, make, {"training_step": slow}, batch_size=8, max_steps=20)
    assert max(len(event.data["step"]) for event in result.of_kind("steps")) <= 5


def test_quick_steps_are_told_several_at_a_time(training):
    result = training(2, lambda: make(4000), {"training_step": mse}, batch_size=8, max_steps=400)
    sizes = [len(event.data["step"]) for event in result.of_kind("steps")]
    assert sizes[0] == 1
    assert max(sizes) >= 8
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes)), "the first steps say little: K at most doubles"


class Slow(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if torch.distributed.get_rank() == self.rank:
            time.sleep(SLEEP_S / 4)  # a step takes four of them
        return torch.ones(5) * index / 100, torch.ones(2)


def slow_in_forward(model, batch):
    if torch.distributed.get_rank() == 1:
        time.sleep(SLEEP_S)
    return mse(model, batch)


@pytest.mark.parametrize("phase", ["forward", "data"])
def test_a_slow_rank_is_named_and_what_the_others_wait_is_told(training, phase):
    def make_slow():
        return nn.Linear(5, 2), Slow(1) if phase == "data" else make(160)[1], None

    step = slow_in_forward if phase == "forward" else mse
    result = training(2, make_slow, {"training_step": step}, batch_size=8, max_steps=20)
    warm = result.history["step"] > 3
    slowest, own = result.history["slowest_rank"][warm], result.history[f"{phase}_s"][warm]
    assert (slowest == 1).mean() >= 0.9
    assert own.min() >= SLEEP_S
    assert SLEEP_S * 0.8 <= np.median(result.history["wait_s"][warm]) <= SLEEP_S * 2
    assert np.median(result.history["sync_s"][warm]) < SLEEP_S / 2, "the slowest rank's own sync: nobody lets it wait"
    rows = [event.data["ranks"] for event in result.of_kind("steps") if event.data["step"][0] > 3]
    assert np.median([ranks[0]["sync_s"] for ranks in rows]) >= SLEEP_S * 0.8, "rank 0 waits in its sync phase"
    assert np.median([ranks[0]["backward_s"] for ranks in rows]) < SLEEP_S / 2
    state = RunState()
    for event in result.events:
        state.fold(event)
    assert state.steady.slowest[1] > state.steady.slowest.get(0, 0)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_throughput_is_that_of_the_steps_wherever_epochs_end(training, nproc, accumulate):
    """Epochs of 5 steps and a tail of 3 samples, each followed by a validation that takes as long as 20 steps."""

    def slow(model, batch):
        time.sleep(SLEEP_S / accumulate)
        return mse(model, batch)

    def validation_step(model, batch):
        time.sleep(10 * SLEEP_S)
        return mse(model, batch)

    hooks = {"training_step": slow, "validation_step": validation_step}
    result = training(nproc, lambda: (*make(43)[:2], make(16)[1]), hooks, batch_size=8, val_batch_size=8, epochs=4, drop_last=False, accumulate=accumulate)
    assert result.history["samples"].tolist() == 4 * [8, 8, 8, 8, 8, 3]
    reports = [event.data for event in result.of_kind("steps") if not any(event.data["warmup"])]
    assert len(reports) >= 4
    for data in reports:
        most = sum(data["samples"]) / len(data["samples"]) / SLEEP_S
        rates = [row["samples_per_s"] for row in data["ranks"]]
        assert 0.4 * most < sum(rates) < 1.05 * most, data
        assert list(values_of(Event("", 0, 0, 0, 0.0, 0.0, "steps", data)))[-1][1]["throughput/samples_per_s"] == pytest.approx(sum(rates))
    state = RunState()
    for event in result.events:
        state.fold(event)
    assert 0.5 < state.samples_per_s / (43 / (6 * SLEEP_S)) < 1.05
    assert sum(row.samples_per_s for row in state.ranks.values()) == pytest.approx(sum(row["samples_per_s"] for row in reports[-1]["ranks"]))


NUMBER = r"-?\d+\.\d{3}"
LINE = re.compile(
    rf"^Train Epoch: (?P<epoch>\d+) \[(?P<seen>\d+)/(?P<of>\d+) \((?P<share>\d+)%\)\]   Loss: (?P<loss>{NUMBER}) \((?P<mean>{NUMBER})\)"
    rf"   Time Dataloader: {NUMBER} \({NUMBER}\)   Time Network: {NUMBER} \({NUMBER}\)(?P<aggregation>   Time Loss Aggregation: {NUMBER} \({NUMBER}\))?$"
)


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_log_line_of_rank_0(training, tmp_path, nproc):
    def make_logged():
        import nbddp.worker.report

        nbddp.worker.report.LOG_PERIOD_S = 0.0
        sys.stdout = (tmp_path / f"log-{torch.distributed.get_rank()}").open("w", buffering=1)
        net, train, _ = make(59)
        return net, train, TensorDataset(*make(6)[1].tensors)

    def step(model, batch):
        return {"loss": mse(model, batch) * 0 + batch[0].sum() * 0 + len(batch[0])}  # the number of samples: 4 or 8, in the tail 1, 2 or 3

    result = training(nproc, make_logged, {"training_step": lambda model, batch: {**step(model, batch)}}, batch_size=8, epochs=2, drop_last=False)
    lines = (tmp_path / "log-0").read_text().splitlines()
    parsed = [LINE.match(line) for line in lines if line.startswith("Train Epoch")]
    assert all(parsed)
    assert len(parsed) == len(result.of_kind("steps"))
    ends = [line for line in parsed if line["seen"] == "59"]
    assert [line["epoch"] for line in ends] == ["1", "2"]
    for line in parsed:
        assert line["of"] == "59"
        assert int(line["share"]) == 100 * int(line["seen"]) // 59
        assert (line["aggregation"] is not None) == (nproc > 1)
    for line in ends:  # the mean over samples: of 56 in batches, and 3 in the tail
        per_batch, tail = (8, 3) if nproc == 1 else (4, (2 * 2 + 1 * 1) / 3)
        assert float(line["mean"]) == pytest.approx((56 * per_batch + 3 * tail) / 59, abs=6e-4)
        assert float(line["loss"]) == pytest.approx(tail, abs=6e-4)
    assert any(line.startswith("Validation Epoch: 2   val_loss: ") for line in lines)
    if nproc > 1:
        assert (tmp_path / "log-1").read_text() == ""


def test_the_log_line_is_held_to_one_a_second_and_the_last_is_not_lost(training, tmp_path):
    def make_logged():
        sys.stdout = (tmp_path / "log").open("a", buffering=1)
        return make()

    training(1, make_logged, {"training_step": mse}, batch_size=8, max_steps=11)
    seen = [LINE.match(line)["seen"] for line in (tmp_path / "log").read_text().splitlines()]
    assert seen[-1] == "32"
    assert "56" in seen
    assert len(seen) <= 4


def test_phases_are_told_in_order_and_the_first_step_is_marked(training):
    net_and_data = make()

    result = training(2, lambda: (net_and_data[0], net_and_data[1], net_and_data[1]), {"training_step": mse}, batch_size=8)
    phases = [event.data for event in result.of_kind("phase") if event.rank == 0]
    names = [phase["phase"] for phase in phases]
    assert names[0] == "training"
    assert [index for index, phase in enumerate(phases) if phase.get("first_step")] == [1]
    assert names.index("validation") < names.index("checkpoint")
    assert names[-1] == "training"


def test_nothing_of_a_step_outlives_it(training):
    """Batches, outputs and graphs of a step are gone when the next one is made: telemetry keeps numbers."""
    import weakref

    alive = []

    def step(model, batch):
        assert not any(reference() is not None for reference in alive), "something of an earlier step is still alive"
        x, y = batch
        output = model(x)
        loss = nn.functional.mse_loss(output, y)
        alive[:] = [weakref.ref(output), weakref.ref(loss), weakref.ref(x)]
        return {"loss": loss, "output": output, "target": y, "weight": torch.tensor(float(len(x))), "scalar": loss.detach() * 2}

    training(2, make, {"training_step": step}, batch_size=8, accumulate=2, epochs=2)
