"""What DataParallel, DDP, FSDP and torch.compile put around a module: how to get inside, and what names look like without it.

Runs in the kernel and in the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIXES = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""The attributes under which the wrappers hold the module, and so the parts of names that they add."""


def inside(model: object) -> tuple[str, object] | None:
    """The name of the wrapper and what it holds; None for what is no wrapper."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return type(model).__name__, model.module
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        return "torch.compile", model._modules["_orig_mod"]
    if isinstance(model, nn.Module) and "_fsdp_wrapped_module" in model._modules:
        return "FSDP", model._modules["_fsdp_wrapped_module"]
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module; wrappers of modules within it stay."""
    found: object = model
    while (inner := inside(found)) is not None:
        found = inner[1]
    assert isinstance(found, nn.Module)
    return found


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, as `nn.Module.named_modules` gives them, under names that no wrapper shows in, and without the wrappers themselves."""
    yield from _named(model, "", set())


def _named(model: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    model = unwrapped(model)
    if id(model) in seen:
        return
    seen.add(id(model))
    yield name, model
    for child, module in model._modules.items():
        if module is not None:
            yield from _named(module, f"{name}.{child}" if name else child, seen)
