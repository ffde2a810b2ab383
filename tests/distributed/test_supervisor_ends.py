"""How a run ends, under a real supervisor with real ranks: which verdict, how fast, and that nothing is left."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from nbddp.launch.local import Supervised, kill_run, settle, terminate_run
from nbddp.launch.stacks import stacks
from support import processes
from support.supervised import make_run
from support.supervision import result_of, stepping, supervisor_of, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbddp.process import ProcessId
    from nbddp.rundir import RunDir

pytestmark = pytest.mark.distributed


def kinds(run: RunDir) -> list[str]:
    return [line.split('"kind":"')[1].split('"')[0] for line in run.supervisor_events.read_text().splitlines()]


def test_a_run_finishes(start: Callable[..., Supervised]) -> None:
    supervised = start("finish", nproc=3)
    result = result_of(supervised, 20)
    assert (result["state"], result["error"], result["step"], result["epoch"], result["first_step"]) == ("finished", None, 3, 1, True)
    assert kinds(supervised.run) == ["launched", "exited"]
    assert supervised.run.bundle.exists()
    assert not supervised.alive()


def test_a_stop_that_is_asked_for_is_a_state(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    stepping(supervised.run)
    with pytest.raises(TimeoutError, match="goes on"):
        supervised.wait(0.01)
    assert supervised.settle() is None
    began = time.monotonic()
    supervised.run.ask("stop")
    result = result_of(supervised, since=began)
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "asked")


@pytest.mark.parametrize(
    "do, kind, words, signal_, exit_code",
    [
        ("raise", "WorkerError", "rank 1 raised ValueError: boom (Cell In[7], line", None, None),
        ("exit_0", "WorkerError", "rank 1 left by sys.exit with exit code 0 (Cell In[7], line", None, 0),
        ("exit_3", "WorkerError", "rank 1 left by sys.exit with exit code 3 (Cell In[7], line", None, 3),
        ("leave_0", "WorkerLost", "rank 1 left with exit code 0 and without a word", None, 0),
        ("segfault", "WorkerLost", "rank 1 was killed by signal 11 (SIGSEGV)", 11, None),
    ],
)
def test_one_rank_fails_while_the_other_waits(
    start: Callable[..., Supervised], do: str, kind: str, words: str, signal_: int | None, exit_code: int | None
) -> None:
    supervised = start(do)
    until(lambda: len(supervised.run.processes()) == 2)
    result = result_of(supervised)
    assert result["state"] == "failed"
    error = result["error"]
    assert (error["kind"], error["rank"], error["signal"], error["exit_code"]) == (kind, 1, signal_, exit_code)
    assert error["message"].startswith(words)
    assert supervised.run.bundle.exists()


def test_the_only_rank_leaves_with_success(start: Callable[..., Supervised]) -> None:
    supervised = start("leave_alone", nproc=1)
    until(lambda: supervised.run.processes())
    error = result_of(supervised)["error"]
    assert (error["kind"], error["rank"], error["exit_code"]) == ("WorkerLost", 0, 0)


def test_a_failure_before_the_first_step_drops_the_payload(start: Callable[..., Supervised]) -> None:
    supervised = start("fail_at_once")
    result = result_of(supervised, 20)
    assert (result["first_step"], result["error"]["type_name"]) == (False, "RuntimeError")
    assert not supervised.run.bundle.exists()
    assert supervised.run.read_spec() is not None


def test_a_group_that_never_forms(start: Callable[..., Supervised]) -> None:
    result = result_of(start("die_silently"), 20)
    assert result["error"]["kind"] == "LaunchError"
    assert "exit code 4" in result["error"]["message"]


def test_a_finished_rank_whose_process_stays(start: Callable[..., Supervised]) -> None:
    assert result_of(start("stay"), 20)["state"] == "finished"


def test_kill_a_rank(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    victim = stepping(supervised.run)[1]
    began = time.monotonic()
    victim.send(signal.SIGKILL)
    error = result_of(supervised, since=began)["error"]
    assert (error["kind"], error["rank"], error["signal"]) == ("WorkerLost", 1, 9)
    assert "GiB were free" in error["message"]


def test_terminate_a_rank_from_outside(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    victim = stepping(supervised.run)[1]
    began = time.monotonic()
    victim.send(signal.SIGTERM)
    error = result_of(supervised, since=began)["error"]
    assert (error["kind"], error["rank"], error["signal"]) == ("WorkerLost", 1, 15)


def test_kill_the_fork_server(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    ranks = stepping(supervised.run)
    fork_server = psutil.Process(ranks[0].pid).parent()
    assert fork_server is not None
    began = time.monotonic()
    fork_server.kill()
    error = result_of(supervised, since=began)["error"]
    assert (error["kind"], error["rank"]) == ("WorkerLost", None)
    assert "starts the ranks" in error["message"]


def test_kill_the_supervisor(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    ranks = stepping(supervised.run)
    began = time.monotonic()
    supervisor_of(supervised).send(signal.SIGKILL)
    supervised.wait(5)
    until(lambda: not processes.of_session(supervisor_of(supervised).pid), 1.0)
    assert not any(rank.alive() for rank in ranks)
    error = result_of(supervised, since=began)["error"]
    assert (error["kind"], error["rank"], error["signal"]) == ("WorkerLost", None, 9)
    assert supervised.run.events.joinpath("settled.jsonl").read_text().count('"exited"') == 1
    assert supervised.settle() == supervised.run.read_result()


def test_terminate(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on_deaf")
    stepping(supervised.run)
    began = time.monotonic()
    supervised.terminate()
    result = result_of(supervised, since=began)
    assert (result["state"], result["error"]["kind"], result["error"]["signal"], result["error"]["rank"]) == ("failed", "WorkerLost", 15, None)


def test_terminate_after_a_stop_was_asked_for(start: Callable[..., Supervised]) -> None:
    """Also where a rank takes no notice of SIGTERM."""
    supervised = start("ignore")
    stepping(supervised.run)
    supervised.run.ask("stop")
    began = time.monotonic()
    assert terminate_run(supervised.run)
    result = result_of(supervised, since=began)
    assert (result["state"], result["error"]) == ("stopped", None)
    assert not terminate_run(supervised.run)


def test_kill_everything(start: Callable[..., Supervised]) -> None:
    supervised = start("ignore")
    stepping(supervised.run)
    supervised.run.ask("stop")
    began = time.monotonic()
    supervised.kill()
    result = result_of(supervised, 2.0, since=began)
    assert (result["state"], result["stop_reason"]) == ("stopped", "killed")
    assert not kill_run(supervised.run)


def test_a_hang_names_the_rank_that_the_others_wait_for(start: Callable[..., Supervised]) -> None:
    supervised = start("hang", hang_after_s=1.0)
    stepping(supervised.run)
    error = result_of(supervised, 8)["error"]
    assert (error["kind"], error["rank"]) == ("HangDetected", 1)
    assert "rank 1 is in the phase data" in error["message"]
    text = (supervised.run.logs / "hang.txt").read_text()
    assert "rank 0" in text
    assert "in do_hang" in text
    assert "all_reduce" in text


def test_a_stopped_process_is_a_hang(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on_deaf", hang_after_s=1.0)
    victim = stepping(supervised.run)[1]
    began = time.monotonic()
    victim.send(signal.SIGSTOP)
    error = result_of(supervised, 10, since=began)["error"]
    assert error["kind"] == "HangDetected"


def test_stacks_of_live_ranks(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on")
    stepping(supervised.run)
    for _ in range(2):  # the file is emptied in between
        found = stacks(supervised.run)
        assert sorted(found) == [0, 1]
        assert all(text.count("in do_go_on\n") == 1 for text in found.values())
    supervised.run.ask("stop")
    result_of(supervised)
    assert stacks(supervised.run) == {}


def test_settle_a_run_that_was_never_launched(tmp_path: Path, dead: ProcessId) -> None:
    run = make_run(tmp_path)
    assert settle(run) is None  # its kernel, this process, lives
    orphan = make_run(tmp_path, kernel=dead)
    result = settle(orphan)
    assert result is not None
    assert (result["state"], result["error"]["kind"]) == ("failed", "LaunchError")
    assert not kill_run(orphan)
    assert not terminate_run(orphan)
