"""The standby: imports everything, then forks a supervisor for each order, and notices when one ends without a word.

Runs in the process that the kernel starts with ``python -m nbddp.supervisor``, in its main thread, which stays its only one: a fork copies no other.
Ends with its kernel, at the end of its stdin, or when told to. Imports no Jupyter.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.failure import Failure
from nbddp.launch import local
from nbddp.launch.order import Order
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.supervisor import preload

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

ENTRY = "nbddp.worker.main:entry"
_OWN = ("PYTHONPATH", "NBDDP_SYS_PATH")
_POLL_S = 0.2
_OWNED_S = 2.0


def main() -> None:
    """Import, then serve until the kernel ends."""
    parser = argparse.ArgumentParser(prog="python -m nbddp.supervisor", description="Started by nbddp in the kernel; reads its orders from stdin.")
    parser.add_argument("--kernel", required=True, help="pid:start of the kernel")
    parser.add_argument("--entry", default=ENTRY, help="module:function that each rank runs")
    parser.add_argument("--niced", action="store_true", help="import at low priority")
    arguments = parser.parse_args()
    module, _, function = arguments.entry.partition(":")
    preload.import_all(module, niced=arguments.niced)
    _plain_logs()
    # What the agent would heed is not for the kernel's environment to say: a health check listens on every interface.
    for name in [name for name in os.environ if name in _OWN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    gc.collect()
    gc.freeze()  # what is imported stays: a collection in a forked process would copy the pages it looks at
    _Server(ProcessId(*map(int, arguments.kernel.split(":"))), getattr(import_module(module), function)).serve()


def _plain_logs() -> None:
    """Have torch's messages written as they are: its own formatter imports the compiler, a second's work, for the first traceback."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(plain)


class _Server:
    def __init__(self, kernel: ProcessId, entry: Callable[[str, dict[str, str], int], None]) -> None:
        self._kernel, self._entry = kernel, entry
        self._supervisors: dict[int, RunDir] = {}
        self._unread = b""
        self._woken, self._wake = os.pipe()
        for fd in (self._woken, self._wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Carry out orders until stdin ends or the kernel is gone; a forked child of the kernel may hold the pipe open for longer than that."""
        while True:
            ready, _, _ = select.select([0, self._woken], [], [], _POLL_S)
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            if 0 in ready:
                chunk = os.read(0, 1 << 16)
                self._take(chunk)
                if not chunk:
                    break
            elif not self._kernel.alive():
                break
        deadline = time.monotonic() + _OWNED_S
        while any(run.supervisor() is None for run in self._supervisors.values()) and time.monotonic() < deadline:
            self._reap()  # until then, whoever looks for the run's process looks at this one
            time.sleep(0.01)

    def _take(self, chunk: bytes) -> None:
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            self._fork(Order.from_line(line))

    def _fork(self, order: Order) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._supervisors[pid] = RunDir(Path(order.run_dir))
            return
        _become_supervisor(order, self._entry, (self._woken, self._wake))

    def _reap(self) -> None:
        """Notice supervisors that have ended; one that left no result is the end of its run."""
        for pid, run in list(self._supervisors.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self._supervisors[pid]
            code = os.waitstatus_to_exitcode(status)
            try:
                _settle(run, code)
            except OSError:  # the run directory, or its disk, is gone
                traceback.print_exc()


def _become_supervisor(order: Order, entry: Callable[[str, dict[str, str], int], None], standbys: tuple[int, int]) -> NoReturn:
    """In the forked child: nothing of the standby's goes on here."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in standbys:
            os.close(fd)
        from nbddp.supervisor.main import main as supervisor

        supervisor(order, entry)
    finally:
        os._exit(1)


def _settle(run: RunDir, code: int) -> None:
    """Write the result of a run whose supervisor ended without doing so."""
    if run.read_result() is not None or not run.path.is_dir():
        return
    if run.supervisor() is not None:
        local.settle(run, number=-code if code < 0 else None)
        return
    try:
        log = run.log(None).read_text(encoding="utf-8", errors="replace")[-2000:]
    except OSError:
        log = ""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    local.fail(run, Failure("LaunchError", f"the supervisor ended with {how} before it took the run over\n{log}".rstrip()))
