"""When a run that stands still counts as hung, and whom the others wait for."""

from __future__ import annotations

from typing import Any

import pytest

from nbddp.events import Event
from nbddp.launch.progress import Progress, RankProgress
from nbddp.supervisor.hang import HangWatch, culprit


def hung_after(watch: HangWatch, now: float, *, first_step: bool = True, until: float = 10_000.0) -> float | None:
    """Seconds without progress until the watch says so, in ticks of 0.5 s."""
    began = now
    while now < until:
        now += 0.5
        if watch.tick(now, moved=False, first_step=first_step):
            return now - began
    return None


def test_no_progress_for_the_configured_time() -> None:
    watch = HangWatch(2.0, now=100.0)
    watch.tick(100.5, moved=True, first_step=True)
    assert hung_after(watch, 100.5) == 2.5
    assert watch.quiet_s == 2.5


def test_before_the_first_step_there_is_more_time() -> None:
    assert hung_after(HangWatch(2.0, now=0.0), 0.0, first_step=False) == 10.5


def test_a_run_of_long_steps_is_given_ten_of_them() -> None:
    watch, now = HangWatch(2.0, now=0.0), 0.0
    watch.tick(now, moved=True, first_step=True)
    for _ in range(3):
        for tick in range(4):
            now += 0.5
            assert not watch.tick(now, moved=tick == 3, first_step=True)
    assert hung_after(watch, now) == 20.5  # ten times the gaps of 2 s


def test_the_way_to_the_first_step_is_no_measure() -> None:
    watch, now = HangWatch(2.0, now=0.0), 0.0
    while now < 8.0:
        now += 0.5
        watch.tick(now, moved=False, first_step=False)
    watch.tick(now, moved=True, first_step=True)
    assert hung_after(watch, now) == 2.5


def test_time_in_which_the_supervisor_did_not_run_does_not_count() -> None:
    watch = HangWatch(2.0, now=0.0)
    watch.tick(0.5, moved=True, first_step=True)
    assert not watch.tick(5000.0, moved=False, first_step=True)  # a stopped process, or a machine that slept
    assert watch.quiet_s == 1.0


def row(rank: int, phase: str, position: tuple[int, ...] | None = (1, 5), heard: float = 100.0) -> RankProgress:
    return RankProgress(rank, phase=phase, place=None if position is None else (position, phase), heard=heard)


@pytest.mark.parametrize(
    "rows, rank",
    [
        ([row(0, "sync"), row(1, "forward")], 1),
        ([row(0, "sync"), row(1, "data"), row(2, "backward")], 1),
        ([row(0, "sync"), row(1, "sync")], None),
        ([row(0, "forward"), row(1, "forward")], None),
        ([row(0, "forward", (1, 6)), row(1, "sync", (1, 5))], 1),  # behind
        ([row(0, "sync", (1, 5, 9)), row(1, "sync", (1, 5, 8))], 1),
        ([row(0, "sync", heard=100.0), row(1, "sync", heard=50.0)], 1),  # silent: stopped, or a thread holds the interpreter
        ([row(0, "sync", heard=100.0), row(1, "sync", heard=97.0)], None),
        ([row(0, "loading", None), row(1, "joining", None)], None),
        ([], None),
    ],
)
def test_whom_the_others_wait_for(rows: list[RankProgress], rank: int | None) -> None:
    found = culprit({item.rank: item for item in rows})
    assert (None if found is None else found.rank) == rank


# -- the fold of events that the watch is fed with


def event(rank: int, kind: str, mono: float = 0.0, **data: Any) -> Event:
    return Event("r", rank, 0, 0, 0.0, mono, kind, data)


def test_what_shows_that_a_rank_got_on() -> None:
    progress = Progress()
    assert progress.fold(event(0, "started", process=[7, 8]))
    assert progress.fold(event(0, "heartbeat", step=0, phase="loading", position=[0, 0]))
    assert not progress.fold(event(0, "heartbeat", step=0, phase="loading", position=[0, 0], memory=5))
    assert progress.fold(event(0, "heartbeat", step=0, phase="forward", position=[0, 0]))
    assert progress.fold(event(0, "heartbeat", step=0, phase="forward", position=[0, 1]))
    assert not progress.fold(event(0, "message", text="a warning that repeats"))
    assert not progress.fold(event(-1, "launched", fork_server=[1, 2]))
    assert progress.launched == {"fork_server": [1, 2]}
    assert progress.ranks[0].process is not None
    assert not progress.first_step


def test_the_first_failure_of_a_rank_counts() -> None:
    progress = Progress()
    progress.fold(event(1, "failed", 5.0, type="ValueError"))
    progress.fold(event(1, "failed", 6.0, type="RuntimeError"))
    assert (progress.ranks[1].failed, progress.ranks[1].failed_time) == ({"type": "ValueError"}, 5.0)


def test_the_result_of_a_run() -> None:
    progress = Progress()
    progress.fold(event(0, "phase", phase="training", first_step=True))
    progress.fold(event(0, "steps", step=[1, 2], epoch=[1, 1]))
    assert (progress.first_step, progress.step, progress.epoch) == (True, 2, 1)
    progress.fold(event(0, "stopping", reason="asked"))
    progress.fold(event(0, "finished", step=3, epoch=2, stopped=True, reason=None))
    assert not progress.all_finished(2)
    progress.fold(event(1, "finished", step=9, epoch=9))
    assert progress.all_finished(2)
    expected = {"state": "stopped", "time": 1.5, "error": None, "first_step": True, "step": 3, "epoch": 2, "stop_reason": "asked"}
    result = progress.result("stopped", None, 1.5)
    assert result.pop("summary") == {"step": 3, "epoch": 2, "loss": None, "best": None}
    assert result == expected


def compile_for(watch: HangWatch, now: float, seconds: float) -> tuple[bool, float]:
    hung, until = False, now + seconds
    while now < until:
        now += 0.5
        hung = hung or watch.tick(now, moved=False, first_step=True, compiling=True)
    return hung, now


def test_a_rank_that_compiles_has_the_time_that_it_was_given() -> None:
    watch = HangWatch(2.0, now=0.0, compile_timeout_s=100.0)
    hung, now = compile_for(watch, 0.0, 160.0)
    assert not hung
    assert watch.tick(now + 0.5, moved=False, first_step=True, compiling=True)  # it should have ended itself


def test_the_time_of_compiling_is_no_measure_for_steps() -> None:
    watch = HangWatch(2.0, now=0.0, compile_timeout_s=100.0)
    watch.tick(0.5, moved=True, first_step=True)
    _, now = compile_for(watch, 0.5, 60.0)
    assert not watch.tick(now, moved=True, first_step=True)
    assert hung_after(watch, now) == 2.5
