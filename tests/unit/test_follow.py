from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from nbddp.kernel.follow import Follower, fold_all
from nbddp.process import ProcessId
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbddp.rundir import RunDir
    from nbddp.state import RunState

END_S = 20.0


def never() -> None:
    raise AssertionError("a run that has a result, or a supervisor, needs no settling")


@pytest.fixture
def follow() -> Iterator[Callable[..., Follower]]:
    started: list[Follower] = []

    def start(run_dir: RunDir, settle: Callable[[], None] = never, *listeners: Callable[[RunState], None]) -> Follower:
        follower = Follower(run_dir, settle)
        for listener in listeners:
            follower.add_listener(listener)
        follower.start()
        started.append(follower)
        return follower

    yield start
    for follower in started:
        follower.stop()
        follower.join(END_S)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def no_process() -> ProcessId:
    """The identity of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessId.of(child.pid)
    child.wait()
    assert identity is not None
    return identity


def same(a: RunState, b: RunState) -> bool:
    return (a.step, a.state, a.epochs, a.checkpoints, a.train_curve.y, a.val_curve.y, a.ranks, a.steady.phases_s) == (
        (b.step, b.state, b.epochs, b.checkpoints, b.train_curve.y, b.val_curve.y, b.ranks, b.steady.phases_s)
    )


def test_a_run_is_followed_to_its_end(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    seen: list[RunState] = []
    follower = follow(run.run_dir, never, seen.append)
    assert follower.state.state == "starting"
    run.start()
    run.train(100)
    until(lambda: follower.state.step == 100)
    assert follower.state.state == "running"
    run.train(run.total_steps - 100)
    run.end()
    assert follower.done.wait(END_S)
    assert same(follower.state, fold_all(run.run_dir))
    assert follower.state.state == "finished"
    assert seen[-1] is follower.state
    assert follower.view_error is None
    assert follower.daemon
    assert follower.name.startswith("nbddp")


def test_the_state_at_the_end_has_every_event_however_they_race(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    for index in range(5):
        run = FakeRun(tmp_path, name=f"race{index}", report_steps=1)
        run.start()
        follower = follow(run.run_dir)
        run.train(1000)
        run.end("stopped")
        assert follower.done.wait(END_S)
        assert (follower.state.step, follower.state.state) == (1000, "stopped")


def test_a_finished_run_is_read_at_once_and_the_same(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run_dir = finished(tmp_path)
    follower = follow(run_dir)
    assert follower.done.wait(END_S)
    assert same(follower.state, fold_all(run_dir))


def test_states_that_were_handed_out_do_not_change(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.start()
    follower = follow(run.run_dir)
    run.train(100)
    until(lambda: follower.state.step == 100)
    state = follower.state
    points = len(state.train_curve.x)
    run.train(500)
    until(lambda: follower.state.step == 600)
    assert (state.step, len(state.train_curve.x)) == (100, points)
    assert follower.state is not state
    run.end()


def test_listeners_are_called_at_most_four_times_a_second(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    times: list[float] = []
    run = FakeRun(tmp_path, report_steps=1)
    run.start()
    began = time.monotonic()
    follower = follow(run.run_dir, never, lambda state: times.append(time.monotonic()))
    while time.monotonic() - began < 1.5:
        run.train(1)
        time.sleep(0.01)
    assert 2 <= len(times) <= 7
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= 0.2
    run.end()
    assert follower.done.wait(END_S)


def test_listeners_hear_of_a_run_in_which_nothing_happens(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    heard = threading.Semaphore(0)
    run = FakeRun(tmp_path)
    follow(run.run_dir, never, lambda state: heard.release())
    assert all(heard.acquire(timeout=END_S) for _ in range(3))
    run.end()


def test_a_listener_that_breaks_is_dropped_and_the_run_goes_on(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    calls: list[str] = []

    def broken(state: RunState) -> None:
        calls.append("broken")
        raise ValueError("no front end")

    run = FakeRun(tmp_path)
    run.start()
    follower = follow(run.run_dir, never, broken, lambda state: calls.append("sound"))
    until(lambda: "sound" in calls)
    run.train(200)
    run.end()
    assert follower.done.wait(END_S)
    assert follower.state.step == 200
    assert calls.count("broken") == 1
    assert calls.count("sound") >= 2
    assert str(follower.view_error) == "no front end"


def test_a_run_that_nobody_works_on_is_settled_once(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(120)
    run.run_dir.write_supervisor(no_process())
    settled: list[float] = []

    def settle() -> None:
        settled.append(time.monotonic())
        run.run_dir.write_result({"state": "failed", "time": 5.0, "error": {"kind": "WorkerLost", "message": "gone", "rank": None}})

    began = time.monotonic()
    follower = follow(run.run_dir, settle)
    assert follower.done.wait(END_S)
    assert len(settled) == 1
    assert settled[0] - began >= 1.0
    assert (follower.state.state, follower.state.step, follower.state.finished_time) == ("failed", 120, 5.0)
    assert follower.state.state == fold_all(run.run_dir).state


def test_settling_that_fails_for_the_disk_ends_the_following(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.run_dir.write_supervisor(no_process())

    def settle() -> None:
        raise OSError(28, "No space left on device")

    follower = follow(run.run_dir, settle)
    assert follower.done.wait(END_S)
    assert not follower.state.done


def test_a_result_without_a_last_word_ends_the_run_when_the_supervisor_is_gone(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(50)
    run.run_dir.write_result({"state": "stopped", "time": 5.0})
    follower = follow(run.run_dir)
    assert not follower.done.wait(0.5)  # its supervisor, this process, may still write
    run.run_dir.write_supervisor(no_process())
    assert follower.done.wait(END_S)
    assert follower.state.state == "stopped"


def test_a_run_directory_that_disappears_ends_the_following(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(50)
    follower = follow(run.run_dir)
    until(lambda: follower.state.step == 50)
    shutil.rmtree(run.run_dir.path)
    assert follower.done.wait(END_S)
    assert (follower.state.step, follower.state.done) == (50, False)
    run.supervisor.close()
    for events in run.ranks:
        events.close()


def test_events_that_are_damaged_are_left_out(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    run.start()
    for data in ({"step": [1, 2], "loss": [1.0]}, {"step": 7}, {"step": [1], "loss": ["abc"]}):
        run.ranks[0].emit("steps", **data)
    run.ranks[0].emit("validation", step=1)
    run.ranks[0].emit("unheard_of", of=1)
    with run.run_dir.rank_events(0, 0).open("ab") as file:
        file.write(b'{"half": ')
    run.train(0)
    run.end()
    follower = follow(run.run_dir)
    assert follower.done.wait(END_S)
    assert follower.state.state == "finished"


def test_stop_ends_the_following_of_a_run_that_goes_on(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    run = FakeRun(tmp_path)
    follower = follow(run.run_dir)
    follower.stop()
    follower.join(END_S)
    assert not follower.is_alive()
    assert follower.done.is_set()
    run.end()


def test_listeners_hear_of_the_end_once_and_completely(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    for index in range(3):
        ends: list[int] = []
        run = FakeRun(tmp_path, name=f"end{index}")
        run.start()
        follower = follow(run.run_dir, never, lambda state, ends=ends: ends.append(state.step) if state.done else None)
        run.train(run.total_steps)
        run.end()
        assert follower.done.wait(END_S)
        assert ends == [run.total_steps]


def test_a_listener_that_comes_after_the_end_is_told_it(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    follower = follow(finished(tmp_path))
    assert follower.done.wait(END_S)
    seen: list[RunState] = []
    follower.add_listener(seen.append)
    assert seen == [follower.state]


def test_a_launcher_knows_before_the_files_do_that_nothing_works_on_a_run(tmp_path: Path) -> None:
    """A supervisor that ended before it took the run over is not in the run directory, where the living kernel still stands for the run."""
    run = FakeRun(tmp_path)
    run.run_dir.path.joinpath("supervisor.json").unlink(missing_ok=True)
    run.run_dir.write_spec({**(run.run_dir.read_spec() or {}), "kernel": ProcessId.current().to_json(), "host": os.uname().nodename})
    assert run.run_dir.live()
    settled: list[bool] = []
    follower = Follower(run.run_dir, lambda: settled.append(run.run_dir.write_result({"state": "failed", "time": 0.0})), live=lambda: False)
    follower.start()
    assert follower.done.wait(END_S)
    assert (settled, follower.state.state) == ([True], "failed")
