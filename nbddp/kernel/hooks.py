"""What can be said about hooks before anything starts: whether they are there, can be called as they will be, and leave nothing untrained.

Runs in the kernel.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

from nbddp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGUMENTS = {
    "loss": ("output", "target"),
    "training_step": ("model", "batch"),
    "validation_step": ("model", "batch"),
    "optimizer": ("model",),
    "scheduler": ("optimizer",),
    "collate_fn": ("samples",),
    "on_epoch_end": ("state",),
}
"""What each hook is called with."""

OBJECTS = ("metrics", "stages", "sampler")
"""Hooks that are not called, or not only, and are checked where they are read."""


def check_hooks(hooks: Mapping[str, object], model: nn.Module) -> None:
    """Check the hooks of a request.

    Raises:
        ConfigError: names the hook, the rule and the remedy.
    """
    loss, step = hooks.get("loss"), hooks.get("training_step")
    if loss is None and step is None:
        message = "neither loss nor training_step is given: loss = nn.CrossEntropyLoss(), or def training_step(model, batch)"
        raise ConfigError(message)
    if loss is not None and step is not None:
        message = "loss and training_step are both given: training_step computes the loss itself, keep one of the two"
        raise ConfigError(message)
    if isinstance(loss, type):
        message = f"loss is the class {loss.__name__}, not an instance: write loss = nn.{loss.__name__}()"
        raise ConfigError(message)
    for name, hook in hooks.items():
        if hook is not None and name not in OBJECTS:
            _check_call(name, hook)
    _check_parameters(loss, model)


def _check_call(name: str, hook: object) -> None:
    if not callable(hook):
        message = f"{name} is a {type(hook).__name__}: it must be a function"
        raise ConfigError(message)
    arguments = ARGUMENTS.get(name, ())
    try:
        signature = inspect.signature(hook.forward if isinstance(hook, nn.Module) else hook)
    except (TypeError, ValueError):  # of a function written in C, which need not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        message = f"{name}{signature} can't be called as {name}({', '.join(arguments)}), which is how it is called"
        raise ConfigError(message) from None


def _check_parameters(loss: object, model: nn.Module) -> None:
    if not isinstance(loss, nn.Module):
        return
    known = {id(parameter) for parameter in model.parameters()}
    if own := [name for name, p in loss.named_parameters() if p.requires_grad and id(p) not in known]:
        message = f"loss ({type(loss).__name__}) has parameters of its own, {', '.join(own[:4])}: make it a part of the model, which is trained"
        raise ConfigError(message)
