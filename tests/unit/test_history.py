from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbddp.events import EventWriter
from nbddp.kernel.history import EPOCH_COLUMNS, STEP_COLUMNS, History
from support.fake_run import FakeRun

if TYPE_CHECKING:
    from pathlib import Path

INTEGERS = {"step", "epoch", "stage", "samples", "slowest_rank"}


def steps(events: EventWriter, first: int, count: int, loss: float = 1.0, /, *, epoch: int = 0, stage: int = 0, **scalars: list[float]) -> None:
    numbers = list(range(first, first + count))
    rest = {name: [0 if name in INTEGERS | {"warmup"} else 0.0] * count for name in (*STEP_COLUMNS, "warmup") if name not in ("step", "loss")}
    where = {"epoch": [epoch] * count, "stage": [stage] * count}
    events.emit("steps", **{**rest, **where, "step": numbers, "loss": [loss] * count, "scalars": scalars})


def test_the_names_are_there_before_anything_happened(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert tuple(history.steps) == STEP_COLUMNS
    assert tuple(history.epochs) == EPOCH_COLUMNS
    assert all(len(column) == 0 for column in history.steps.values())
    assert {name for name, column in history.steps.items() if column.dtype == np.int64} == INTEGERS
    assert all(column.dtype == np.float64 for name, column in history.steps.items() if name not in INTEGERS)


def test_one_entry_per_step_and_per_epoch(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(1000)
    history = History(run.run_dir.events)
    columns = history.steps
    assert columns["step"].tolist() == list(range(1, 1001))
    assert columns["epoch"].tolist() == [1] * 390 + [2] * 390 + [3] * 220
    assert {len(column) for column in columns.values()} == {1000}
    assert columns["accuracy"].min() > 0
    assert columns["slowest_rank"].mean() > 0.9
    assert history.epochs["step"].tolist() == [390, 780]
    assert history.epochs["loss"][0] == pytest.approx(columns["loss"][:390].mean())
    assert np.isfinite(history.epochs["val_loss"]).all()
    run.end()


def test_it_grows_by_what_is_new_and_arrays_that_were_handed_out_stay(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(700)
    history = History(run.run_dir.events)
    before = history.steps
    losses = before["loss"].copy()
    run.train(900)
    assert len(history.steps["loss"]) == 1600
    assert (before["loss"] == losses).all()
    assert len(before["loss"]) == 700
    assert (history.steps["loss"][:700] == losses).all()
    assert (history.steps["step"] == np.arange(1, 1601)).all()
    with pytest.raises(ValueError, match="read-only"):
        history.steps["loss"][0] = 0.0
    run.end()


def test_losses_that_are_not_finite_and_scalars_that_come_late(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    steps(events, 1, 1, math.nan)
    steps(events, 2, 1, math.inf, late=[5.0])
    steps(events, 3, 1, -math.inf)
    events.close()
    columns = History(tmp_path).steps
    np.testing.assert_array_equal(columns["loss"], [math.nan, math.inf, -math.inf])
    np.testing.assert_array_equal(columns["late"], [math.nan, 5.0, math.nan])


def test_a_scalar_does_not_take_the_place_of_a_column(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    steps(events, 1, 1, 2.0, loss=[7.0])
    events.close()
    assert History(tmp_path).steps["loss"].tolist() == [2.0]


def test_only_rank_0_counts(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = EventWriter(tmp_path / f"rank-0000{rank}.0.jsonl", run="r", rank=rank)
        steps(events, 1, 10)
        events.close()
    assert len(History(tmp_path).steps["step"]) == 10


def test_a_later_attempt_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    first = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    history = History(tmp_path)
    for epoch in (1, 2, 3):
        steps(first, 10 * epoch - 9, 10, 1.0)
        first.emit("epoch", epoch=epoch, step=10 * epoch, stage=0, loss=1.0, duration_s=1.0)
    assert len(history.steps["step"]) == 30
    second = EventWriter(tmp_path / "rank-00000.1.jsonl", run="r", rank=0, attempt=1)
    assert len(history.steps["step"]) == 30  # it has not made a step yet
    steps(second, 21, 5, 2.0, fresh=[1.0] * 5)
    columns = history.steps
    assert columns["step"].tolist() == list(range(1, 26))
    assert columns["loss"].tolist() == [1.0] * 20 + [2.0] * 5
    assert np.isnan(columns["fresh"][:20]).all()
    assert columns["step"].dtype == np.int64
    assert history.epochs["epoch"].tolist() == [1, 2]
    third = EventWriter(tmp_path / "rank-00000.2.jsonl", run="r", rank=0, attempt=2)
    steps(third, 11, 2, 3.0)
    assert history.steps["loss"].tolist() == [1.0] * 10 + [3.0] * 2
    assert history.epochs["epoch"].tolist() == [1]
    for events in (first, second, third):
        events.close()


def test_a_validation_within_an_epoch_belongs_to_no_epoch(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    events.emit("validation", epoch=1, step=5, values={"val_loss": 9.0})
    events.emit("epoch", epoch=1, step=10, stage=0, loss=1.0, duration_s=2.0)
    events.emit("validation", epoch=1, step=10, values={"val_loss": "nan", "val_accuracy": 0.5})
    events.emit("epoch", epoch=2, step=20, stage=0, loss=0.5, duration_s=2.0)
    events.emit("validation", epoch=3, step=25, values={"val_loss": 8.0})
    events.close()
    epochs = History(tmp_path).epochs
    np.testing.assert_array_equal(epochs["val_loss"], [math.nan, math.nan])
    np.testing.assert_array_equal(epochs["val_accuracy"], [0.5, math.nan])
    assert epochs["duration_s"].tolist() == [2.0, 2.0]


def epoch(events: EventWriter, number: int, step: int, *, whole: bool = True, loss: float = 1.0, **values: float) -> None:
    events.emit("epoch", epoch=number, step=step, stage=0, loss=loss, duration_s=1.0, whole=whole, values={"accuracy": loss / 2})
    if values:
        events.emit("validation", epoch=number, step=step, values=values)


def events_of(folder: Path) -> EventWriter:
    folder.mkdir(exist_ok=True)
    return EventWriter(folder / "rank-00000.0.jsonl", run="r", rank=0)


def test_scalars_of_an_epoch_are_columns_of_it(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    epoch(events, 1, 10, loss=3.0)
    events.close()
    assert History(tmp_path).epochs["accuracy"].tolist() == [1.5]


def test_the_parents_come_first_up_to_the_checkpoint(tmp_path: Path) -> None:
    """Ten steps an epoch: the first run goes on to step 35, the second from 20 to 27, in epoch 3, the third from 25."""
    first, second, third = (events_of(tmp_path / name) for name in "abc")
    for number in (1, 2, 3):
        steps(first, 10 * number - 9, 10, 1.0)
        epoch(first, number, 10 * number, val_loss=0.1 * number)
    steps(first, 31, 5, 1.0)
    steps(second, 21, 7, 2.0, extra=[5.0] * 7)
    epoch(second, 3, 27, whole=False, loss=2.0)
    history = History(tmp_path / "c", [(tmp_path / "a", 20), (tmp_path / "b", 25)])
    assert history.steps["loss"].tolist() == [1.0] * 20 + [2.0] * 5, "the third has not begun"
    assert history.epochs["epoch"].tolist() == [1, 2], "the third epoch is under way again"
    steps(third, 26, 9, 3.0, late=[7.0] * 9)
    epoch(third, 3, 30, loss=3.0, val_loss=0.9)
    columns, epochs = history.steps, history.epochs
    assert columns["step"].tolist() == list(range(1, 35))
    assert columns["loss"].tolist() == [1.0] * 20 + [2.0] * 5 + [3.0] * 9
    np.testing.assert_array_equal(columns["extra"], [math.nan] * 20 + [5.0] * 5 + [math.nan] * 9)
    np.testing.assert_array_equal(columns["late"], [math.nan] * 25 + [7.0] * 9)
    assert (epochs["epoch"].tolist(), epochs["step"].tolist(), epochs["loss"].tolist()) == ([1, 2, 3], [10, 20, 30], [1.0, 1.0, 3.0])
    np.testing.assert_allclose(epochs["val_loss"], [0.1, 0.2, 0.9])
    assert list(columns)[: len(STEP_COLUMNS)] == list(STEP_COLUMNS)
    assert columns["step"].dtype == epochs["epoch"].dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        columns["loss"][0] = 0.0
    for events in (first, second, third):
        events.close()


def test_an_epoch_that_was_validated_only_by_the_child_is_there_once(tmp_path: Path) -> None:
    parent, child = events_of(tmp_path / "a"), events_of(tmp_path / "b")
    steps(parent, 1, 10)
    epoch(parent, 1, 10)  # stopped within its validation
    history = History(tmp_path / "b", [(tmp_path / "a", 10)])
    assert history.epochs["epoch"].tolist() == [1]
    epoch(child, 1, 10, val_loss=0.5)
    assert history.epochs["val_loss"].tolist() == [0.5]
    for events in (parent, child):
        events.close()


def test_an_epoch_that_a_stage_ended_within_stays(tmp_path: Path) -> None:
    parent, child = events_of(tmp_path / "a"), events_of(tmp_path / "b")
    steps(parent, 1, 7)
    epoch(parent, 1, 4)
    epoch(parent, 2, 7, whole=False)
    steps(child, 8, 1, epoch=3, stage=1)
    history = History(tmp_path / "b", [(tmp_path / "a", 7)])
    assert history.epochs["epoch"].tolist() == [1, 2]
    epoch(child, 3, 8)
    assert history.epochs["epoch"].tolist() == [1, 2, 3]
    for events in (parent, child):
        events.close()


def test_a_run_that_ended_within_an_epoch_keeps_what_it_had_of_it(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    steps(events, 1, 7)
    epoch(events, 1, 7, whole=False)
    events.close()
    assert History(tmp_path).epochs["step"].tolist() == [7]


def test_a_parent_without_files_leaves_what_is_there(tmp_path: Path) -> None:
    child = events_of(tmp_path / "b")
    steps(child, 11, 5, 2.0)
    assert History(tmp_path / "b", [(tmp_path / "nowhere", 10)]).steps["step"].tolist() == [11, 12, 13, 14, 15]
    child.close()


def test_reading_goes_on_after_the_files_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    events = EventWriter(folder / "rank-00000.0.jsonl", run="r", rank=0)
    steps(events, 1, 10)
    events.close()
    history = History(folder)
    assert len(history.steps["step"]) == 10
    (folder / "rank-00000.0.jsonl").unlink()
    folder.rmdir()
    assert len(history.steps["step"]) == 10
