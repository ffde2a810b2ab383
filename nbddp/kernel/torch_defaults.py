"""Torch's process-wide defaults, set for a while to what they were in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def torch_defaults(device: torch.device, *, dtype: str, matmul_precision: str) -> Iterator[None]:
    """Within it, torch computes as in the ranks of a run, whatever this kernel has set; afterwards everything is as it was.

    Args:
        device: where it is computed; a GPU becomes the current one.
        dtype: the default floating-point dtype, such as "float32".
        matmul_precision: torch's setting for matrix products of float32.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_default_dtype(getattr(torch, dtype)))
        stack.enter_context(_matmul_precision(matmul_precision))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # ranks have none; a mode costs something in every operation
            stack.enter_context(torch.device("cpu"))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    # Newer versions of torch keep a switch per backend behind the setting, which it overwrites where they were not set.
    both = (getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn))
    switches: list[Any] = [switch for switch in both if hasattr(switch, "fp32_precision")]
    positions = [switch.fp32_precision for switch in switches]
    before: str | None = None  # where the switches were set, torch does not answer for the older setting
    with contextlib.suppress(RuntimeError):
        before = torch.get_float32_matmul_precision()
    if before == precision:
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for switch, position in zip(switches, positions, strict=True):
            switch.fp32_precision = position
