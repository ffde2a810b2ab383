"""Which layers depend on the batch, and what each can become: a layer is changed in place, so that whoever holds it holds what it became.

Runs in the kernel and in the ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from nbddp.norm.sync import BatchNorm, SyncBatchNorm, sync_type
from nbddp.wrappers import PREFIXES, named_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KINDS = ("sync", "batch", "layer", "group", "none")
"""What BatchNorm layers can become."""

BECOMES = {"sync": "SyncBatchNorm", "batch": "BatchNorm", "layer": "LayerNorm", "group": "GroupNorm", "none": "Identity"}
"""The same in words."""

MIXING = ("layer", "group")
"""What mixes the features of a sample."""

MOST_GROUPS = 32
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_ATTRIBUTES = ("num_features", "eps", "momentum", "affine", "track_running_stats", "process_group")
_DIMENSIONED: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OF_ANY_DIMENSION: tuple[type[_BatchNorm], ...] = (nn.SyncBatchNorm, SyncBatchNorm, BatchNorm)
_FORWARDS = {kind.forward for kind in (*_DIMENSIONED, *_OF_ANY_DIMENSION)}
_CAME_FROM, _KIND = "batch_norm_type", "batch_norm_became"
"""Attributes of a layer that was swapped: the class of BatchNorm that it was, with its check of the input's dimensions, and what it became."""


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each sample: of (N, C) as `nn.LayerNorm(C)`; of (N, C, *) over channels and positions, as `nn.GroupNorm(1, C)`.

    What a `BatchNorm1d` becomes, which takes both.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() < 3:
            return super().forward(input)
        return nn.functional.group_norm(input, 1, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a layer: what it became, and its class and attributes before; `undo` gives them back."""

    layer: nn.Module
    kind: str
    type: type[nn.Module]
    attributes: dict[str, Any]

    def undo(self) -> None:
        object.__setattr__(self.layer, "__dict__", self.attributes)
        self.layer.__class__ = self.type


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a model by name, each once, in order; wrappers don't show in the names."""
    return {name: module for name, module in named_modules(model) if isinstance(module, _BatchNorm)}


def is_kind(layer: nn.Module, kind: str, device: torch.device) -> bool:
    """Whether a layer is that already: as far as `sync` goes, for the device."""
    if kind == "sync":
        return type(layer) is sync_type(device)
    if kind == "batch":
        return isinstance(layer, _BatchNorm) and not is_synchronized(layer)
    if hasattr(layer, _KIND):
        return bool(getattr(layer, _KIND) == kind)
    if kind == "layer":
        return isinstance(layer, nn.LayerNorm) or (isinstance(layer, nn.GroupNorm) and layer.num_groups == 1)
    return isinstance(layer, nn.GroupNorm if kind == "group" else nn.Identity)


def is_result(layer: nn.Module) -> bool:
    """Whether a layer is what a BatchNorm may have become."""
    return isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.Identity)


def is_synchronized(layer: nn.Module) -> bool:
    """Whether the statistics of a layer are those of all ranks."""
    return isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm)


def obstacle(layer: nn.Module, kind: str) -> str | None:
    """Why a BatchNorm layer can't become one of `KINDS`; None where it can."""
    if parametrize.is_parametrized(layer):
        return "its parametrization would be lost"
    if type(layer).forward not in _FORWARDS or "forward" in vars(layer) or type(layer).__call__ is not nn.Module.__call__:
        return f"{'it' if 'forward' in vars(layer) else type(layer).__name__} has a forward of its own, which would be lost"
    if kind == "none" and not {"weight", "bias"} <= set(layer._parameters):  # a hook makes them in each forward
        return "its pruning, or its weight normalization, would be lost"
    return None


def unseen(layer: nn.Module) -> bool:
    """Whether a lazy layer has not seen a batch yet, and so does not know its channels, also where a state dict gave it weights."""
    return isinstance(layer, _LazyNormBase)


def scripted_layers(model: nn.Module) -> dict[str, str]:
    """The BatchNorm layers within what `torch.jit` compiled, by name, each with its class: they can be seen and not be changed."""
    found = {name: str(module.original_name) for name, module in named_modules(model) if isinstance(module, torch.jit.ScriptModule)}
    return {name: kind for name, kind in found.items() if kind in {known.__name__ for known in (*_DIMENSIONED, *_OF_ANY_DIMENSION)}}


