"""Whether the replicas of a model are the same bits on all ranks. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nbddp.worker.digest import Digester
from nbddp.worker.errors import ReplicasDiffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is compared: every parameter with elements, trained or not. Buffers are rank 0's everywhere."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.numel()}


def digests(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their digests, int64 on the device that they are on; on a GPU the host does not wait for them."""
    digest = Digester(device)
    made = [digest(tensor) for tensor in tensors]
    return torch.stack(made) if made else torch.zeros(0, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The digests of all ranks, of which rank 0's own are only made when they are compared: by a thread that nobody waits for."""

    names: tuple[str, ...]
    own: Callable[[], list[int]]
    others: list[list[int]]

    def check(self) -> None:
        """Compare.

        Raises:
            ReplicasDiffer: names the first parameters of the first rank that are not the same bits as rank 0's.
        """
        if not self.others:
            return
        own = self.own()
        for rank, other in enumerate(self.others, 1):
            if differing := [name for name, mine, theirs in zip(self.names, own, other, strict=True) if mine != theirs]:
                raise ReplicasDiffer(rank, ", ".join(differing[:4]), len(differing))
