"""The process groups of a rank: one for gradients, and one of its own for telemetry, so that the two never wait for each other."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbddp.evaluation.ranks import Ranks

if TYPE_CHECKING:
    from nbddp.plans import Plan


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
