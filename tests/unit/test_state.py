from __future__ import annotations

import math
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.curve import CURVE_POINTS, Curve
from nbddp.events import Event, EventReader
from nbddp.kernel.follow import fold_all
from nbddp.state import EPOCHS, PHASES, RunState, StageRecord
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path


def event(kind: str, rank: int = 0, mono: float = 0.0, **data: object) -> Event:
    return Event("r", rank, 0, 0, 1000.0 + mono, mono, kind, dict(data))


def steps_event(
    first: int, count: int, *, loss: object = 1.0, warmup: int = 0, step_s: float = 0.01, samples: int = 8, mono: float = 0.0, slowest: int = 0
) -> Event:
    columns: dict[str, Any] = {
        "step": list(range(first, first + count)),
        "epoch": [1] * count,
        "stage": [0] * count,
        "loss": [loss] * count,
        "lr": [0.1] * count,
        "samples": [samples] * count,
        "warmup": [warmup] * count,
        **{f"{phase}_s": [step_s / len(PHASES)] * count for phase in PHASES},
        "wait_s": [0.002] * count,
        "slowest_rank": [slowest] * count,
    }
    return event("steps", mono=mono, **columns)


def test_a_curve_keeps_few_points_that_average_all() -> None:
    curve = Curve(points=100)
    for x in range(10_000):
        curve.add(float(x), 2.0 * x)
    assert len(curve.x) < 100
    assert curve.y == pytest.approx([2 * x for x in curve.x])
    assert curve.x[0] == pytest.approx(63.5)  # the first of strides of 128


def test_a_value_that_is_not_finite_is_left_out_of_the_mean_and_alone_it_is_a_gap() -> None:
    curve = Curve(points=4)
    for x, y in enumerate([1.0, math.nan, math.inf, math.nan, 5.0, 7.0]):
        curve.add(float(x), y)
    assert curve.x == [0.5, 2.5, 4.5]
    assert curve.y[0] == 1.0
    assert math.isnan(curve.y[1])
    assert curve.y[2] == 6.0


def test_sparse_nans_do_not_erase_a_long_curve() -> None:
    curve = Curve()
    for x in range(200_000):
        curve.add(float(x), math.nan if x % 100 == 0 else 1.0)
    assert curve.y == [1.0] * len(curve.y)


def test_a_whole_run(tmp_path: Path) -> None:
    state = fold_all(finished(tmp_path))
    assert (state.state, state.step, state.epoch, state.done) == ("finished", 3900, 10, True)
    assert state.progress == 1.0
    assert state.eta_s == 0
    assert [record.epoch for record in state.epochs] == list(range(1, 11))
    assert all(record.values["val_loss"] > 0 for record in state.epochs)
    best = min(state.epochs, key=lambda record: record.values["val_loss"])
    assert (state.lowest["val_loss"].epoch, state.lowest["val_loss"].value) == (best.epoch, best.values["val_loss"])
    assert state.validated == state.epochs[-1].values
    assert max(state.steady.slowest, key=lambda rank: state.steady.slowest[rank]) == 1
    assert sorted(state.ranks) == [0, 1]
    assert all(row.finished and row.device == "cpu" and row.memory > 0 and set(row.times_s) == set(PHASES) for row in state.ranks.values())
    assert len(state.train_curve.x) <= CURVE_POINTS
    assert [entry["name"] for entry in state.checkpoints] == ["last"]


def test_throughput_and_time_to_go_leave_warm_up_out_and_do_not_need_long_epochs() -> None:
    state = RunState(total_steps=1000)
    state.fold(steps_event(1, 10, warmup=1, step_s=5.0, mono=50.0))
    assert state.eta_s is None
    for index in range(20):  # an epoch end after each report
        state.fold(steps_event(11 + 10 * index, 10, step_s=0.01, samples=8, mono=50.0 + 0.1 * (index + 1)))
        state.fold(event("epoch", epoch=index + 1, step=20 + 10 * index, stage=0, loss=1.0, duration_s=0.1))
    assert state.steps_per_s == pytest.approx(100)
    assert state.samples_per_s == pytest.approx(800)
    assert state.eta_s == pytest.approx((1000 - 210) / 100)
    assert state.steady.steps == 200
    assert state.steady.seconds == pytest.approx(2.0)


