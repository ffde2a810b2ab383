"""Which failure is reported, in which words, and that it survives result.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.errors import HangDetected, LaunchError, OutOfMemory, ReplicaMismatch, RunFailed, WorkerError, WorkerLost
from nbddp.failure import Failure, RankEnd, exit_code_as_logged, signal_name, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping


def raised(name: str = "ValueError", message: str = "boom", **more: object) -> dict[str, Any]:
    return {"type": name, "message": message, "traceback": "Cell In[7], line 12", "cell": 7, "line": 12, "file": "/tmp/ipykernel_1/2.py", **more}


COLLECTIVE = raised("RuntimeError", "Connection closed by peer", collective=True)


def killed(rank: int, number: int, time: float = 1.0, **more: Any) -> RankEnd:
    return RankEnd(rank, time, exit_code=-number, **more)


@pytest.mark.parametrize(
    "ends, rank, kind",
    [
        ([RankEnd(0, 1, 0, finished=True), RankEnd(1, 1, 0, finished=True)], None, None),
        ([RankEnd(0, 1, 1, raised()), killed(1, 15, ours=True)], 0, "WorkerError"),
        ([RankEnd(0, 1, 1, COLLECTIVE), RankEnd(1, 2, 1, raised())], 1, "WorkerError"),  # the echo was written first
        ([RankEnd(0, 1, 1, raised()), RankEnd(1, 2, 0)], 1, "WorkerLost"),  # left without a word, before an exception
        ([RankEnd(0, 1, 1, raised()), RankEnd(1, 2, 0), killed(2, 9, 3)], 2, "WorkerLost"),  # killed, before everything
        ([RankEnd(0, 1, 1, COLLECTIVE), killed(1, 9, 2)], 1, "WorkerLost"),
        ([RankEnd(0, 1, 1, COLLECTIVE), killed(1, 9, 2, ours=True)], 0, "WorkerError"),  # that signal was ours
        ([killed(0, 6, 1, in_collective=True), RankEnd(1, 2, 1, raised())], 1, "WorkerError"),  # an abort inside a collective is an echo
        ([killed(0, 6, 1), RankEnd(1, 2, 1, raised())], 0, "WorkerLost"),  # an abort elsewhere is a crash
        ([killed(0, 6, 2, in_collective=True), RankEnd(1, 1, 1, COLLECTIVE)], 1, "WorkerError"),
        ([killed(0, 6, 1, in_collective=True), killed(1, 15, ours=True)], 0, "WorkerLost"),
        ([RankEnd(0, 2, 1, raised()), RankEnd(1, 1, 1, raised("KeyError"))], 1, "WorkerError"),  # the earliest of equals
        ([killed(0, 9, 2), killed(1, 9, 1)], 1, "WorkerLost"),
        ([RankEnd(0, 1, 0, finished=True), RankEnd(1, 2, 1, raised())], 1, "WorkerError"),
        ([killed(0, 11, 1, finished=True), RankEnd(1, 2, 1, raised())], 1, "WorkerError"),  # a crash after the last word changes nothing
        ([RankEnd(0, 1, -9, raised()), RankEnd(1, 2, 1, COLLECTIVE)], 0, "WorkerError"),  # what it wrote says more than how it ended
        ([RankEnd(0, 1, None), RankEnd(1, 2, None)], None, None),  # nobody knows
        ([], None, None),
    ],
)
def test_precedence(ends: list[RankEnd], rank: int | None, kind: str | None) -> None:
    failure = verdict(ends)
    assert (rank, kind) == (None, None) if failure is None else (failure.rank, failure.kind) == (rank, kind)


STACKS = """
Thread 0x00007f7dc87ff6c0 (most recent call first):
  File "cell", line 6 in training_step
