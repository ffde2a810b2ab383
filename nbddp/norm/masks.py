"""Masked layers: which modules multiply a mask into their weight, and what each of their features sees. Runs in the kernel and in the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MATRIX = 2


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """A masked layer: its name, and which output features see which input features, as booleans (out, in).

    `sees` is None where that is no such matrix: convolutions, masks without values, weights of unknown orientation, and modules with several masks.
    """

    name: str
    module: nn.Module
    sees: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A weight and the mask that is multiplied into it. `linear` says that the weight is (out, in) as that of `nn.Linear`."""

    weight: torch.Tensor
    mask: torch.Tensor
    linear: bool

    @property
    def turned(self) -> bool:
        """Whether the mask has the shape of the weight's transpose."""
        return self.mask.dim() == _MATRIX and self.mask.shape != self.weight.shape and self.mask.shape == self.weight.shape[::-1]


def masked(name: str, module: nn.Module, turned: Collection[type[nn.Module]] = ()) -> Masked | None:
    """The module as a masked layer; None where it is none.

    It is one with a mask of the shape of its weight, or of the weight of the one layer that it holds, as in zuko, in nflows, and in layers written by hand
    (PixelCNN). Masks of features (coupling), of positions (attention) and of pruning are no such masks.

    Args:
        name: of the module.
        module: the module.
        turned: classes whose masks are (in, out), from `turned_classes`: a square one does not tell.
    """
    pairs = list(_pairs(module))
    if not pairs:
        return Masked(name, module, None) if _holds_masks(module) else None
    first = pairs[0]
    if len({id(pair.weight) for pair in pairs}) > 1 or first.mask.dim() != _MATRIX or first.mask.is_meta or not first.linear:
        return Masked(name, module, None)
    seen = (first.mask.detach() != 0).cpu()
    return Masked(name, module, seen.T if first.turned or (type(module) in turned and seen.shape[0] == seen.shape[1]) else seen)


def turned_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of masked layers in a model whose masks are (in, out), as those that are not square tell."""
    return {type(module) for module in model.modules() if any(pair.turned for pair in _pairs(module))}


def zeroed(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weights that are zero wherever their mask is, with the mask: training may keep them so by their gradients, and no forward multiplies the mask in."""
    for pair in _pairs(module):
        mask = (pair.mask.T if pair.turned else pair.mask) != 0
        if not pair.weight.is_meta and not mask.is_meta and bool((pair.weight.detach()[~mask.expand_as(pair.weight)] == 0).all()):
            yield pair.weight, mask


def _pairs(module: nn.Module) -> Iterator[_Pair]:
    masks = list(_masks(module))
    for weight_name, weight, linear in _weights(module) if masks else ():  # most modules have none, and large networks have thousands
        for mask_name, mask in masks:
            if mask is not weight and mask_name != weight_name.replace("_orig", "_mask") and _fits(mask_name, mask, weight):
                yield _Pair(weight, mask, linear)
                break


def _holds_masks(module: nn.Module) -> bool:
    """Whether a module has masks in a list for the weights of layers in a list, or somewhere below."""
    listed: list[Any] = [mask for name, held in vars(module).items() if "mask" in name.lower() and isinstance(held, list | tuple) for mask in held]
    masks = [mask for mask in listed if isinstance(mask, torch.Tensor) and mask.dim() >= _MATRIX]
    weights = (
        [parameter for parameter in module.parameters() if not isinstance(parameter, UninitializedParameter) and parameter.dim() >= _MATRIX] if masks else []
    )
    return any(_fits("mask", mask, weight) for mask in masks for weight in weights)


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Weights that a mask may be multiplied into, and whether they are (out, in) as those of `nn.Linear`."""
    linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_floating_point() and not isinstance(parameter, UninitializedParameter) and parameter.dim() >= _MATRIX:
            yield name, parameter, linear
    if parametrize.is_parametrized(module, "weight"):
        yield from (("weight", original, linear) for original in module.get_submodule("parametrizations.weight").parameters() if original.dim() >= _MATRIX)
    weights = [(child, dict(child.named_parameters(recurse=False)).get("weight")) for child in module.children()]
    held = [(child, weight) for child, weight in weights if weight is not None and not is_lazy(weight)]
    shapes = [weight.shape for _, weight in held]
    for child, weight in held:
        if shapes.count(weight.shape) == 1 and weight.dim() >= _MATRIX:
            yield "", weight, isinstance(child, nn.Linear)


def _masks(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What may be a mask: buffers, parameters that are not trained, and tensors that are plain attributes, those of what makes the weight included."""
    frozen = {name: parameter for name, parameter in module.named_parameters(recurse=False) if not parameter.requires_grad}
    for name, tensor in {**vars(module), **frozen, **dict(module.named_buffers(recurse=False))}.items():
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.dim() >= _MATRIX:
            yield name, tensor
    if parametrize.is_parametrized(module, "weight"):
        for part in module.get_submodule("parametrizations.weight").children():
            yield from _masks(part)


def _fits(name: str, mask: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a tensor has the shape and the values of a mask for a weight; one that is called otherwise needs zeros and ones."""
    if "mask" not in name.lower():
        return mask.shape == weight.shape and not mask.is_meta and bool(((mask == 0) | (mask == 1)).all() and mask.any() and not mask.all())
    if mask.dim() == weight.dim() > _MATRIX:
        return mask.numel() > 1 and all(size in (1, full) for size, full in zip(mask.shape, weight.shape, strict=True))
    return mask.shape in (weight.shape, weight.shape[::-1])
