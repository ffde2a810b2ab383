"""Which failure ended a run, and the words for it.

A pure function over what is known of each rank's end. Used by the supervisor, which writes the verdict to result.json, and by the kernel, which
raises it. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import signal as signals
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nbddp.errors import HangDetected, LaunchError, NbddpError, OutOfMemory, ReplicaMismatch, WorkerError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Sequence

CANNOT_WRITE = 74
"""Exit code (EX_IOERR of sysexits.h) of a rank that could not even write down why it failed."""
_FATAL = {
    "Aborted": signals.SIGABRT,
    "Bus error": signals.SIGBUS,
    "Floating point exception": signals.SIGFPE,
    "Illegal instruction": signals.SIGILL,
}
"""What faulthandler calls the signals."""
SHORT_OF_MEMORY = "if memory was short, the kernel's out-of-memory killer did it"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed. `kind` is the name of a class in `nbddp.errors`; `line` counts within the cell, or within the file where there is no cell."""

    kind: str
    message: str
    rank: int | None = None
    type_name: str = ""
    cell: int | None = None
    line: int | None = None
    traceback: str = ""
    signal: int | None = None
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Failure:
        """Read `to_json`'s record; fields of later versions are left out."""
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})

    def to_exception(self, log_tail: Sequence[str] = ()) -> NbddpError:
        """The exception to raise; `log_tail` are the last lines that the rank printed."""
        if self.kind == "LaunchError":
            return LaunchError(self.message)
        if self.kind in ("WorkerError", "OutOfMemory"):
            return (OutOfMemory if self.kind == "OutOfMemory" else WorkerError)(
                self.message,
                rank=self.rank,
                log_tail=log_tail,
                type_name=self.type_name,
                cell=self.cell,
                line=self.line,
                remote_traceback=self.traceback,
            )
        if self.kind == "ReplicaMismatch":
            return ReplicaMismatch(self.message, rank=self.rank, log_tail=log_tail)
        if self.kind == "HangDetected":
            return HangDetected(self.message, rank=self.rank, log_tail=log_tail)
        return WorkerLost(self.message, rank=self.rank, log_tail=log_tail, signal=self.signal, exit_code=self.exit_code)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What is known of the end of a rank.

    `failed` is the data of its event, if it wrote one; `time` is when that was written, or else when the process was seen to be gone (monotonic
    seconds). `exit_code` is negative for a signal and None where it is not known. `ours` says that the signal was sent by the supervisor,
    `in_collective` that the rank was inside a collective when it was aborted.
    """

    rank: int
    time: float
    exit_code: int | None = None
    failed: dict[str, Any] | None = None
    finished: bool = False
    ours: bool = False
    in_collective: bool = False

    @property
    def _silent(self) -> bool:
        """Gone by itself, without a word."""
        return self.failed is None and not self.finished and not self.ours and self.exit_code is not None

    @property
    def killed(self) -> bool:
        return self._silent and (self.exit_code or 0) < 0 and not self.aborted

    @property
    def aborted(self) -> bool:
        """Ended by the abort of a communication library, which is the echo of another rank's failure as often as not."""
        return self._silent and self.exit_code == -signals.SIGABRT and self.in_collective

    @property
    def vanished(self) -> bool:
        return self._silent and (self.exit_code or 0) >= 0

    @property
    def raised(self) -> bool:
        return self.failed is not None and not self.failed.get("collective")

    @property
    def failed_in_collective(self) -> bool:
        return self.aborted or (self.failed is not None and bool(self.failed.get("collective")))


def verdict(ends: Sequence[RankEnd], *, memory_hint: str = SHORT_OF_MEMORY) -> Failure | None:
    """Return the failure that the others followed from; None where no rank failed by itself.

    A signal that is not ours goes before an exit without a word, that before an exception of the user's code, that before an error inside a
    collective; among equals the earliest is reported.
    """
    for kind in ("killed", "vanished", "raised", "failed_in_collective"):
        found = [end for end in ends if getattr(end, kind)]
        if found:
            return _describe(min(found, key=lambda end: end.time), memory_hint)
    return None


def exit_code_as_logged(exit_code: int | None, log: str) -> int | None:
    """The exit code of a rank that crashed, as the first of its fatal signals would have made it; `log` is the end of what the rank printed.

    On a fatal signal Python's faulthandler writes the stacks of all threads, and may crash itself over one that runs meanwhile. The rank then ends
    by SIGSEGV, and its log has two fatal errors, the second without stacks.
    """
    errors = log.split("Fatal Python error: ")[1:]
    if exit_code != -signals.SIGSEGV or len(errors) < 2 or "(most recent call first)" in errors[-1]:
        return exit_code
    return -_FATAL.get(errors[-2].partition("\n")[0], signals.SIGSEGV)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; numbers without a name stay."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(number)


def _describe(end: RankEnd, memory_hint: str) -> Failure:
    if end.failed is not None:
        return _raised(end.rank, end.failed)
    code = end.exit_code or 0
    if code < 0:
        number = -code
        message = f"rank {end.rank} was killed by signal {number} ({signal_name(number)})"
        if end.aborted:
            message = f"rank {end.rank} was aborted inside a collective (signal {number}, {signal_name(number)})"
        elif number == signals.SIGKILL:
            message += f"; {memory_hint}"
        elif number in (signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE, signals.SIGABRT):
            message += ": a crash in native code; its log may say where"
        return Failure("WorkerLost", message, end.rank, signal=number)
    if code == CANNOT_WRITE:
        message = f"rank {end.rank} could not write to the run directory: its disk is full, or over quota, or gone"
        return Failure("WorkerLost", message, end.rank, exit_code=code)
    message = f"rank {end.rank} left with exit code {code} and without a word, as os._exit does: leave a step by returning or by raising"
    return Failure("WorkerLost", message, end.rank, exit_code=code)


def _raised(rank: int, record: dict[str, Any]) -> Failure:
    """The failure that a rank wrote down itself."""
    name, text = str(record.get("type") or "Exception"), str(record.get("message") or "").strip()
    cell, line, file = record.get("cell"), record.get("line"), record.get("file")
    exit_code = record.get("exit_code")
    where = f" (Cell In[{cell}], line {line})" if cell is not None else f" ({file}, line {line})" if file and line is not None else ""
    if record.get("replicas"):
        return Failure("ReplicaMismatch", text, record.get("about_rank"), name, cell, line, str(record.get("traceback") or ""))
    if exit_code is not None:
        what = f"left by sys.exit with exit code {exit_code}"
    else:
        what = ("failed inside a collective: " if record.get("collective") else "raised ") + (f"{name}: {text}" if text else name)
        if record.get("collective") and "Timed out" in text:
            what += "; another rank did not come to it within --process-group-timeout-s, and its log tells what it did"
    kind = "OutOfMemory" if record.get("oom") else "WorkerError"
    return Failure(kind, f"rank {rank} {what}{where}", rank, name, cell, line, str(record.get("traceback") or ""), exit_code=exit_code)
