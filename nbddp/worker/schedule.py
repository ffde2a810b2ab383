"""The learning rates of a stage: the schedules of the options, or the scheduler that a hook makes.

Runs in the ranks. The options' schedules are a closed form of the number of applied steps and of the rates that the optimizer was made with, for each group
its own: so a run that goes on from a checkpoint may be given another rate, length or schedule, and groups keep their ratios. torch's schedulers, which keep
rates in their state, are for hooks.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nbddp.evaluation.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from nbddp.config import TrainConfig

PLATEAU_PATIENCE = 10
"""Values without an improvement after which the next one lowers the rates to a tenth: torch's default."""


def shape(schedule: str, step: int, *, warmup: int, total: int | None) -> float:
    """The part of its base rate that step `step` (from 1) takes.

    The warm-up is k / warmup at step k: step 1 has the first part and step `warmup` the whole rate, 0 would be at a step 0. From there linear and cosine fall
    so that they would be 0 at step total + 1: the last step of a stage still moves the weights.
    """
    peak = max(warmup, 1)
    if step <= peak:
        return step / peak
    if schedule not in ("linear", "cosine"):
        return 1.0
    assert total is not None
    done = min(1.0, (step - peak) / (total + 1 - peak))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


class Scheduler:
    """The rates of an optimizer, advanced by steps that were applied and by epochs that are over.

    Made right after the optimizer. To go on from a checkpoint, the optimizer's state is loaded first.

    Raises:
        StepError: at construction, where the hook returns something else or can't be advanced as asked, and where a schedule lacks the end that it leads to.
    """

    def __init__(self, optimizer: Optimizer, config: TrainConfig, hook: Callable[[Any], Any] | None, *, total_steps: int | None) -> None:
        self._part = _Shaped(optimizer, config, total_steps) if hook is None else _Hooked(optimizer, config, hook)
        self._steps = self._epochs = 0

    @property
    def sets_rates(self) -> bool:
        """Whether the rates of each step are the schedule's, whatever others set."""
        return isinstance(self._part, _Shaped) and self._part.moves

    def after_step(self) -> None:
        """After a step whose update was applied; others, such as those with an overflow of fp16, don't count."""
        self._steps += 1
        self._part.after_step(self._steps)

    def after_epoch(self, value: float | None) -> None:
        """`value` is what was monitored in this epoch, the same on every rank; None where nothing was, and then a plateau can't be told."""
        self._epochs += 1
        self._part.after_epoch(value)

    def state(self) -> dict[str, Any]:
        """Tensors and plain types, as far as the hook's scheduler keeps to them."""
        return {"steps": self._steps, "epochs": self._epochs, "kind": self._part.kind, "rates": list(self._part.rates), "own": self._part.state()}

    def load(self, state: dict[str, Any]) -> bool:
        """Go on from a saved state; return False where that is of another schedule: this one is then entered where that one was.

        Base rates that are not those of the saved run win over these.
        """
        if state["kind"] != self._part.kind:
            self.advance(state["steps"], state["epochs"])
            return False
        self._steps, self._epochs = state["steps"], state["epochs"]
        self._part.load(state["own"], state["rates"], self._steps)
        return True

    def advance(self, steps: int, epochs: int) -> None:
        """Enter the schedule as if so many steps were applied and epochs over."""
        self._steps, self._epochs = steps, epochs
        self._part.enter(steps, epochs)


class _Shaped:
    """A schedule of the options: constant, linear, cosine or plateau, each after a warm-up."""

    def __init__(self, optimizer: Optimizer, config: TrainConfig, total_steps: int | None) -> None:
        self.kind: str = config.schedule
        self._warmup, self._total = config.warmup_steps, total_steps
        if config.schedule in ("linear", "cosine") and total_steps is None:
            message = f"schedule={config.schedule} ends with the stage, whose length is not known: give epochs or max_steps"
            raise StepError(message)
        if total_steps is not None and config.warmup_steps > total_steps:
            message = f"warmup_steps={config.warmup_steps} is more than the {total_steps} steps of the stage"
            raise StepError(message)
        self.moves = config.schedule != "constant" or config.warmup_steps > 0
        if self.moves and any("lr" not in group for group in optimizer.param_groups):
            message = f"{type(optimizer).__name__} has no lr, and schedule={config.schedule} with warmup_steps={config.warmup_steps} sets one: leave them out"
            raise StepError(message)
        self._optimizer = optimizer
        self.rates = [float(group.get("lr", math.nan)) for group in optimizer.param_groups]
        self._plateau = _Plateau(config) if config.schedule == "plateau" else None
        self._step = 0
        if self.moves:
            self._set()

    def after_step(self, steps: int) -> None:
        self._step = steps
        if self.moves:
            self._set()

    def after_epoch(self, value: float | None) -> None:
        if self._plateau is not None and value is not None:
            self._plateau.step(value)
            self._set()

    def state(self) -> dict[str, Any]:
        return {"moves": self.moves, "plateau": None if self._plateau is None else self._plateau.state()}

    def load(self, own: dict[str, Any], rates: list[float], steps: int) -> None:
        self._step = steps
        if self._plateau is not None:
            self._plateau.load(own["plateau"])
        if self.moves or own["moves"] or rates != self.rates:  # else an optimizer's own changes of its rate stay
            self._set()

    def enter(self, steps: int, epochs: int) -> None:
        self._step = steps
        self._set()

    def _set(self) -> None:
        """Set the rates of the next step."""
        part = shape(self.kind, self._step + 1, warmup=self._warmup, total=self._total)
        if self._plateau is not None:
            part *= self._plateau.part
        for group, rate in zip(self._optimizer.param_groups, self.rates, strict=True):
            if not math.isnan(rate):
                _set_rate(group, rate * part)


