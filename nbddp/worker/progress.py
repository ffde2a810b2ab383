"""How far a run is, and what decides which checkpoint is best. The same on every rank, since it is fed with reduced values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbddp.config import TrainConfig


@dataclass(slots=True)
class Progress:
    """`epoch` is the one under way, from 1; `epoch_step` the steps done in it; `step` those of the whole run.

    `epochs_done` counts those whose validation is over as well. `reason` says why the run ends before its last epoch or step; `stopped` that it was not
    to end there: it was asked to stop, or refused a step, whereas a limit of time is an end like any other.
    """

    stage: int = 0
    epoch: int = 0
    step: int = 0
    epoch_step: int = 0
    epochs_done: int = 0
    stopped: bool = False
    reason: str | None = None


@dataclass(slots=True)
class Best:
    """The best monitored value so far."""

    mode: str
    min_delta: float
    value: float | None = None
    epoch: int = 0
    step: int = 0
    last: float | None = field(default=None)

    @classmethod
    def of(cls, config: TrainConfig) -> Best:
        return cls(config.mode, config.min_delta)

    def update(self, value: float, progress: Progress) -> bool:
        """Take a value in; return whether it is better than all before. A value that is not finite never is."""
        self.last = value
        if not math.isfinite(value):
            return False
        gain = math.inf if self.value is None else (self.value - value) * (1 if self.mode == "min" else -1)
        if gain <= self.min_delta:
            return False
        self.value, self.epoch, self.step = value, progress.epoch, progress.step
        return True

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "epoch": self.epoch, "step": self.step, "mode": self.mode, "min_delta": self.min_delta}
