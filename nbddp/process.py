"""Identity of processes: a pid together with its start time, so that a recycled pid is never signalled.

Used in every process; imports neither torch nor Jupyter. Linux only, like the launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time (clock ticks after boot) of a process, from /proc (proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this host."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None where there is none."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, stat[1])

    @classmethod
    def current(cls) -> ProcessId:
        stat = _stat(os.getpid())
        return cls(os.getpid(), 0 if stat is None else stat[1])

    @classmethod
    def from_json(cls, value: object) -> ProcessId | None:
        if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(item, int) for item in value):
            return cls(*value)
        return None

    def to_json(self) -> list[int]:
        return [self.pid, self.start]

    def alive(self) -> bool:
        """True while the process runs; a zombie has ended."""
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.start and stat[0] not in "ZX"

    def send(self, number: signal.Signals | int) -> bool:
        """Send a signal if the process is still this one; return whether it was sent."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True
