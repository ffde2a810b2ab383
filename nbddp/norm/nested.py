"""Tensors in the nested arguments and results of a model. Runs in the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, lists, mappings and dataclasses, each with the way to it."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(f"{path}.{name}", part) for name, part in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(f"{path}.{field.name}", getattr(value, field.name)) for field in fields(value)]
    return [found for way, part in parts for found in tensors_in(part, way)]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(part, change) for part in value)
    return value
