"""Autocast: in which dtype the forward passes of a stage compute. Runs in the ranks and, for evaluation, in the kernel."""

from __future__ import annotations

import contextlib

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What float32 is cast to; parameters, gradients and the optimizer's state stay as they are."""


def autocast_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context that forward passes run in: autocast to bfloat16 or float16, on CPUs and GPUs alike, and for fp32 none.

    fp32 keeps the dtypes of parameters and batches. Autocast leaves float64 and complex tensors alone.

    Raises:
        ValueError: for a precision that is not one of fp32, bf16, fp16.
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    if precision not in DTYPES:
        message = f"precision={precision} is not one of fp32, {', '.join(DTYPES)}"
        raise ValueError(message)
    return torch.autocast(device.type, dtype=DTYPES[precision])