"""
MODULES = "\n\nExtension modules: numpy.linalg._umath_linalg (total: 1)\n"
ABORTED, SEGFAULT = "Fatal Python error: Aborted\n", "Fatal Python error: Segmentation fault\n"


@pytest.mark.parametrize(
    "exit_code, log, first",
    [
        (-11, f"loss: 1\n{ABORTED}{STACKS}{SEGFAULT}{MODULES}", -6),
        (-11, f"{ABORTED}\n  File {SEGFAULT}{MODULES}", -6),  # in the middle of a line
        (-11, f"{ABORTED}{STACKS}{SEGFAULT}", -6),
        (-11, ABORTED.replace("Aborted", "Bus error") + SEGFAULT, -7),
        (-11, f"{SEGFAULT}{STACKS}{SEGFAULT}{MODULES}", -11),
        (-11, f"{SEGFAULT}{STACKS}{MODULES}", -11),
        (-11, f"{ABORTED}{STACKS}{MODULES}{SEGFAULT}{STACKS}{MODULES}", -11),  # an aborted child of the rank, before the rank's own end
        (-11, f"{SEGFAULT}{STACKS}{MODULES}{ABORTED}{SEGFAULT}{MODULES}", -6),
        (-11, "", -11),
        (-11, f"Aborted\n{SEGFAULT}", -11),
        (-11, "Fatal Python error: none of these\n" + SEGFAULT, -11),
        (-9, f"{ABORTED}{STACKS}{SEGFAULT}{MODULES}", -9),
        (1, f"{ABORTED}{STACKS}{SEGFAULT}{MODULES}", 1),
        (None, f"{ABORTED}{STACKS}{SEGFAULT}{MODULES}", None),
    ],
)
def test_a_crash_while_the_stacks_are_written_is_not_the_exit_code_as_logged(exit_code: int | None, log: str, first: int | None) -> None:
    assert exit_code_as_logged(exit_code, log) == first


@pytest.mark.parametrize(
    "end, message",
    [
        (RankEnd(1, 0, 1, raised()), "rank 1 raised ValueError: boom (Cell In[7], line 12)"),
        (RankEnd(1, 0, 1, raised(message="")), "rank 1 raised ValueError (Cell In[7], line 12)"),
        (RankEnd(1, 0, 1, raised(cell=None)), "rank 1 raised ValueError: boom (/tmp/ipykernel_1/2.py, line 12)"),
        (RankEnd(1, 0, 1, raised(cell=None, line=None)), "rank 1 raised ValueError: boom"),
        (RankEnd(1, 0, 1, raised("SystemExit", "the step called sys.exit(0)", exit_code=0)), "rank 1 left by sys.exit with exit code 0 (Cell In[7], line 12)"),
        (RankEnd(0, 0, 1, COLLECTIVE), "rank 0 failed inside a collective: RuntimeError: Connection closed by peer (Cell In[7], line 12)"),
        (RankEnd(1, 0, 1, raised(replicas=True, message="the replicas differ", about_rank=1)), "the replicas differ"),
        (RankEnd(2, 0, 0), "rank 2 left with exit code 0 and without a word, as os._exit does: leave a step by returning or by raising"),
        (killed(1, 9), "rank 1 was killed by signal 9 (SIGKILL); HINT"),
        (killed(1, 11), "rank 1 was killed by signal 11 (SIGSEGV): a crash in native code; its log may say where"),
        (killed(1, 15), "rank 1 was killed by signal 15 (SIGTERM)"),
        (killed(1, 6, in_collective=True), "rank 1 was aborted inside a collective (signal 6, SIGABRT)"),
    ],
)
def test_words(end: RankEnd, message: str) -> None:
    failure = verdict([end], memory_hint="HINT")
    assert failure is not None
    assert failure.message == message


@pytest.mark.parametrize(
    "end, kind, attributes",
    [
        (
            RankEnd(1, 0, 1, raised()),
            WorkerError,
            {"rank": 1, "type_name": "ValueError", "cell": 7, "line": 12, "remote_traceback": "Cell In[7], line 12", "log_tail": ("last",)},
        ),
        (RankEnd(1, 0, 1, raised("OutOfMemoryError", oom=True)), OutOfMemory, {"rank": 1, "type_name": "OutOfMemoryError"}),
        (RankEnd(0, 0, 1, raised(replicas=True, about_rank=2)), ReplicaMismatch, {"rank": 2, "log_tail": ("last",)}),
        (killed(3, 9), WorkerLost, {"rank": 3, "signal": 9, "exit_code": None, "log_tail": ("last",)}),
        (RankEnd(3, 0, 4), WorkerLost, {"rank": 3, "signal": None, "exit_code": 4}),
    ],
)
def test_exception_after_a_round_trip(end: RankEnd, kind: type[RunFailed], attributes: Mapping[str, object]) -> None:
    failure = verdict([end])
    assert failure is not None
    again = Failure.from_json(json.loads(json.dumps({**failure.to_json(), "a later version's": 1})))
    assert again == failure
    error = again.to_exception(["last"])
    assert type(error) is kind
    assert str(error) == failure.message
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_exceptions_of_no_rank() -> None:
    assert isinstance(Failure("HangDetected", "stuck", 1).to_exception(), HangDetected)
    assert isinstance(Failure("LaunchError", "no group").to_exception(), LaunchError)
    lost = Failure("WorkerLost", "the supervisor was killed", signal=9).to_exception()
    assert isinstance(lost, WorkerLost)
    assert (lost.rank, lost.signal) == (None, 9)


def test_signals_without_a_name() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "40"


def test_a_timeout_names_the_option_and_says_whom_to_look_at():
    record = {**COLLECTIVE, "message": "Timed out waiting 3000ms for recv operation"}
    failure = verdict([RankEnd(0, 0, 1, record)])
    assert failure is not None
    assert "another rank did not come to it within --process-group-timeout-s" in failure.message
