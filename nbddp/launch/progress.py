"""What the event files say about a run that matters to its supervision: who started, moved, failed or finished.

A fold over events, by the supervisor while the run goes on, and by any kernel that finds a run whose supervisor is gone. Imports neither torch
nor Jupyter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.events import SUPERVISOR
from nbddp.process import ProcessId

if TYPE_CHECKING:
    from nbddp.events import Event


@dataclass(slots=True)
class RankProgress:
    """One rank. `place` is its last position and phase, `heard` the monotonic time of its last event."""

    rank: int
    process: ProcessId | None = None
    place: tuple[Any, ...] | None = None
    phase: str = "starting"
    heard: float = 0.0
    failed: dict[str, Any] | None = None
    failed_time: float = 0.0
    finished: dict[str, Any] | None = None


@dataclass(slots=True)
class Progress:
    """All ranks.

    `first_step` says that rank 0 has made its first optimizer step; `launched` is the data of the supervisor's event; `loss` is the mean over the last
    epoch and `best` the best checkpoint, for lists of runs.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    launched: dict[str, Any] = field(default_factory=dict)
    first_step: bool = False
    step: int = 0
    epoch: int = 0
    stop_reason: str | None = None
    loss: float | str | None = None
    best: dict[str, Any] | None = None

    def fold(self, event: Event) -> bool:
        """Take one event in; return whether it shows that a rank got on."""
        if event.rank == SUPERVISOR:
            if event.kind == "launched":
                self.launched = event.data
            return False
        row = self.ranks.setdefault(event.rank, RankProgress(event.rank))
        row.heard = max(row.heard, event.mono)
        data = event.data
        if event.kind == "started":
            row.process = ProcessId.from_json(data.get("process"))
        elif event.kind == "phase":
            row.phase = str(data.get("phase", row.phase))
            self.first_step = self.first_step or bool(data.get("first_step"))
        elif event.kind == "steps" and event.rank == 0 and data.get("step"):
            self.first_step, self.step = True, int(data["step"][-1])
            self.epoch = int(data["epoch"][-1]) if data.get("epoch") else self.epoch
            self.loss = (data.get("report") or {}).get("epoch_loss", self.loss)
        elif event.kind == "checkpoint" and data.get("name") == "best":
            self.best = {key: data.get(key) for key in ("value", "epoch", "step")}
        elif event.kind == "stopping":
            self.stop_reason = str(data.get("reason") or "")
        elif event.kind == "failed" and row.failed is None:
            row.failed, row.failed_time = data, event.mono
        elif event.kind == "finished":
            self._finished(row, data)
        elif event.kind == "heartbeat":
            return self._heartbeat(row, data)
        return event.kind != "message"

    def _heartbeat(self, row: RankProgress, data: dict[str, Any]) -> bool:
        row.phase = str(data.get("phase", row.phase))
        if row.rank == 0 and isinstance(step := data.get("step"), int) and step > self.step:
            self.step, self.epoch = step, int((data.get("position") or [self.epoch])[0])
        before, row.place = row.place, (tuple(data.get("position") or ()), row.phase)
        return row.place != before

    def _finished(self, row: RankProgress, data: dict[str, Any]) -> None:
        row.finished = data
        if row.rank == 0:
            self.step, self.epoch = int(data.get("step", self.step)), int(data.get("epoch", self.epoch))
            self.stop_reason = data.get("reason") or self.stop_reason
            self.first_step = self.first_step or self.step > 0

    def all_finished(self, nproc: int) -> bool:
        return all(rank in self.ranks and self.ranks[rank].finished is not None for rank in range(nproc))

    def result(self, state: str, error: dict[str, Any] | None, time: float) -> dict[str, Any]:
        """The record for result.json; `time` is in unix seconds."""
        return {
            "state": state,
            "time": time,
            "error": error,
            "first_step": self.first_step,
            "step": self.step,
            "epoch": self.epoch,
            "stop_reason": self.stop_reason,
            "summary": {"step": self.step, "epoch": self.epoch, "loss": self.loss, "best": self.best},
        }


BY_FORCE = ("terminated", "killed", "the kernel ended")
"""Reasons of runs that were stopped, but did not come to a common step and a last checkpoint."""


def last_words(result: dict[str, Any]) -> dict[str, Any]:
    """What the supervisor's last event repeats of a record for result.json."""
    return {key: result[key] for key in ("state", "error", "step", "epoch", "stop_reason")}
