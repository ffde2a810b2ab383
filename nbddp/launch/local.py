"""The local launcher: hands a run to a supervisor of this machine, and ends or settles runs whose supervisor is, or was, on it.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from nbddp.errors import LaunchError
from nbddp.events import SUPERVISOR, EventReader, EventWriter
from nbddp.failure import Failure, signal_name
from nbddp.launch.progress import Progress, last_words
from nbddp.launch.scratch import remove_scratch
from nbddp.launch.standby import Standby
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.staged import release_data

if TYPE_CHECKING:
    from nbddp.launch.order import Order
    from nbddp.launch.standby import Template

_GONE_S = 2.0
_POLL_S = 0.02
_FORK_S = 0.5
_REAP_S = 1.0
standby = Standby()
"""This kernel's."""


class Supervised:
    """A run that this kernel ordered from a standby."""

    def __init__(self, run: RunDir, template: Template) -> None:
        self.run = run
        self._template = template

    @property
    def process(self) -> ProcessId | None:
        """The run's supervisor; None until it has taken the run over."""
        owner = self.run.supervisor()
        return None if owner is None else owner[1]

    def alive(self) -> bool:
        """Whether something works on the run."""
        process = self.process
        if process is not None:
            return process.alive()
        return self._template.alive() and self.run.read_result() is None and self.run.path.is_dir()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the supervisor's end.

        Raises:
            TimeoutError: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.alive():
            if deadline is not None and time.monotonic() >= deadline:
                message = f"{self.run.id} goes on after {timeout} s"
                raise TimeoutError(message)
            time.sleep(_POLL_S)

    def terminate(self) -> None:
        """Have the supervisor end its ranks: SIGTERM to them, and SIGKILL after 1.5 s."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the supervisor and everything that it started."""
        self._send(signal.SIGKILL)
        kill_run(self.run)

    def _send(self, number: signal.Signals) -> None:
        """Signal the supervisor. Where there is none yet, the standby is ended before it forks one; one that it has just forked is waited for."""
        process = self.process
        if process is None:
            if not self.alive():
                return
            self._template.end()
            deadline = time.monotonic() + _FORK_S
            while (process := self.process) is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if process is not None:
            process.send(number)

    def settle(self) -> dict[str, Any] | None:
        """The run's result; None while it goes on. Where the supervisor ended without one, it is written here."""
        if self.alive():
            return self.run.read_result()
        if self.run.read_result() is None and self.run.supervisor() is None:
            if self.run.asked() == "stop":
                return _conclude(self.run, Progress(stop_reason="killed"), "stopped", None)
            tail = "\n".join(self._template.stderr_tail())
            message = f"the standby ended with exit code {self._template.process.returncode} before it started the run\n{tail}".rstrip()
            return fail(self.run, Failure("LaunchError", message))
        # The standby is the supervisor's parent and knows by which signal it ended: its word goes first.
        deadline = time.monotonic() + _REAP_S
        while self.run.read_result() is None and self._template.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return settle(self.run)


def launch(run: RunDir, order: Order, standby: Standby = standby) -> Supervised:
    """Have a run started whose spec and bundle are written; returns as soon as that has been told.

    Raises:
        LaunchError: where no standby could be started; the run has failed then.
    """
    try:
        for _ in range(2):  # one that waited may have ended since it was last looked at
            template = standby.order(run, order.to_line())
            if template is not None:
                return Supervised(run, template)
        reason = "it ended before it could be told"
    except OSError as error:
        reason = f"{type(error).__name__}: {error}"
    message = f"no standby could be started\n{reason}"
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
        _tidy(run)
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
        progress.stop_reason = "terminated" if number == signal.SIGTERM else "killed"
        return _conclude(run, progress, "stopped", None)
    how = "was killed or crashed" if number is None else f"was killed by signal {number} ({signal_name(number)})"
    return _conclude(run, progress, "failed", Failure("WorkerLost", f"the supervisor of the run {how}, and its ranks ended with it", signal=number))


def _tidy(run: RunDir) -> None:
    """Remove what a supervisor leaves that was killed after it had written the result."""
    owner = run.supervisor()
    if owner is not None and owner[0] == socket.gethostname() and not owner[1].alive():
        remove_scratch(owner[1])


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
        events.emit("exited", **last_words(result), exits={})
        events.close()
        release_data(run.root)
    return run.read_result() or result
