"""The warm standby: a process that has imported torch and forks the supervisor of each run, so that a run starts at once however soon it comes.

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
from typing import IO, TYPE_CHECKING

from nbddp.process import ProcessId

if TYPE_CHECKING:
    from nbddp.rundir import RunDir

ENTRY = "nbddp.worker.main:entry"
_BOOT = Path(__file__).parent / "boot"
_FINGERPRINT = ("PYTORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH", "LD_", "PYTHON")
"""Prefixes of variables that a process reads when it starts or imports torch, so that they can't be set in it afterwards."""
_TERM_S = 1.0
_STDERR_LINES = 20


def fingerprint() -> tuple[str, frozenset[tuple[str, str]]]:
    """What a supervisor's start depends on."""
    return sys.executable, frozenset((name, value) for name, value in os.environ.items() if name.startswith(_FINGERPRINT))


class Template:
    """The standby process that this kernel started. Orders are lines on its stdin; it ends at the end of that, or when it is told to."""

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

    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def order(self, line: bytes) -> bool:
        """Write an order; return False where the process is gone already."""
        if self.process.stdin is None:
            message = "a standby is started with a pipe"
            raise AssertionError(message)
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):  # gone, or closed
            return False
        except BaseException:  # an interrupt in the middle of the line, which no other order could follow
            self.end()
            raise
        return True

    def stderr_tail(self) -> list[str]:
        """The last lines that it printed."""
        if not self._stderr.closed:
            size = os.fstat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), 1 << 14, max(0, size - (1 << 14))).decode("utf-8", "replace")
            self._tail = text.rstrip().splitlines()[-_STDERR_LINES:]
        return self._tail

    def retire(self) -> None:
        """Let it end by itself once it has carried out the orders that it was given."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # an unfinished line can't be flushed to a process that is gone
                self.process.stdin.close()

    def end(self) -> None:
        """End it now. Supervisors that it has forked go on."""
        self.retire()
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr_tail()
        self._stderr.close()


class Standby:
    """At most one process that waits for orders. From any thread; in a forked child of the kernel it begins anew and leaves the kernel's alone."""

    def __init__(self, *, entry: str = ENTRY) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._ordered: list[tuple[Template, RunDir]] = []
        self._owner = os.getpid()
        self._registered = False

    @property
    def template(self) -> Template | None:
        """The process that waits, if there is one."""
        return self._template if self._owner == os.getpid() else None

    def warm(self, *, niced: bool = False) -> None:
        """Start one in the background unless a fitting one waits; `niced` where other work goes on. ``NBDDP_WARM=0`` turns this off."""
        if os.environ.get("NBDDP_WARM") == "0":
            return
        self._adopt()
        with self._lock:
            self._fitting(niced=niced)

    def order(self, run: RunDir, line: bytes) -> Template | None:
        """Have the run started; return the process that was told, None where it was gone already."""
        self._adopt()
        with self._lock:
            template = self._fitting(niced=False)
            if not template.order(line):
                self._discard()
                return None
            self._ordered.append((template, run))
            if os.environ.get("NBDDP_WARM") == "0":
                template.retire()
                self._template = None
            return template

    def close(self) -> None:
        """End the process that waits; a kernel does so at its exit. Runs that were ordered from it are still started."""
        self._adopt()
        with self._lock:
            self._discard()

    def _adopt(self) -> None:
        """Forget, in a forked child, what belongs to the kernel."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._template, self._ordered, self._registered = os.getpid(), threading.Lock(), None, [], False

    def _fitting(self, *, niced: bool) -> Template:
        """The process that waits, or a new one where there is none, or it is dead, or the environment has changed since it was started."""
        waiting = self._template
        if waiting is not None and not (waiting.alive() and waiting.fingerprint == fingerprint()):
            self._discard()
        if self._template is None:
            if not self._registered:
                atexit.register(self.close)
                self._registered = True
            self._template = Template(niced=niced, entry=self._entry)
        return self._template

    def _discard(self) -> None:
        template, self._template = self._template, None
        if template is None:
            return
        self._ordered = [(told, run) for told, run in self._ordered if run.supervisor() is None and run.read_result() is None]
        if template.alive() and any(told is template for told, _ in self._ordered):
            template.retire()  # it may still be importing: it carries out what it was told, and then ends
        else:
            template.end()