def test_time_to_go_counts_the_pauses_between_steps() -> None:
    state = RunState(total_steps=100)
    state.fold(steps_event(1, 10, step_s=0.01, mono=0.0))
    state.fold(steps_event(11, 10, step_s=0.01, mono=10.0))  # 1 s a step by the clock: validation in between
    assert state.steps_per_s == pytest.approx(100)
    assert state.eta_s == pytest.approx(80)


def test_without_a_number_of_steps_there_is_no_progress_and_no_time_to_go() -> None:
    state = RunState()
    state.fold(steps_event(1, 10))
    assert (state.progress, state.eta_s) == (None, None)


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_losses_that_are_not_finite_are_counted_and_no_lowest_value(loss: str) -> None:
    state = RunState()
    state.fold(steps_event(1, 5, loss=loss))
    state.fold(steps_event(6, 5, loss=2.0))
    state.fold(event("epoch", epoch=1, step=10, stage=0, loss=loss, duration_s=1.0))
    state.fold(event("validation", epoch=1, step=10, values={"val_loss": loss}))
    assert state.nonfinite_steps == 5
    assert state.lowest == {}
    assert not math.isfinite(state.epochs[-1].values["val_loss"])


def test_a_validation_within_an_epoch_is_no_part_of_the_epoch_before() -> None:
    state = RunState()
    state.fold(event("epoch", epoch=1, step=10, stage=0, loss=1.0, duration_s=1.0))
    state.fold(event("validation", epoch=2, step=15, values={"val_loss": 0.5}))
    assert state.epochs[-1].values == {}
    assert state.validated == {"val_loss": 0.5}
    assert (state.lowest["val_loss"].epoch, state.lowest["val_loss"].step) == (2, 15)
    assert state.val_curve.x == [15.0]


def test_checkpoints_replace_their_namesakes_and_what_they_removed() -> None:
    state = RunState()
    for epoch in (1, 2, 3):
        state.fold(event("checkpoint", name="last", file="last.pt", epoch=epoch, step=epoch, value=None, removed=[]))
        removed = [f"epoch-{epoch - 1:04d}"] if epoch > 1 else []
        state.fold(event("checkpoint", name=f"epoch-{epoch:04d}", file="", epoch=epoch, step=epoch, value=None, removed=removed))
    state.fold(event("checkpoint", name="best", file="best.pt", epoch=2, step=2, value=0.5, removed=[]))
    assert [(entry["name"], entry["epoch"]) for entry in state.checkpoints] == [("last", 3), ("epoch-0003", 3), ("best", 2)]
    assert state.best is not None
    assert state.best["value"] == 0.5


def test_stages_are_known_from_their_beginning_on() -> None:
    state = RunState()
    state.fold(event("stage", stage=0, name="head", step=0, trainable=10, lr=0.1, precision="bf16"))
    state.fold(steps_event(1, 10))
    state.fold(event("stage", stage=1, name="all", step=10, lr=None, precision="fp32"))
    assert state.stages == [StageRecord(0, "head", 0, "bf16", 0.1), StageRecord(1, "all", 10, "fp32", None)]
    assert state.stage == 1
    snapshot = state.snapshot()
    state.fold(event("stage", stage=2, name="more", step=20))
    assert [stage.name for stage in state.stages] == ["head", "all", "more"]
    assert [stage.name for stage in snapshot.stages] == ["head", "all"]


def test_what_is_reported_belongs_to_its_epoch() -> None:
    state = RunState()
    state.fold(event("epoch", epoch=1, step=10, stage=0, loss=1.0, duration_s=1.0, values={"acc": 0.5}))
    state.fold(event("validation", epoch=1, step=10, values={"val_loss": 2.0}))
    state.fold(event("reported", epoch=1, step=10, values={"score": 7, "gap": "nan"}))
    values = state.epochs[-1].values
    assert (values["acc"], values["val_loss"], values["score"]) == (0.5, 2.0, 7.0)
    assert math.isnan(values["gap"])
    assert set(state.lowest) == {"loss", "acc", "val_loss", "score"}
    assert state.validated == {"val_loss": 2.0}


def test_steps_that_the_loss_scaler_skipped_are_counted() -> None:
    state = RunState()
    columns = steps_event(1, 3).data
    state.fold(event("steps", **columns))
    state.fold(event("steps", **{**columns, "overflow": [1, 0, 1]}))
    assert state.overflows == 2


