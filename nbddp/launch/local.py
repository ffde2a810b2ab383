"""The local launcher: hands a run to a supervisor of this machine, and ends or settles runs whose supervisor is, or was, on it.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from nbddp.errors import LaunchError
from nbddp.events import SUPERVISOR, EventReader, EventWriter
from nbddp.failure import Failure, signal_name
from nbddp.launch.progress import Progress
from nbddp.launch.scratch import remove_scratch
from nbddp.launch.standby import Standby
from nbddp.process import ProcessId
from nbddp.rundir import RunDir, release_data

if TYPE_CHECKING:
    from nbddp.launch.order import Order
    from nbddp.launch.standby import Supervisor

_GONE_S = 2.0
_POLL_S = 0.02
standby = Standby()
"""This kernel's."""
_supervised: set[Supervised] = set()
"""Runs that this kernel launched and that go on: the end of their pipe would look like the end of the kernel."""


class Supervised:
    """A run that this kernel launched."""

    def __init__(self, run: RunDir, supervisor: Supervisor) -> None:
        self.run = run
        self._supervisor = supervisor
        _supervised.add(self)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._supervisor.process

    def alive(self) -> bool:
        """Whether the supervisor runs."""
        if self.process.poll() is None:
            return True
        self._release()
        return False

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the supervisor's end and return its exit code.

        Raises:
            TimeoutError: after `timeout` seconds.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            message = f"{self.run.id} goes on after {timeout} s"
            raise TimeoutError(message) from None
        self._release()
        return code

    def _release(self) -> None:
        if self in _supervised:
            _supervised.discard(self)
            self._supervisor.release()

    def terminate(self) -> None:
        """Have the supervisor end its ranks: SIGTERM to them, and SIGKILL after 1.5 s."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the supervisor and everything that it started."""
        if self.alive():
            self.process.kill()
        kill_run(self.run)

    def settle(self) -> dict[str, Any] | None:
        """The run's result; None while it goes on. Where the supervisor ended without one, it is written here."""
        if self.alive():
            return self.run.read_result()
        if self.run.read_result() is None and self.run.supervisor() is None and self.run.asked() == "stop":
            _conclude(self.run, Progress(stop_reason="killed"), "stopped", None)
        if self.run.read_result() is None and self.run.supervisor() is None:
            tail = "\n".join(self._supervisor.stderr_tail())
            fail(
                self.run, Failure("LaunchError", f"the supervisor ended with exit code {self.process.returncode} before it took the run over\n{tail}".rstrip())
            )
        code = self.process.returncode
        return settle(self.run, number=-code if code < 0 else None)


def launch(run: RunDir, order: Order, standby: Standby = standby) -> Supervised:
    """Hand a run, whose spec and bundle are written, to a supervisor; returns as soon as that has been told.

    Raises:
        LaunchError: where no supervisor could be started; the run has failed then.
    """
    tail: list[str] = []
    for _ in range(2):  # one that waited may have ended since it was last looked at
        try:
            supervisor = standby.take()
        except OSError as error:
            tail = [f"{type(error).__name__}: {error}"]
            break
        if supervisor.order(order.to_line()):
            return Supervised(run, supervisor)
        supervisor.end()
        tail = supervisor.stderr_tail()
    message = "\n".join(["no supervisor could be started", *tail])
    fail(run, Failure("LaunchError", message))
    raise LaunchError(message)


def terminate_run(run: RunDir) -> bool:
    """Ask the supervisor of a run, whichever kernel launched it, to end its ranks; return whether it was told."""
    owner = run.supervisor()
    return owner is not None and owner[0] == socket.gethostname() and owner[1].send(signal.SIGTERM)


def kill_run(run: RunDir) -> bool:
    """SIGKILL to the supervisor of a run of this host and to everything recorded of it, whichever kernel launched it; return whether there was any."""
    owner = run.supervisor()
    if owner is None or owner[0] != socket.gethostname():
        return False
    fork_server = ProcessId.from_json(_progress(run).launched.get("fork_server"))
    processes = [owner[1], *([fork_server] if fork_server else []), *(process for _, process in run.processes())]
    told = [process.send(signal.SIGKILL) for process in processes]
    return any(told)


def fail(run: RunDir, failure: Failure) -> dict[str, Any]:
    """Write the result of a run that its supervisor can't write, and return what stands there."""
    progress = _progress(run)
    return _conclude(run, progress, "failed", failure)


def settle(run: RunDir, *, number: int | None = None) -> dict[str, Any] | None:
    """Return the result of a run, None while it goes on, and write it where the supervisor is gone without one.

    What is left of the run's processes is killed first. `number` is the signal that ended the supervisor, where that is known.
    """
    if (result := run.read_result()) is not None:
        return result
    if run.live():
        return None
    if (result := run.read_result()) is not None:  # it was the last thing that the supervisor did
        return result
    owner = run.supervisor()
    if owner is None:
        return fail(run, Failure("LaunchError", "the kernel ended before the run was launched"))
    kill_run(run)
    _await_end(run)
    remove_scratch(owner[1])
    progress = _progress(run)
    nproc = int((run.read_spec() or {}).get("plan", {}).get("nproc", 0))
    if nproc and progress.all_finished(nproc):
        return _conclude(run, progress, "stopped" if (progress.ranks[0].finished or {}).get("stopped") else "finished", None)
    if run.asked() == "stop":
        progress.stop_reason = progress.stop_reason or "killed"
        return _conclude(run, progress, "stopped", None)
    how = "was killed or crashed" if number is None else f"was killed by signal {number} ({signal_name(number)})"
    return _conclude(run, progress, "failed", Failure("WorkerLost", f"the supervisor of the run {how}, and its ranks ended with it", signal=number))


def _await_end(run: RunDir) -> None:
    deadline = time.monotonic() + _GONE_S
    while any(process.alive() for _, process in run.processes()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _progress(run: RunDir) -> Progress:
    progress, reader = Progress(), EventReader(run.events)
    while events := reader.poll():
        for event in events:
            progress.fold(event)
    return progress


def _conclude(run: RunDir, progress: Progress, state: str, failure: Failure | None) -> dict[str, Any]:
    if state == "failed" and not progress.first_step:
        run.drop_payload()
    error = None if failure is None else failure.to_json()
    result = progress.result(state, error, time.time())
    if run.write_result(result):
        # A file of its own: the supervisor's may end in the middle of a line.
        events = EventWriter(run.events / "settled.jsonl", run=run.id, rank=SUPERVISOR)
        events.emit("exited", state=state, exits={}, error=error)
        events.close()
        release_data(run.root)
    return run.read_result() or result