def become(layer: _BatchNorm, kind: str, device: torch.device) -> Change:
    """Turn a BatchNorm layer into one of `KINDS`, in place.

    Parameters stay the same objects, with their device, dtype and requires_grad (an optimizer that holds them goes on); hooks, mode and further attributes
    stay. Running statistics stay for `sync` and `batch`, and go with the others; the affine weights go for `none`.
    """
    change = Change(layer, kind, type(layer), layer.__dict__)
    template = _MAKERS[kind](layer, device)
    kept = {name: value for name, value in layer.__dict__.items() if name not in _ATTRIBUTES}
    kept.update({name: value for name, value in vars(template).items() if not name.startswith("_") and name != "training"})
    kept["_parameters"] = {} if kind == "none" else dict(layer._parameters)
    kept["_buffers"] = dict(layer._buffers) if kind in ("sync", "batch") else {k: v for k, v in layer._buffers.items() if k not in _BUFFERS}
    kept.update({_CAME_FROM: _dimensioned(layer), _KIND: kind})
    if kind == "batch":
        del kept[_CAME_FROM], kept[_KIND]
    object.__setattr__(layer, "__dict__", kept)
    layer.__class__ = type(template)  # type: ignore[assignment]  # which is what this is about
    return change


def became(model: nn.Module) -> dict[str, str]:
    """What each layer of a model that was swapped became, by name."""
    return {name: getattr(module, _KIND) for name, module in named_modules(model) if hasattr(module, _KIND)}


def without_dropped(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict of a model as it was before its layers were swapped, without what they dropped."""
    there = {_plain(key) for key in state}
    dropped: set[tuple[str, ...]] = set()
    for name, module in model.named_modules(remove_duplicate=False):  # a state dict has the entries of a shared layer under each of its names
        own = _plain(name)
        if is_result(module) and (hasattr(module, _KIND) or (*own, "running_mean") in there):
            lost = (*_BUFFERS, "weight", "bias") if isinstance(module, nn.Identity) else _BUFFERS
            dropped.update((*own, key) for key in lost)
    return OrderedDict((key, value) for key, value in state.items() if _plain(key) not in dropped)


def _plain(name: str) -> tuple[str, ...]:
    """The parts of a name, without those of wrappers."""
    return tuple(part for part in name.split(".") if part and part not in PREFIXES)


def groups_of(layer: _BatchNorm) -> int:
    """The largest divisor of the number of channels up to 32.

    Where inputs may be (N, C), it leaves two channels in a group if it can: a value alone is its own mean, and nothing of the input would be left.
    """
    channels, least = layer.num_features, 1 if dimension(layer) in (2, 3) else 2
    return max((groups for groups in range(1, MOST_GROUPS + 1) if channels % groups == 0 and channels // groups >= least), default=1)


def dimension(layer: nn.Module) -> int | None:
    """1, 2 or 3 for inputs (N, C) or (N, C, L), (N, C, H, W), (N, C, D, H, W); None where the layer takes all of them."""
    known = _dimensioned(layer)
    return next((number for number, kind in enumerate(_DIMENSIONED, 1) if kind is known), None)


def _dimensioned(layer: nn.Module) -> type[_BatchNorm]:
    """The class of BatchNorm that a layer is, or that it was before it was synchronised."""
    before: type[_BatchNorm] = getattr(layer, _CAME_FROM, BatchNorm)
    checks = type(layer)._check_input_dim if isinstance(layer, _BatchNorm) else None  # a subclass may take inputs of other dimensions
    return next((kind for kind in _DIMENSIONED if isinstance(layer, kind) and checks is kind._check_input_dim), before)


def _batch_norm(layer: _BatchNorm, kind: type[_BatchNorm]) -> nn.Module:
    return kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta")


def _layer_norm(layer: _BatchNorm, _device: torch.device) -> nn.Module:
    if dimension(layer) in (2, 3):
        return nn.GroupNorm(1, layer.num_features, layer.eps, layer.affine, device="meta")
    return LayerNorm(layer.num_features, layer.eps, layer.affine, device="meta")


def _group_norm(layer: _BatchNorm, _device: torch.device) -> nn.Module:
    return nn.GroupNorm(groups_of(layer), layer.num_features, layer.eps, layer.affine, device="meta")


_MAKERS: dict[str, Callable[[_BatchNorm, torch.device], nn.Module]] = {
    "sync": lambda layer, device: _batch_norm(layer, sync_type(device)),
    "batch": lambda layer, _device: _batch_norm(layer, _dimensioned(layer)),
    "layer": _layer_norm,
    "group": _group_norm,
    "none": lambda _layer, _device: nn.Identity(),
}
