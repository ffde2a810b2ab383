"""How a run ends: at its last epoch or step, by time, or when it is asked to, and always at the same step on all ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp.events import EventReader
from nbddp.rundir import RunDir

pytestmark = pytest.mark.distributed


def make(n_val=16):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 5, generator=generator)
    torch.manual_seed(5)
    data = TensorDataset(x, x[:, :2] * 2)
    return nn.Linear(5, 2), data, TensorDataset(*data[[index % 32 for index in range(n_val)]]) if n_val else None


def mse(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def run(training, nproc=2, hooks=None, make=make, **options):
    return training(nproc, make, {"training_step": mse, **(hooks or {})}, **{"batch_size": 8, **options})


def last(result):
    return torch.load(result.run.checkpoints / "last.pt", weights_only=True)


def ends_alike(result):
    (progress,) = set(result.progress)
    return progress


@pytest.mark.parametrize("nproc", [1, 2])
def test_max_steps_ends_within_an_epoch(training, nproc):
    result = run(training, nproc, max_steps=6)
    assert ends_alike(result) == (6, 2, False, None)
    assert [(e.data["epoch"], e.data["step"], e.data["whole"], e.data["samples"]) for e in result.of_kind("epoch")] == [(1, 4, True, 32), (2, 6, False, 16)]
    assert [event.data["step"] for event in result.of_kind("validation")] == [4, 6]
    assert np.isfinite(result.epochs["val_loss"]).all()
    state = last(result)
    assert (state["step"], state["epoch"], state["epochs_done"], state["sampler"]["step"]) == (6, 2, 1, 2)


@pytest.mark.parametrize(
    "options, steps", [({"epochs": 2, "max_steps": 100}, 8), ({"epochs": 5, "max_steps": 8}, 8), ({"epochs": 5, "max_steps": 7}, 7)], ids=str
)
def test_the_first_limit_that_is_reached_ends_the_run(training, options, steps):
    result = run(training, **options)
    assert ends_alike(result)[0] == steps
    assert result.epochs["step"][-1] == steps
    assert len(result.of_kind("validation")) == 2


def test_max_time_ends_the_run_in_order(training):
    def slow(model, batch):
        time.sleep(0.01)
        return mse(model, batch)

    began = time.monotonic()
    result = run(training, hooks={"training_step": slow}, max_time=0.5)
    step, epoch, stopped, reason = ends_alike(result)
    assert 0.5 < time.monotonic() - began < 10
    assert step > 8
    assert epoch > 2, "without epochs they are unlimited"
    assert (stopped, reason) == (False, "max_time")
    assert result.of_kind("validation")[-1].data["step"] == step
    assert last(result)["step"] == step
    assert result.of_kind("stopping")[0].data["reason"] == "max_time"


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_stop_before_the_first_step_is_heeded_soon(training, nproc):
    result = training(nproc, make, {"training_step": mse}, ask="stop", batch_size=nproc * 2, epochs=100)
    step, epoch, stopped, reason = ends_alike(result)
    assert step <= 3
    assert (epoch, stopped, reason) == (1, True, "asked")
    assert not result.of_kind("validation")
    assert last(result)["step"] == step
    assert result.of_kind("epoch")[0].data["whole"] is False


def ask_when(folder, condition):
    """Ask the run of this folder to stop once its events say so; from a thread, as another process would."""

    def watch():
        deadline = time.monotonic() + 30
        seen = []
        while time.monotonic() < deadline:
            for path in folder.glob("runs/2*"):
                reader = EventReader(path / "events")
                seen = reader.poll()
                if condition(seen):
                    RunDir(path).ask("stop")
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_all_ranks_leave_at_the_same_step(training, tmp_path):
    def slow(model, batch):
        time.sleep(0.002)
        return mse(model, batch)

    thread = ask_when(tmp_path, lambda events: any(event.kind == "steps" and event.data["step"][-1] >= 20 for event in events))
    result = run(training, 3, {"training_step": slow}, batch_size=3, epochs=10_000)
    thread.join()
    step, _, stopped, reason = ends_alike(result)
    assert (stopped, reason) == (True, "asked")
    assert step >= 20
    assert result.history["step"].tolist() == list(range(1, step + 1))
    assert last(result)["step"] == step
    (stopping,) = result.of_kind("stopping")
    assert (stopping.data["step"], stopping.data["reason"]) == (step, "asked")
    for weights in result.weights:
        np.testing.assert_array_equal(weights["weight"], last(result)["model"]["weight"].numpy())


def asking(folder, at):
    """A validation step that asks for a stop in its n-th call, and takes 20 ms."""
    calls = []

    def validation_step(model, batch):
        calls.append(1)
        time.sleep(0.02)
        if len(calls) == at:
            (path,) = folder.glob("runs/2*")
            RunDir(path).ask("stop")
        return mse(model, batch)

    return {"validation_step": validation_step}


@pytest.mark.parametrize("epochs", [1, 5], ids=["of the last epoch", "of the first epoch"])
def test_a_stop_leaves_a_long_validation_and_the_epoch_stays_open(training, tmp_path, epochs):
    began = time.monotonic()
    result = run(training, hooks=asking(tmp_path, 3), make=lambda: make(1200), epochs=epochs, val_batch_size=4)
    assert time.monotonic() - began < 4, "300 batches take 6 s"
    assert ends_alike(result) == (4, 1, True, "asked")
    assert not result.of_kind("validation")
    assert not (result.run.checkpoints / "best.pt").exists()
    state = last(result)
    assert (state["step"], state["epochs_done"], state["sampler"]["step"], state["value"]) == (4, 0, 4, None)


def test_a_stop_in_a_validation_by_steps_takes_no_further_step(training, tmp_path):
    result = run(training, hooks=asking(tmp_path, 3), make=lambda: make(800), epochs=5, val_batch_size=4, val_every="2 steps")
    assert ends_alike(result) == (2, 1, True, "asked")
    assert last(result)["step"] == 2


def test_a_stop_that_comes_when_all_is_done_stops_nothing(training, tmp_path):
    result = run(training, hooks=asking(tmp_path, 2), make=lambda: make(16), epochs=1, val_batch_size=8)
    assert ends_alike(result) == (4, 1, False, None)
    assert len(result.of_kind("validation")) == 1
    assert not result.of_kind("stopping")
    assert last(result)["epochs_done"] == 1


@pytest.mark.parametrize(
    "options, validated",
    [
        ({"epochs": 5, "val_every": 2}, [8, 16, 20]),
        ({"epochs": 3, "val_every": "3 steps"}, [3, 6, 9, 12]),
        ({"epochs": 2, "val_every": "4 steps"}, [4, 8]),
        ({"max_steps": 7, "val_every": "7 steps"}, [7]),
        ({"max_steps": 7, "val_every": "100 steps"}, [7]),
    ],
    ids=str,
)
def test_validation_comes_when_it_is_due_and_at_the_end_and_once_for_the_same_weights(training, options, validated):
    result = run(training, **options)
    assert [event.data["step"] for event in result.of_kind("validation")] == validated
    by_step = {event.data["step"]: event.data["values"]["val_loss"] for event in result.of_kind("validation")}
    for step, value in zip(result.epochs["step"], result.epochs["val_loss"], strict=True):
        assert value == by_step[step] if step in by_step else np.isnan(value)


def test_without_validation_data_the_loss_is_monitored(training):
    result = run(training, make=lambda: make(0), epochs=2)
    assert not result.of_kind("validation")
    best = torch.load(result.run.checkpoints / "best.pt", weights_only=True)
    assert best["value"] == pytest.approx(result.epochs["loss"].min(), rel=1e-12)