class _Plateau:
    """The part of the rates that is left after torch's ReduceLROnPlateau: it works on a rate of its own that begins at 1, so that a warm-up goes with it."""

    def __init__(self, config: TrainConfig) -> None:
        # With an early stop in sight the rates fall half-way to it, or it would always come first.
        patience = PLATEAU_PATIENCE if config.patience is None else (config.patience - 1) // 2
        self._carrier = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self._made = ReduceLROnPlateau(self._carrier, mode=config.mode, patience=patience, threshold=config.min_delta, threshold_mode="abs")

    @property
    def part(self) -> float:
        return float(self._carrier.param_groups[0]["lr"])

    def step(self, value: float) -> None:
        self._made.step(value)

    def state(self) -> dict[str, Any]:
        return {"part": self.part, "best": self._made.best, "num_bad_epochs": self._made.num_bad_epochs, "last_epoch": self._made.last_epoch}

    def load(self, state: dict[str, Any]) -> None:
        self._carrier.param_groups[0]["lr"] = state["part"]
        self._made.best, self._made.num_bad_epochs, self._made.last_epoch = state["best"], state["num_bad_epochs"], state["last_epoch"]


class _Hooked:
    """The hook's scheduler, advanced per step or per epoch."""

    def __init__(self, optimizer: Optimizer, config: TrainConfig, hook: Callable[[Any], Any]) -> None:
        if config.schedule != "constant" or config.warmup_steps:
            message = "scheduler(optimizer) makes the schedule: leave schedule and warmup_steps out, or the hook"
            raise StepError(message)
        self._optimizer, self._hook = optimizer, hook
        self._per_step = config.scheduler_interval == "step"
        self._lrs = [None if "lr" not in group else float(group["lr"]) for group in optimizer.param_groups]
        self._made = self._make()

    def _make(self) -> LRScheduler:
        made = self._hook(self._optimizer)
        if not isinstance(made, LRScheduler | ReduceLROnPlateau):
            message = f"scheduler(optimizer) returned {type(made).__name__}: it must be a torch.optim.lr_scheduler"
            raise StepError(message)
        if getattr(made, "optimizer", self._optimizer) is not self._optimizer:
            message = f"scheduler(optimizer) returned a {type(made).__name__} of another optimizer: it must be of the one it was given"
            raise StepError(message)
        self._plateau = isinstance(made, ReduceLROnPlateau)
        if self._plateau and self._per_step:
            message = "ReduceLROnPlateau advances by the value of an epoch: set --scheduler-interval epoch"
            raise StepError(message)
        self.kind = type(made).__name__
        self.rates = [float(group.get("initial_lr", group.get("lr", math.nan))) for group in self._optimizer.param_groups]
        return made

    def after_step(self, steps: int) -> None:
        if self._per_step:
            self._made.step()

    def after_epoch(self, value: float | None) -> None:
        if self._per_step:
            return
        if not self._plateau:
            self._step()
        elif value is not None:
            self._made.step(value)  # type: ignore[arg-type]  # a plateau's takes the value, and is typed by its base class here

    def _step(self, times: int = 1) -> None:
        """Without torch's warning that no update came first: in this process none may have, after a checkpoint or with every step of an epoch left out."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)`", category=UserWarning)
            for _ in range(times):
                self._made.step()

    def state(self) -> dict[str, Any]:
        return self._made.state_dict()

    def load(self, own: dict[str, Any], rates: list[float], steps: int) -> None:
        self._made.load_state_dict(own)
        if rates == self.rates:
            return
        ratios = [now / before if before else 1.0 for now, before in zip(self.rates, rates, strict=True)]
        for group, ratio in zip(self._optimizer.param_groups, ratios, strict=True):
            for key in ("lr", "initial_lr"):
                if key in group:
                    _set_rate(group, float(group[key]) * ratio, key)
        for scheduler in (self._made, *getattr(self._made, "_schedulers", ())):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * ratio for base, ratio in zip(scheduler.base_lrs, ratios, strict=True)]

    def enter(self, steps: int, epochs: int) -> None:
        """Make it anew, from the rates that the optimizer was made with, and advance it."""
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group.pop("initial_lr", None)
            if lr is not None:
                _set_rate(group, lr)
        self._made = self._make()
        if not self._plateau:
            self._step(steps if self._per_step else epochs)


def _set_rate(group: dict[str, Any], rate: float, key: str = "lr") -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(rate)  # compiled and captured optimizers hold on to the tensor
    else:
        group[key] = rate
