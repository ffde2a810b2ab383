"""A model as it was, for when loading fails half-way: in a hook of the user's, in an extra state, or by an interrupt."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.checkpoint.memory import expanded

if TYPE_CHECKING:
    from collections.abc import Callable


class Undo:
    """Copies of a model's parameters, buffers and extra states on the CPU; `restore` puts all of them back, and the tensors in their places."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._extra: list[tuple[Callable[[Any], None], Any]] = []
        tensors: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                self._places.append((store, dict(store)))
                tensors.update({id(tensor): tensor for tensor in store.values() if tensor is not None})
            kind = type(module)
            if kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state:
                self._extra.append((module.set_extra_state, copy.deepcopy(module.get_extra_state())))
        self._values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]

    def restore(self) -> None:
        """Put everything back."""
        for store, before in self._places:
            store.clear()
            store.update(before)
        for tensor, value in self._values:
            if not expanded(tensor):  # to which nobody can write
                tensor.data.copy_(value)  # by .data, which autograd does not count as a change
        for take, state in self._extra:
            with contextlib.suppress(Exception):  # the user's own code, which may be what failed
                take(state)
