"""This rank among the others: what it sends them, and what it gets from all. A single process needs no process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    telemetry: dist.ProcessGroup | None

    @classmethod
    def single(cls, device: torch.device) -> Ranks:
        """A process without others, and without a process group."""
        return cls(0, 1, 0, device, "gloo", None)

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

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor's elements to rank 0, which has to `receive` them; blocks. For tensors that `gather_objects` would copy too often."""
        if tensor.numel():
            dist.send(_bytes(tensor.detach().to("cpu").contiguous()), dst=0, group=self.telemetry)

    def receive(self, buffer: torch.Tensor, source: int) -> torch.Tensor:
        """On rank 0: write what another rank sends into a contiguous tensor on the CPU, and return that."""
        if buffer.numel():
            dist.recv(_bytes(buffer), src=source, group=self.telemetry)
        return buffer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
