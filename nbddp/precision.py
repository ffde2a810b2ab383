"""Autocast and loss scaling of a stage. Runs in the ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def autocast_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context that forward passes run in; fp32 keeps the dtypes of parameters and batches.

    Raises:
        ValueError: for a precision that is not available yet.
    """
    if precision != "fp32":
        message = f"precision={precision} on {device.type} is not available yet: fp32"
        raise ValueError(message)
    return contextlib.nullcontext()
