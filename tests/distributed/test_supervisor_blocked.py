"""Nothing that a rank holds, takes with it or leaves undone keeps a run from ending, and what follows a signal of ours is no failure of the rank's."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.process import ProcessId
from support.supervision import result_of, stepping, supervisor_of, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.launch.local import Supervised
    from nbddp.rundir import RunDir

pytestmark = pytest.mark.distributed

ROUNDS_S = 15.0


def fork_server_of(run: RunDir) -> ProcessId:
    def launched() -> Any:
        lines = run.supervisor_events.read_text().splitlines() if run.supervisor_events.exists() else []
        return lines and json.loads(lines[0])["data"]["fork_server"]

    process = ProcessId.from_json(until(launched))
    assert process is not None
    return process


def ends_terminated_without_its_fork_server(supervised: Supervised) -> None:
    """Suspend the process that tells of the ends of ranks, and that starts them; then stop and terminate."""
    fork_server_of(supervised.run).send(signal.SIGSTOP)
    supervised.run.ask("stop")
    began = time.monotonic()
    supervised.terminate()
    result = result_of(supervised, 9, since=began)
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "terminated")


def test_a_lock_that_ranks_would_share_with_the_agent_is_never_taken(start: Callable[..., Supervised]) -> None:
    assert result_of(start("keep_lock"), 20)["state"] == "finished"


@pytest.mark.parametrize("do", ["go_on_deaf", "ignore"])
def test_ranks_whose_end_is_never_told(start: Callable[..., Supervised], do: str) -> None:
    """The process that is to tell it is suspended: killed ranks stay as zombies, and the agent waits for ever."""
    supervised = start(do)
    stepping(supervised.run)
    ends_terminated_without_its_fork_server(supervised)


def test_terminated_while_the_start_of_the_ranks_stands_still(start: Callable[..., Supervised]) -> None:
    supervised = start("go_on_deaf", nproc=8)
    ends_terminated_without_its_fork_server(supervised)


def test_an_exit_code_after_the_supervisor_was_told_is_not_the_ranks_own(start: Callable[..., Supervised]) -> None:
    """Rank 1 is gone before the supervisor can tell it; it left upon the same word."""
    supervised = start("leave_when_told")
    victim = stepping(supervised.run)[1]
    supervised.run.ask("stop")
    supervisor_of(supervised).send(signal.SIGTERM)
    victim.send(signal.SIGTERM)
    result = result_of(supervised)
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "terminated")


def test_an_exit_code_before_it_is(start: Callable[..., Supervised]) -> None:
    supervised = start("leave_when_told")
    victim = stepping(supervised.run)[1]
    victim.send(signal.SIGTERM)
    until(lambda: not victim.alive())
    error = result_of(supervised)["error"]
    assert (error["rank"], error["exit_code"]) == (1, 7)


def test_ranks_that_are_gone_before_the_supervisor_looks_again(start: Callable[..., Supervised]) -> None:
    supervised = start("leave_when_told")
    victims = stepping(supervised.run)
    supervised.run.ask("stop")
    supervisor = supervisor_of(supervised)
    for process, number in ((supervisor, signal.SIGSTOP), (supervisor, signal.SIGTERM), *((victim, signal.SIGTERM) for victim in victims)):
        process.send(number)
    until(lambda: not any(victim.alive() for victim in victims))
    supervisor.send(signal.SIGCONT)
    result = result_of(supervised)
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "terminated")


def test_the_whole_session_is_told(start: Callable[..., Supervised]) -> None:
    """As a batch system does it: supervisor, fork server and ranks at once."""
    supervised = start("leave_when_told")
    stepping(supervised.run)
    supervised.run.ask("stop")
    os.killpg(supervisor_of(supervised).pid, signal.SIGTERM)
    result = result_of(supervised)
    assert (result["state"], result["error"], result["stop_reason"]) == ("stopped", None, "terminated")


def test_stopped_terminated_and_killed_at_any_moment(start: Callable[..., Supervised]) -> None:
    """From the order over the launch to the end, with what comes next at once or a moment later: each run ends, as one that was stopped."""
    dice = random.Random(5)
    deadline, rounds = time.monotonic() + ROUNDS_S, 0
    while time.monotonic() < deadline:
        rounds += 1
        nproc = dice.choice([1, 2, 4])
        then, delay_s, pause_s = dice.choice(["", "terminate", "kill"]), dice.uniform(0, 0.8), dice.choice([0.0, 0.0, 0.05, 0.15])
        said = f"round {rounds}: {nproc} ranks, {then or 'only asked'} after {delay_s:.3f} + {pause_s} s"
        supervised = start("go_on", nproc=nproc)
        time.sleep(delay_s)  # a moment at random is what this is about
        supervised.run.ask("stop")
        time.sleep(pause_s)
        if then:
            getattr(supervised, then)()
        result = result_of(supervised, 10)
        reasons = {"": {"asked"}, "terminate": {"asked", "terminated", "killed"}, "kill": {"asked", "killed"}}[then]
        assert (result["state"], result["error"], result["stop_reason"] in reasons) == ("stopped", None, True), f"{said}: {result}"
    assert rounds > 3
