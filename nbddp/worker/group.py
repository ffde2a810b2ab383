"""The process groups of a rank: one for gradients, and one of its own for telemetry, so that the two never wait for each other."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from nbddp.worker.errors import ReplicasDiffer

if TYPE_CHECKING:
    from nbddp.planning import Plan

T = TypeVar("T")
_BUCKET_BYTES = 64 << 20
_DIGEST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    telemetry: dist.ProcessGroup | None

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0: BatchNorm's running statistics differ per rank after a step."""
        buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        if self.world_size > 1 and buffers:
            group = dist.group.WORLD
            assert group is not None
            dist._broadcast_coalesced(group, buffers, _BUCKET_BYTES, 0)  # type: ignore[attr-defined]  # as DDP does it: any dtype and layout, few messages

    def sum(self, values: list[float]) -> list[float]:
        """Sum float64 values over ranks; blocks."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.telemetry)
        return [float(value) for value in total]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, on every rank; blocks. For small plain values only."""
        if self.world_size == 1:
            return [value]
        gathered: list[T] = [value] * self.world_size
        dist.all_gather_object(gathered, value, group=self.telemetry)
        return gathered

    def compare_replicas(self, model: nn.Module) -> None:
        """Compare a digest of every parameter over the ranks.

        Raises:
            ReplicasDiffer: names the first parameters that are not the same bits on all ranks.
        """
        if self.world_size == 1:
            return
        named = [(name, parameter.detach()) for name, parameter in model.named_parameters() if parameter.numel()]
        if not named:
            return
        mine = torch.stack([_digest(parameter) for _, parameter in named]).cpu()
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.telemetry)
        for rank, other in enumerate(everyone):
            differing = (other != everyone[0]).any(dim=1).nonzero().flatten().tolist()
            if differing:
                names = ", ".join(named[index][0] for index in differing[:4])
                raise ReplicasDiffer(rank, names, len(differing))


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """Two int64 sums over the bits, the second weighted by position: exact, so independent of the order of summing."""
    flat = parameter.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # or its bytes could not be read as words
    raw = (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    digest = torch.zeros(2, dtype=torch.int64, device=parameter.device)
    for number, part in enumerate(raw[:whole].split(_DIGEST_BYTES)):  # in parts, so as not to need the parameter's size again
        words = part.view(torch.int64)
        place = torch.arange(1, words.numel() + 1, device=words.device)
        digest += torch.stack([words.sum(), (place * words).sum() * (2 * number + 1)])
    tail = raw[whole:].to(torch.int64)
    return digest + torch.stack([tail.sum(), (tail * torch.arange(1, tail.numel() + 1, device=tail.device)).sum()])


def join_group(plan: Plan, timeout_s: float) -> Ranks:
    """Form the process groups with the other ranks, whose addresses torch elastic has put into the environment."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", plan.device_indices[local_rank])
        torch.cuda.set_device(device)
    if world_size == 1:
        return Ranks(rank, world_size, local_rank, device, plan.backend, None)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(plan.backend, timeout=timeout, device_id=device if plan.backend == "nccl" else None)
    telemetry = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, world_size, local_rank, device, plan.backend, telemetry)


def leave_group() -> None:
    """Close the connections to the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
