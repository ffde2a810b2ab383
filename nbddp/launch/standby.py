"""The warm standby: a supervisor that has imported torch and started its fork server before it is asked.

Runs in the kernel; imports neither torch nor Jupyter. Starting one takes milliseconds and prints nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

from nbddp.launch.scratch import remove_scratch
from nbddp.process import ProcessId

ENTRY = "nbddp.worker.main:entry"
_BOOT = Path(__file__).parent / "boot"
_FINGERPRINT = ("PYTORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH", "LD_", "PYTHON")
"""Prefixes of variables that a process reads when it starts or imports torch, so that they can't be set in it afterwards."""
_TERM_S = 1.0
_STDERR_LINES = 20


def fingerprint() -> tuple[str, frozenset[tuple[str, str]]]:
    """What a supervisor's start depends on."""
    return sys.executable, frozenset((name, value) for name, value in os.environ.items() if name.startswith(_FINGERPRINT))


class Supervisor:
    """A supervisor process that this kernel started; it has no order yet, or carries one out."""

    def __init__(self, *, niced: bool, entry: str) -> None:
        kernel = ProcessId.current()
        self.fingerprint = fingerprint()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - without a name, and closed with this object
        self._tail: list[str] = []
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([str(_BOOT), *filter(None, [environment.get("PYTHONPATH")])])
        environment["TMPDIR"] = tempfile.gettempdir()  # where this kernel will look for what a killed supervisor left
        environment["NBDDP_SYS_PATH"] = os.pathsep.join(path for path in sys.path if Path(path).is_absolute())
        # -P: no file beside the notebook may shadow a module. "/": no folder is kept busy.
        command = [sys.executable, "-P", "-m", "nbddp.supervisor", "--kernel", f"{kernel.pid}:{kernel.start}", "--entry", entry]
        try:
            self.process = subprocess.Popen(
                [*command, *(["--niced"] if niced else [])],
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=self._stderr,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise
        self.identity = ProcessId.of(self.process.pid) or ProcessId(self.process.pid, -1)

    def alive(self) -> bool:
        return self.process.poll() is None

    def order(self, line: bytes) -> bool:
        """Write the order; return False where the supervisor is gone already."""
        if self.process.stdin is None:
            message = "a supervisor is started with a pipe"
            raise AssertionError(message)
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        except BaseException:  # an interrupt in the middle of the line, which no other order could follow
            self.end()
            raise
        return True

    def stderr_tail(self) -> list[str]:
        """The last lines that it printed before it had an order."""
        if not self._stderr.closed:
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 1 << 14, max(0, size - (1 << 14))).decode("utf-8", "replace")
            self._tail = text.rstrip().splitlines()[-_STDERR_LINES:]
        return self._tail

    def end(self) -> None:
        """End it and what it started: at once while it has no order."""
        self._close_stdin()
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.release()

    def release(self) -> None:
        """Once it has ended: close what is open for it, and remove what it may have left."""
        self._close_stdin()
        self.stderr_tail()
        self._stderr.close()
        remove_scratch(self.identity)

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # an unfinished line can't be flushed to a process that is gone
                self.process.stdin.close()


class Standby:
    """At most one supervisor without an order. From any thread; in a forked child of the kernel it begins anew and leaves the kernel's alone."""

    def __init__(self, *, entry: str = ENTRY) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._owner = os.getpid()
        self._registered = False

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor that waits, if there is one."""
        return self._supervisor if self._owner == os.getpid() else None

    def warm(self, *, niced: bool = False) -> None:
        """Start a supervisor in the background unless a fitting one waits; `niced` where other work goes on. ``NBDDP_WARM=0`` turns this off."""
        if os.environ.get("NBDDP_WARM") == "0":
            return
        self._adopt()
        with self._lock:
            if not self._fits():
                self._discard()
                self._supervisor = self._start(niced=niced)

    def take(self) -> Supervisor:
        """Hand out the supervisor that waits, or a new one."""
        self._adopt()
        with self._lock:
            if not self._fits():
                self._discard()
            supervisor, self._supervisor = self._supervisor, None
            return supervisor or self._start(niced=False)

    def close(self) -> None:
        """End the supervisor that waits; a kernel does so at its exit."""
        self._adopt()
        with self._lock:
            self._discard()

    def _adopt(self) -> None:
        """Forget, in a forked child, what belongs to the kernel."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._supervisor, self._registered = os.getpid(), threading.Lock(), None, False

    def _fits(self) -> bool:
        waiting = self._supervisor
        return waiting is not None and waiting.alive() and waiting.fingerprint == fingerprint()

    def _discard(self) -> None:
        if self._supervisor is not None:
            self._supervisor.end()
            self._supervisor = None

    def _start(self, *, niced: bool) -> Supervisor:
        if not self._registered:
            atexit.register(self.close)
            self._registered = True
        return Supervisor(niced=niced, entry=self._entry)
