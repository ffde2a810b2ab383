"""Which tensors are one, and which can be written to, by where in memory they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable


def place_of(tensor: torch.Tensor) -> Hashable | None:
    """What two tensors have in common that are one; None where that can't be told: of empty ones, sparse ones, and those that are made of other tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or not tensor.data_ptr():
        return None
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> Hashable | None:
    """What tensors have in common that are views of one memory; None as in `place_of`."""
    return None if place_of(tensor) is None else (tensor.device, tensor.untyped_storage().data_ptr())


def expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory, as expand() makes them: torch refuses to write to such a tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
