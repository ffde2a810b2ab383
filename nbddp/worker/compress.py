"""Gradients made smaller for the wire: DDP's communication hooks.

Runs in the ranks. torch's own hooks are not used: that for bf16 refuses gloo, that for PowerSGD fails for parameters without a dimension, makes nan of a layer
whose gradient is 0, and keeps its state in a form that checkpoints can't hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from nbddp.worker.powersgd import PowerSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from nbddp.evaluation.ranks import Ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Compression(Protocol):
    """What a replica registers with DDP, and a checkpoint asks for its state."""

    def register(self, ddp: DistributedDataParallel) -> None:
        """Let DDP reduce gradients through this from the next backward pass on."""

    def state(self) -> dict[str, Any] | None:
        """This rank's own memory as tensors and plain types; None where there is none."""

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from `state` of the same rank; with None, from the beginning."""


def make_compression(name: str | None, ranks: Ranks) -> Compression | None:
    """The compression that `grad_compression` names; None where nothing is sent, or nothing compressed."""
    if name is None or ranks.world_size == 1:
        return None
    return PowerSGD(ranks.world_size) if name == "powersgd" else Cast(DTYPES[name], ranks.world_size)


class Cast:
    """Gradients travel, and are summed, in a dtype of 16 bits.

    bf16 has the range of float32 and 8 bits of precision, fp16 has 11 bits and turns what is beyond 65504 into inf and what is below 6e-8 into 0. Gradients
    that are sparse, or of 16 bits already, travel as they are.
    """

    def __init__(self, dtype: torch.dtype, world_size: int) -> None:
        self.dtype, self.world_size = dtype, world_size
        self._wires: dict[int, torch.Tensor] = {}

    def register(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(self, lambda compression, bucket: compression.send(bucket))

    def send(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Ask for the mean of a bucket; complex gradients are in it as pairs of real ones."""
        buffer = bucket.buffer()
        buffer.div_(self.world_size)  # before the cast, so that the sum has the range of one gradient
        wire = buffer if buffer.is_sparse or buffer.element_size() <= self.dtype.itemsize else self._wire(bucket.index(), buffer).copy_(buffer)

        def widen(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            (reduced,) = done.value()
            return reduced if wire is buffer else buffer.copy_(reduced)

        work = dist.all_reduce(wire, async_op=True)
        return cast("Future[torch.Tensor]", work.get_future().then(widen))

    def state(self) -> None:
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """There is nothing to remember."""

    def _wire(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Kept from step to step: fresh memory takes a CPU longer than the cast itself."""
        wire = self._wires.get(index)
        if wire is None or wire.shape != buffer.shape:
            self._wires[index] = wire = torch.empty_like(buffer, dtype=self.dtype)
        return wire
