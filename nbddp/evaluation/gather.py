"""Tensors of all ranks, on every rank, whatever their number, shapes and dtypes. Runs in the ranks, over the telemetry group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nbddp.evaluation.ranks import Ranks


def gather_tensors(tensors: list[torch.Tensor], ranks: Ranks) -> list[list[torch.Tensor]]:
    """Every rank's tensors, by rank, on the CPU; with a single rank, those given. Blocks; all ranks call it, also those without tensors."""
    if ranks.world_size == 1:
        return [tensors]
    described = ranks.gather_objects([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in one] for one in described]
    mine = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)  # gloo aborts where sizes differ: the longest decides
    if own := [_bytes(tensor) for tensor in tensors]:
        torch.cat(own, out=mine[: sum(sizes[ranks.rank])])
    everyone = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    if len(mine):
        dist.all_gather(everyone, mine, group=ranks.telemetry)
    return [
        [part.clone().view(dtype).reshape(shape) for part, (shape, dtype) in zip(raw[: sum(of)].split(of), one, strict=True)]  # clones begin at a whole word
        for raw, of, one in zip(everyone, sizes, described, strict=True)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
