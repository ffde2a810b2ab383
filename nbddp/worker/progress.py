"""How far a run is, which weights were the best, and when waiting for better ones ends. The same on every rank, since it is fed with reduced values only."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nbddp.numerals import value_text

if TYPE_CHECKING:
    from nbddp.worker.context import RankStage


@dataclass(slots=True)
class Progress:
    """`epoch` is the one under way, from 1 over all stages; `epoch_step` and `epoch_samples` are what was done in it; `step` counts those of the whole run.

    `epochs_done` counts those whose validation is over as well. `stage_step` and `stage_epochs_done` count within the stage. `reason` says why the run ends
    before its last epoch or step; `stopped` that it was not to end there: it was asked to stop, or refused a step, whereas a limit of time, or the end of
    patience, is an end like any other.
    """

    stage: int = 0
    epoch: int = 0
    step: int = 0
    epoch_step: int = 0
    epoch_samples: int = 0
    epochs_done: int = 0
    stage_step: int = 0
    stage_epochs_done: int = 0
    stopped: bool = False
    reason: str | None = None

    def enter_stage(self, index: int) -> None:
        """Begin a stage; the epoch that the one before it ended within is over."""
        self.stage, self.stage_step, self.stage_epochs_done = index, 0, 0
        self.epochs_done = self.epoch

    def begin_epoch(self) -> None:
        self.epoch, self.epoch_step, self.epoch_samples = self.epochs_done + 1, 0, 0

    def took_step(self, samples: int) -> None:
        """Count a step of `samples` samples over all ranks."""
        self.step, self.stage_step, self.epoch_step = self.step + 1, self.stage_step + 1, self.epoch_step + 1
        self.epoch_samples += samples

    def finish_epoch(self) -> None:
        self.epochs_done, self.stage_epochs_done = self.epochs_done + 1, self.stage_epochs_done + 1

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch is under way: not begun anew, and not over with its validation."""
        return self.epochs_done < self.epoch


@dataclass(slots=True)
class Best:
    """The best monitored value so far."""

    name: str
    mode: str
    min_delta: float
    value: float | None = None
    epoch: int = 0
    step: int = 0

    def update(self, value: float, progress: Progress) -> bool:
        """Take a value in; return whether it is better than all before. A value that is not finite never is."""
        if not math.isfinite(value):
            return False
        gain = math.inf if self.value is None else (self.value - value) * (1 if self.mode == "min" else -1)
        if gain <= self.min_delta:
            return False
        self.value, self.epoch, self.step = value, progress.epoch, progress.step
        return True

    def state(self) -> dict[str, Any]:
        return asdict(self)


class Monitor:
    """Follows the value that decides: which checkpoint is best, when a stage's patience is over, and what a plateau is told."""

    def __init__(self) -> None:
        self.name = "loss"
        self.best = Best("loss", "min", 0.0)
        self._counted = Best("loss", "min", 0.0)
        self.last: float | None = None
        self.judged_at = -1
        self._patience: int | None = None
        self._without_gain = 0
        self._fresh: float | None = None

    def enter(self, stage: RankStage) -> None:
        """Follow what a stage monitors: its patience is new, and so is the best where another value, or its other end, is watched."""
        config, self.name = stage.config, stage.plan.monitor
        if (self.best.name, self.best.mode) != (self.name, config.mode):
            self.best, self._counted = Best(self.name, config.mode, config.min_delta), Best(self.name, config.mode, config.min_delta)
        self.best.min_delta = self._counted.min_delta = config.min_delta
        self._patience, self._without_gain, self._fresh = config.patience, 0, None

    def judge(self, value: float, progress: Progress, *, counts: bool) -> bool:
        """Take a value in and return whether it is the best so far.

        Args:
            value: reduced over ranks.
            progress: where it was measured.
            counts: it was measured by its cadence, and not because the run happens to end here. Patience knows of no other values: what a run that goes
                on from here decides must not depend on where it was interrupted.
        """
        self.last, self.judged_at = value, progress.step
        better = self.best.update(value, progress)
        if counts:
            self._fresh = value
            self._without_gain = 0 if self._counted.update(value, progress) else self._without_gain + 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether as many values as the stage's patience allows were not better."""
        return self._patience is not None and self._without_gain >= self._patience

    @property
    def why(self) -> str:
        """Why the stage ends, in words."""
        best = "none was finite" if self.best.value is None else f"the best was {value_text(self.best.value)} in epoch {self.best.epoch}"
        return f"{self.name} was not better {self._without_gain} times in a row; {best}"

    def take_fresh(self) -> float | None:
        """The value since the last call, if there was one."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def state(self) -> dict[str, Any]:
        return {"without_gain": self._without_gain, "counted": self._counted.value, "fresh": self._fresh, "last": self.last}

    def load(self, state: dict[str, Any], best: dict[str, Any]) -> None:
        """Go on from a checkpoint: where the same value is monitored, its best and the count of those that were not better go on."""
        if (best.get("name"), best.get("mode")) != (self.name, self.best.mode):
            return
        self.best = Best(self.name, self.best.mode, self.best.min_delta, best["value"], int(best["epoch"]), int(best["step"]))
        self._counted = replace(self.best, value=state["counted"])
        self._without_gain, self._fresh, self.last = int(state["without_gain"]), state["fresh"], state["last"]
