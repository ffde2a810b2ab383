"""The losses of a run as curves: the same numbers as its history has, and what axes they lie over."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbddp.events import EventWriter
from nbddp.kernel.history import History
from nbddp.kernel.losses import EPOCH, POINTS, STEP, TIME, Losses, Steps, attempts, thinned
from nbddp.rundir import RunDir
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def goes_on(root: Path, parent: FakeRun, until: int, steps: int) -> FakeRun:
    made = FakeRun(root, epochs=3, steps_per_epoch=10, report_steps=5)
    spec = made.run_dir.read_spec() or {}
    made.run_dir.write_spec({**spec, "parent": parent.run_dir.id, "resume": str(parent.run_dir.checkpoints / "last.pt"), "resume_step": until})
    made.step, made.epoch = until, until // 10 + 1
    made.start()
    made.train(steps)
    return made


def same(found: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(found, expected)


def test_every_step_has_the_loss_that_the_history_has(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, epochs=3, steps_per_epoch=130, report_steps=50)
    run.start()
    run.train(300, losses=[math.nan, math.inf, -math.inf, *(1 / step for step in range(1, 298))])
    history, losses = History(run.run_dir.events), Losses.of(run.run_dir)
    same(losses.train[STEP], history.steps["step"])
    same(losses.loss, history.steps["loss"])
    same(losses.val[STEP], history.epochs["step"])
    same(losses.val_loss, history.epochs["val_loss"])
    run.end()


def test_a_run_that_goes_on_from_others_has_their_steps_first(tmp_path: Path) -> None:
    first = FakeRun(tmp_path, epochs=3, steps_per_epoch=10, report_steps=5)
    first.start()
    first.train(25)
    first.end("stopped")
    second = goes_on(tmp_path, first, 20, 5)
    second.end("failed")
    third = goes_on(tmp_path, second, 23, 7)
    third.end()
    losses = Losses.of(third.run_dir)
    history = History(third.run_dir.events, [(first.run_dir.events, 20), (second.run_dir.events, 23)])
    same(losses.train[STEP], np.arange(1, 31))
    same(losses.loss, history.steps["loss"])
    same(losses.val[STEP], np.array([10.0, 20.0, 30.0]))
    assert (np.diff(losses.train[TIME]) >= 0).all(), "the time of a parent comes before that of the run"
    assert losses.missing is None
    shutil.rmtree(first.run_dir.path)
    shorter = Losses.of(third.run_dir)
    same(shorter.train[STEP], np.arange(21, 31))
    assert shorter.missing == first.run_dir.id


def test_a_later_attempt_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, epochs=3, steps_per_epoch=10, report_steps=5)
    run.start()
    run.train(23)
    for attempt, steps in ((1, range(21, 24)), (10, range(22, 26)), (2, range(22, 23))):  # in another order than their numbers'
        events = EventWriter(run.run_dir.rank_events(0, attempt), run=run.run_dir.id, rank=0, attempt=attempt)
        columns = {"epoch": [3] * len(steps), "stage": [0] * len(steps), "loss": [float(attempt)] * len(steps), "lr": [0.0] * len(steps)}
        events.emit("steps", step=list(steps), **columns, samples=[1] * len(steps))
        events.close()
    assert [path.name for path in attempts(run.run_dir)] == [f"rank-00000.{attempt}.jsonl" for attempt in (0, 1, 2, 10)]
    losses = Losses.of(run.run_dir)
    same(losses.train[STEP], np.arange(1, 26))
    assert losses.loss[20:].tolist() == [1.0, 10.0, 10.0, 10.0, 10.0]
    run.end()


def test_epochs_are_shares_of_samples_and_time_counts_from_the_request(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, epochs=2, steps_per_epoch=8, report_steps=3)
    run.start()
    run.train(12)
    run.end("stopped")
    spec = run.run_dir.read_spec() or {}
    spec["times"]["requested"] -= 100
    run.run_dir.write_spec(spec)
    losses = Losses.of(run.run_dir)
    np.testing.assert_allclose(losses.train[EPOCH], np.arange(1, 13) / 8)
    assert 100 < losses.train[TIME, 0] <= losses.train[TIME, -1] < 160
    assert losses.val[[STEP, EPOCH]].tolist() == [[8.0], [1.0]]
    assert losses.val[TIME] == losses.train[TIME, 7]


def test_lines_in_another_order_cut_or_damaged(tmp_path: Path) -> None:
    run = finished(tmp_path, epochs=1, steps_per_epoch=20, report_steps=5)
    path = run.rank_events(0, 0)
    lines = path.read_bytes().splitlines()
    steps = [index for index, line in enumerate(lines) if b'"kind":"steps"' in line]
    whole = Losses.of(run)
    for index in steps:
        record = json.loads(lines[index])
        record["data"] = dict(sorted(record["data"].items()))
        lines[index] = json.dumps(record, separators=(",", ":")).encode()
    path.write_bytes(b"\n".join(lines))
    same(Losses.of(run).train, whole.train)
    lines[steps[1]] = lines[steps[1]].replace(b'"loss":[', b'"loss":[{},')
    lines[steps[2]] = b'{"kind":"steps","time":1.0}'
    lines[-1:] = [lines[steps[3]][:150]]
    path.write_bytes(b"\n".join(lines))
    same(Losses.of(run).train[STEP], np.array([1.0, 2.0, 3.0, 4.0, 5.0, 16.0, 17.0, 18.0, 19.0, 20.0]))


@pytest.mark.parametrize(
    "line", [b"", b"{", b'{"kind":"epoch"}', b'{"kind":"steps","data":[]}', b'{"kind":"steps","data":{"step":[1],"epoch":[1],"loss":["x"]}}']
)
def test_what_is_no_line_of_steps_is_none(line: bytes) -> None:
    assert Steps.of(line) is None


def test_a_run_without_events(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "digits")
    losses = Losses.of(run)
    assert losses.train.shape == losses.val.shape == losses.thinned().train.shape == (4, 0)
    (run.events / "rank-00000.backup.jsonl").touch()
    assert attempts(run) == []
    shutil.rmtree(run.events)
    assert Losses.of(run).train.size == 0


def test_a_curve_that_is_drawn_is_thinned_to_means_of_what_is_finite() -> None:
    values = np.arange(10_000, dtype=float)
    short = thinned(values)
    assert POINTS / 2 <= len(short) <= POINTS
    assert short[0] == values[: -(-10_000 // POINTS)].mean()
    assert short[-1] > 9_980
    assert thinned(np.array([1.0, math.inf, 3.0]), 1).tolist() == [2.0]
    assert np.isnan(thinned(np.array([1.0, math.inf, math.nan, math.nan]), 2)).tolist() == [False, True]
    assert np.isnan(thinned(np.array([math.inf, 1.0]))).tolist() == [True, False]
    made = Losses(np.stack([values] * 4), np.stack([values] * 4), "gone").thinned()
    assert (made.train.shape, made.val.shape, made.missing) == ((4, len(short)), (4, len(short)), "gone")
