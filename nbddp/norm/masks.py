"""Masked layers: which modules multiply a mask into their weight, and what each of their features sees. Runs in the kernel and in the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Iterator

_MATRIX = 2


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """A masked layer: its name, and which output features see which input features, as booleans (out, in).

    `sees` is None where that is no such matrix: convolutions, masks without values, and weights of unknown orientation.
    """

    name: str
    module: nn.Module
    sees: torch.Tensor | None


def masked(name: str, module: nn.Module) -> Masked | None:
    """The module as a masked layer; None where it is none.

    It is one with a mask of the shape of its weight, or of the weight of the one layer that it holds, as in zuko, in nflows, and in layers written by hand
    (PixelCNN). Masks of features (coupling), of positions (attention) and of pruning are no such masks.
    """
    for weight_name, weight, linear in _weights(module):
        for mask_name, mask in _masks(module):
            if mask is weight or mask_name == weight_name.replace("_orig", "_mask") or not _fits(mask_name, mask, weight):
                continue
            if mask.dim() != _MATRIX or mask.is_meta or not linear:
                return Masked(name, module, None)
            seen = (mask.detach() != 0).cpu()
            return Masked(name, module, seen if seen.shape == weight.shape else seen.T)
    return None


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Weights that a mask may be multiplied into, and whether they are (out, in) as those of `nn.Linear`."""
    linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_floating_point() and not isinstance(parameter, UninitializedParameter) and parameter.dim() >= _MATRIX:
            yield name, parameter, linear
    if parametrize.is_parametrized(module, "weight"):
        yield from (("weight", original, linear) for original in module.get_submodule("parametrizations.weight").parameters() if original.dim() >= _MATRIX)
    weights = [(child, child._parameters.get("weight")) for child in module.children()]
    held = [(child, weight) for child, weight in weights if weight is not None and not is_lazy(weight)]
    shapes = [weight.shape for _, weight in held]
    for child, weight in held:
        if shapes.count(weight.shape) == 1 and weight.dim() >= _MATRIX:
            yield "", weight, isinstance(child, nn.Linear)


def _masks(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What may be a mask: buffers, parameters that are not trained, and tensors that are plain attributes."""
    frozen = {name: parameter for name, parameter in module._parameters.items() if parameter is not None and not parameter.requires_grad}
    for name, tensor in {**vars(module), **frozen, **module._buffers}.items():
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.dim() >= _MATRIX:
            yield name, tensor


def _fits(name: str, mask: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a tensor has the shape and the values of a mask for a weight; one that is called otherwise needs zeros and ones."""
    if "mask" not in name.lower():
        return mask.shape == weight.shape and not mask.is_meta and bool(((mask == 0) | (mask == 1)).all() and mask.any() and not mask.all())
    if mask.dim() == weight.dim() > _MATRIX:
        return mask.numel() > 1 and all(size in (1, full) for size, full in zip(mask.shape, weight.shape, strict=True))
    return mask.shape in (weight.shape, weight.shape[::-1])
