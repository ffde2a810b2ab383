"""What rank 0 decides for all ranks, and what follows from it: stops, limits of time, checkpoints that are due by the clock.

Decisions travel with the telemetry, so that all ranks act on them at the same step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbddp.worker.telemetry import SAVE_DUE, SAVE_OK, STOP_ASKED, STOP_TIME

if TYPE_CHECKING:
    from nbddp.worker.context import Context
    from nbddp.worker.progress import Progress
    from nbddp.worker.saver import Saver


class Decisions:
    """`due` and `old_enough` are rank 0's words on checkpoints, kept until one is written; `settled` says that no stop changes anything any more."""

    def __init__(self, context: Context, saver: Saver, progress: Progress) -> None:
        self._context, self._saver, self._progress = context, saver, progress
        self._began = time.monotonic()
        self.due = self.old_enough = self.settled = False

    @property
    def elapsed_s(self) -> float:
        """How long the run has trained, the runs that it goes on from included."""
        return time.monotonic() - self._began

    def went_on_for(self, seconds: float) -> None:
        """Count the time of the runs that this one goes on from."""
        self._began -= seconds

    def decide(self) -> int:
        """The flags of rank 0, as of now."""
        self._saver.release_best()
        flags = 0
        if self._context.run_dir.asked() == "stop":
            flags |= STOP_ASKED
        limit = self._context.config.max_time
        if limit is not None and self.elapsed_s >= limit:
            flags |= STOP_TIME
        if self._saver.due():
            flags |= SAVE_DUE
        if self._saver.old_enough():
            flags |= SAVE_OK
        return flags

    def heed(self, flags: int) -> None:
        """Take rank 0's flags in, on every rank."""
        self.due = self.due or bool(flags & SAVE_DUE)
        self.old_enough = self.old_enough or bool(flags & SAVE_OK)
        if self.settled:
            return
        if flags & STOP_ASKED:
            self.stop("asked", "stopped as asked")
        elif flags & STOP_TIME:
            self.stop("max_time", f"max_time of {self._context.config.max_time:g} s is over")

    def stop(self, reason: str, text: str) -> None:
        """Leave after this step. What the user wishes goes before a limit of time, which still brings a validation."""
        progress = self._progress
        if progress.stopped or progress.reason == reason:
            return
        progress.reason, progress.stopped = reason, reason != "max_time"
        if self._context.ranks.rank == 0:
            self._context.events.emit("stopping", reason=reason, text=text, step=progress.step)

    def saved(self) -> None:
        """A checkpoint was written: none is due."""
        self.due = self.old_enough = False
