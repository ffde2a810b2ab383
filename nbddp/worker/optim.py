"""The optimizer and the scheduler of a stage."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds: here it is part of the warm-up
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nbddp.worker.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from nbddp.config import TrainConfig

_CLASSES: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def make_optimizer(model: nn.Module, config: TrainConfig, hook: Callable[[nn.Module], Any] | None) -> Optimizer:
    """The hook's optimizer, or the one that the options name, over the parameters that require a gradient.

    Raises:
        StepError: where the hook returns something else.
    """
    if hook is not None:
        made = hook(model)
        if not isinstance(made, torch.optim.Optimizer):
            message = f"optimizer(model) returned {type(made).__name__}: it must be a torch.optim.Optimizer"
            raise StepError(message)
        known = {id(parameter) for parameter in model.parameters()}
        if foreign := [p for group in made.param_groups for p in group["params"] if id(p) not in known]:
            message = (
                f"optimizer(model) holds {len(foreign)} parameters that are not the model's (the first of shape {tuple(foreign[0].shape)}): "
                "only those of the model it was given are kept equal between the ranks"
            )
            raise StepError(message)
        return made
    options: dict[str, Any] = {name: getattr(config, name) for name in ("lr", "weight_decay", "momentum") if getattr(config, name) is not None}
    if config.fused:
        options["fused"] = True
    return _CLASSES[config.optimizer]([p for p in model.parameters() if p.requires_grad], **options)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` can't be called without a closure, as for LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Scheduler:
    """The scheduler hook's object, advanced per step or per epoch."""

    def __init__(self, optimizer: Optimizer, config: TrainConfig, hook: Callable[[Any], Any] | None) -> None:
        self.made: Any = None if hook is None else hook(optimizer)
        if hook is not None and not isinstance(self.made, LRScheduler | ReduceLROnPlateau):
            message = f"scheduler(optimizer) returned {type(self.made).__name__}: it must be a torch.optim.lr_scheduler"
            raise StepError(message)
        self._plateau = isinstance(self.made, ReduceLROnPlateau)
        self._per_step = config.scheduler_interval == "step" and self.made is not None
        if self._plateau and self._per_step:
            message = "ReduceLROnPlateau advances by the value of an epoch: set --scheduler-interval epoch"
            raise StepError(message)

    def after_step(self) -> None:
        if self._per_step:
            self.made.step()

    def after_epoch(self, value: float | None) -> None:
        """`value` is what was monitored in this epoch, the same on every rank; None where nothing was, and then a plateau can't be told."""
        if self.made is None or self._per_step:
            return
        if not self._plateau:
            self.made.step()
        elif value is not None:
            self.made.step(value)

    def state(self) -> dict[str, Any] | None:
        return None if self.made is None else self.made.state_dict()
