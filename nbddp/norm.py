"""Normalization layers that depend on the batch, and what DDP makes of them. Runs in the kernel and in the ranks."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers of a model, in order."""
    return [name or type(module).__name__ for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def keep_warning(model: nn.Module, *, world_size: int, per_rank: int) -> str | None:
    """What `norm=keep` means for this model on several ranks; None where it means nothing."""
    names = batch_norms(model)
    if world_size < 2 or not names:
        return None
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    small = ", which is small" if per_rank < 16 else ""
    return f"BatchNorm ({listed}) uses the statistics of each rank's {per_rank} samples{small}; rank 0's running statistics are kept"