def test_how_long_compiling_took_and_what_a_stage_found_out() -> None:
    state = RunState()
    state.fold(event("phase", phase="compiling", mono=10.0))
    state.fold(event("phase", rank=1, phase="compiling", mono=11.0))
    state.fold(event("heartbeat", step=0, phase="compiling", mono=20.0))
    assert state.compile_s == 0
    state.fold(event("stage", stage=0, name="head", step=0, cores=8, mono=24.0))
    state.fold(event("phase", phase="training", mono=25.0))
    state.fold(event("phase", phase="validation", mono=90.0))
    assert state.compile_s == 15.0
    assert state.stage_facts["cores"] == 8
    state.fold(event("phase", phase="compiling", mono=100.0))
    state.fold(event("phase", phase="training", mono=103.0))
    assert state.compile_s == 3.0  # of the stage that it was for


def test_the_window_has_the_steps_without_the_warm_up() -> None:
    state = RunState()
    state.fold(steps_event(1, 3, warmup=1, step_s=9.0))
    state.fold(steps_event(4, 200, step_s=0.01))
    assert (state.window.total.steps, len(state.window.blocks)) == (200, 1)
    snapshot = state.snapshot()
    state.fold(steps_event(204, 200, step_s=0.01))
    assert (len(snapshot.window.blocks), len(state.window.blocks)) == (1, 2)


def test_kinds_that_are_not_known_change_nothing() -> None:
    state = RunState()
    before = repr(state)
    state.fold(event("gpu_temperature", rank=1, celsius=40))
    assert repr(state) == before


def test_a_report_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    state = RunState()
    columns = steps_event(1, 1).data
    state.fold(event("steps", **{**columns, "report": {"step": 1, "loss": "nan", "gpu_watts": 300}}))
    assert state.report.step == 1
    assert math.isnan(state.report.loss)
    assert state.report.epoch == 0


def test_a_terminal_state_stays_when_late_events_come() -> None:
    state = RunState()
    state.fold(event("exited", rank=-1, state="failed"))
    state.fold(steps_event(1, 5))
    state.fold(event("phase", phase="training"))
    assert state.state == "failed"


def test_the_last_word_tells_of_steps_without_a_report_and_how_it_came_to_the_end() -> None:
    state = RunState()
    state.fold(steps_event(1, 16))
    state.fold(event("stopping", reason="asked", text="stopped as asked"))
    state.fold(event("exited", rank=-1, state="stopped", step=20, epoch=2, stop_reason="terminated"))
    assert (state.step, state.epoch, state.stop_reason, state.stop_text) == (20, 2, "terminated", "terminated")
    state = RunState()
    state.fold(steps_event(1, 16))
    state.fold(event("stopping", reason="asked", text="stopped as asked"))
    state.fold(event("exited", rank=-1, state="stopped", step=16, epoch=1, stop_reason="asked"))
    assert (state.step, state.epoch, state.stop_text) == (16, 1, "stopped as asked")


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(500)
    state, reader = RunState(), EventReader(run.run_dir.events)
    for known in reader.poll():
        state.fold(known)
    snapshot = state.snapshot()
    before = repr(snapshot), list(snapshot.train_curve.y), list(snapshot.val_curve.y)
    assert snapshot.step == 500
    run.train(800)
    run.fail()
    run.end("failed")
    for known in reader.poll():
        state.fold(known)
    assert state.step == 1300
    assert (repr(snapshot), snapshot.train_curve.y, snapshot.val_curve.y) == before


def test_a_million_steps_take_bounded_memory_and_little_time() -> None:
    state = RunState(total_steps=1_000_000)
    template = steps_event(0, 100).data
    began = time.process_time()
    for first in range(0, 1_000_000, 100):
        template["step"] = list(range(first, first + 100))
        state.fold(event("steps", mono=first * 1e-3, **template))
        state.fold(event("epoch", epoch=first // 100, step=first, stage=0, loss=1.0, duration_s=0.1))
        state.fold(event("validation", epoch=first // 100, step=first, values={"val_loss": 1.0}))
        state.fold(event("message", level="info", text=f"at {first}"))
    assert time.process_time() - began < 30  # 3 s on a quiet machine; a scan of all epochs at each validation would take minutes
    assert state.step == 999_999
    assert len(pickle.dumps(state)) < 500_000
    assert len(state.epochs) == EPOCHS
    assert len(state.messages) == 50
