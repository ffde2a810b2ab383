"""Doing what was decided about normalization layers, and undoing it. Runs in the kernel and in the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from nbddp.errors import ConfigError
from nbddp.norm.layers import batch_norm_layers, became, become, is_kind, obstacle, unseen
from nbddp.wrappers import named_modules, unwrapped

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    from nbddp.norm.layers import Change

LAZY = "a lazy layer knows its channels after its first batch: call the model with one before, as in net(batch)"


def apply(model: nn.Module, kinds: Mapping[str, str], device: torch.device | None = None) -> list[Change]:
    """Let layers become what they are to be, by name as in `SwapReport.kinds`; those that are it already stay.

    Returns:
        what was changed; `Change.undo` of each, in reverse order, gives the model back as it was.

    Raises:
        ConfigError: for a name that is no BatchNorm layer of the model, or one that can't become that; the model is unchanged then.
    """
    device = device or device_of(model)
    layers = batch_norm_layers(model)
    modules = dict(named_modules(model))
    todo: list[tuple[_BatchNorm, str]] = []
    for name, kind in kinds.items():
        if name in layers and not is_kind(layers[name], kind, device):
            if (why := LAZY if unseen(layers[name]) else obstacle(layers[name], kind)) is not None:
                message = f"{shown(name)} can't become {kind}: {why}"
                raise ConfigError(message)
            todo.append((layers[name], kind))
        elif name not in layers and not (name in modules and is_kind(modules[name], kind, device)):
            what = f"is a {type(modules[name]).__name__}" if name in modules else "is not there"
            what = f"became {already[name]}" if (already := became(model)).get(name) else what
            message = f"{shown(name)} is to become {kind}: it must be a BatchNorm layer of {type(unwrapped(model)).__name__}, and {what}"
            raise ConfigError(message)
    changes: list[Change] = []
    try:
        for layer, kind in todo:
            changes.append(become(layer, kind, device))
    except BaseException:  # an interrupt between two layers
        undo(changes)
        raise
    return changes


def undo(changes: Sequence[Change]) -> None:
    """Give a model back as it was."""
    for change in reversed(changes):
        change.undo()


@contextlib.contextmanager
def swapped(model: nn.Module, kinds: Mapping[str, str], device: torch.device | None = None) -> Iterator[None]:
    """A model as it will be after `apply`, for a look at it; afterwards it is as it was.

    Raises:
        ConfigError: as `apply`.
    """
    changes = apply(model, kinds, device)
    try:
        yield
    finally:
        undo(changes)


def device_of(model: nn.Module) -> torch.device:
    """Where a model is: the device of its first parameter or buffer."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def shown(name: str) -> str:
    """The name of a layer, for messages."""
    return name or "the model itself"
