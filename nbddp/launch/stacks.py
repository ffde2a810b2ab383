"""Where each rank is right now: Python stacks on request, without privileges.

The ranks register `faulthandler` on SIGUSR1, writing to a file in the run directory. Runs in the kernel and in the supervisor, on the ranks' host.
Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbddp.process import ProcessId
    from nbddp.rundir import RunDir

_DEADLINE_S = 2.0
_QUIET_S = 0.1
_POLL_S = 0.02


def stacks_file(run: RunDir, rank: int) -> Path:
    """Where a rank's faulthandler appends its stacks."""
    return run.logs / f"rank-{rank:05d}.stacks"


def _handles(process: ProcessId, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal; without one, SIGUSR1 would end it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def stacks(run: RunDir) -> dict[int, str]:
    """Ask the live ranks for the stacks of all their threads; innermost frame first.

    Takes at most 2 s; a rank that does not answer, because it is stopped or has not come far enough, has an empty text.
    """
    live = {rank: process for rank, process in run.processes() if process.alive()}
    asked = {rank: _size(stacks_file(run, rank)) for rank, process in live.items() if _handles(process, signal.SIGUSR1)}
    for rank in asked:
        live[rank].send(signal.SIGUSR1)
    now = time.monotonic()
    deadline, sizes, changed = now + _DEADLINE_S, asked, now
    while asked and now < deadline:
        current = {rank: _size(stacks_file(run, rank)) for rank in asked}
        if current != sizes:
            sizes, changed = current, now
        elif now - changed > _QUIET_S and all(sizes[rank] > size for rank, size in asked.items()):
            break
        time.sleep(_POLL_S)
        now = time.monotonic()
    return {rank: _take(stacks_file(run, rank)) for rank in live}


def _take(path: Path) -> str:
    """Read and empty the file; a writer without O_APPEND leaves zeros where it was emptied before."""
    try:
        with path.open("rb") as file:
            text = file.read().lstrip(b"\0").decode("utf-8", "replace")
        os.truncate(path, 0)
    except OSError:
        return ""
    return text
