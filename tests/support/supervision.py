"""What tests of the supervisor wait for and assert, in the process of the test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nbddp.launch.scratch import scratch
from nbddp.process import ProcessId
from support import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.launch.local import Supervised
    from nbddp.rundir import RunDir

LIMIT_S = 5.0


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Poll until the condition is true, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return value


def stepping(run: RunDir, nproc: int = 2) -> list[ProcessId]:
    """Wait for the first step of all ranks, and return their processes."""
    until(lambda: len(run.processes()) == nproc and "first_step" in run.rank_events(0, 0).read_text())
    return [process for _, process in run.processes()]


def result_of(supervised: Supervised, within_s: float = LIMIT_S, since: float | None = None) -> dict[str, Any]:
    """The result, once the supervisor has ended in time; nothing of the run may be left a second later."""
    began = time.monotonic() if since is None else since
    supervised.wait(60)
    assert time.monotonic() - began < within_s
    result = supervised.settle()
    assert result is not None
    if (supervisor := supervised.process) is not None:
        left = processes.gone(lambda: processes.of_session(supervisor.pid), 1.0)
        assert not left, processes.describe(left)
        until(lambda: not scratch(supervisor).exists(), 1.0)
    return result


def supervisor_of(supervised: Supervised) -> ProcessId:
    """Wait until a supervisor has taken the run over, and return it."""
    process = until(lambda: supervised.process)
    assert isinstance(process, ProcessId)
    return process
