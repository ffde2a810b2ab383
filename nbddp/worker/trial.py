"""Running something for trial, before training: a batch through the compiler, or through the validation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbddp import rng

_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def trial(device: torch.device, *modules: Any) -> Iterator[None]:
    """Leave everything as it was: random streams, and of modules the buffers, gradients, and attributes of plain types, such as a counter of calls."""
    found = [module for root in modules if isinstance(root, nn.Module) for module in root.modules()]
    buffers = [(module, name, buffer, buffer.detach().clone()) for module in found for name, buffer in module._buffers.items() if buffer is not None]
    gradients = [(parameter, parameter.grad) for module in found for parameter in module.parameters(recurse=False)]
    for parameter, _ in gradients:
        parameter.grad = None
    plain = [(module, {name: value for name, value in vars(module).items() if type(value) in _PLAIN}) for module in found]
    try:
        with rng.preserved(device):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, values in plain:
            vars(module).update(values)
