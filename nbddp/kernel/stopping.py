"""The order of stopping: ask, then show all stacks and terminate, then kill.

One per run that is shown: the interrupts of a cell and the presses of the button take the same steps, whichever comes next. Runs in the kernel, in
any thread; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from nbddp.rundir import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.rundir import RunDir

LABELS = ("Stop in order", "Show all stacks and terminate", "Kill all ranks", "Killed")
MEANINGS = (
    "All ranks leave after the same step and write a checkpoint",
    "The Python stacks of all ranks, then SIGTERM; the last checkpoint stays",
    "SIGKILL to every process of the run; the last complete checkpoint stays",
    "Nothing is left to do",
)
_DONE = ("", "stopping in order, with a checkpoint", "terminating", "killing")
_NEXT = ("", "to terminate", "to kill", "")


class Controls(Protocol):
    """What can be asked of a run; a Run has it."""

    def stop(self) -> None: ...
    def stacks(self) -> object: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def stacks_path(run_dir: RunDir) -> Path:
    """The stacks that were taken before a run was terminated."""
    return run_dir.logs / "stacks.txt"


class Stopping:
    """How far a run is in the order of stopping; made by `stopping_of`.

    Attributes:
        stacks: where the ranks were when they were terminated; empty before.
    """

    def __init__(self, run_dir: RunDir, controls: Controls) -> None:
        self._run_dir, self._controls = run_dir, controls
        self._lock = threading.Lock()
        self._taken = 0
        self._listeners: list[Callable[[], None]] = []
        self.stacks = ""

    @property
    def stage(self) -> int:
        """How many steps were taken; a run that was asked to stop from elsewhere has taken the first."""
        if self._taken == 0 and self._run_dir.asked() == "stop":
            return 1
        return self._taken

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` after each change, from the thread that made it."""
        self._listeners.append(listener)

    def advance(self) -> int:
        """Take the next step and return its number: 1 asked, 2 terminated, 3 killed. After the last it is taken again."""
        with self._lock:
            self._taken = stage = min(self.stage + 1, 3)
        self._tell()  # before it is done: the stacks can take two seconds, and the next step need not wait for them
        if stage == 1:
            self._controls.stop()
        elif stage == 2:
            self.stacks = str(self._controls.stacks())
            with contextlib.suppress(OSError):  # the disk is full, or the directory was deleted: they are shown all the same
                write_atomically(stacks_path(self._run_dir), self.stacks.encode())
            self._tell()
            self._controls.terminate()
        else:
            self._controls.kill()
        return stage

    def said(self, stage: int, again: str) -> str:
        """What a step did, and what comes next: `again` names the deed, such as "interrupt again"."""
        return f"{_DONE[stage]}; {again} {_NEXT[stage]}" if _NEXT[stage] else _DONE[stage]

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()


_known: WeakValueDictionary[Path, Stopping] = WeakValueDictionary()


def stopping_of(run_dir: RunDir, controls: Controls) -> Stopping:
    """The order of a run: the same for all of this kernel's views of it, and for the cell that waits for it."""
    return _known.setdefault(run_dir.path, Stopping(run_dir, controls))
