"""What stands between the gradients and the update: clipping, and steps that are not taken because something in them is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from nbddp.config import TrainConfig


class Guard:
    """Decides alike on every rank: after DDP's reduction the gradients are the same everywhere.

    Where `on_nan` says so it reads the gradients' norm in every step, which makes the host wait for a GPU; otherwise nothing waits.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, trainable: list[nn.Parameter]) -> None:
        self.refuses = config.on_nan in ("skip", "stop")
        self._clip_norm = config.clip_norm
        self._trainable = trainable
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()] if self.refuses else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin(self) -> None:
        """Remember the buffers as they are before the step: running statistics take in a batch that the step then refuses."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)

    def accept(self) -> bool:
        """Clip the gradients; return False where they are not finite and the options say not to step then."""
        if self._clip_norm is None and not self.refuses:
            return True
        gradients = [parameter.grad for parameter in self._trainable if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.refuses and not math.isfinite(float(norm)):
            with torch.no_grad():
                for before, buffer in zip(self._before, self._buffers, strict=True):
                    buffer.copy_(before)
            return False
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trainable, self._clip_norm, norm)
        return True
