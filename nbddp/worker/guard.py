"""What stands between the gradients and the update: unscaling, clipping, and steps that are not taken because something in them is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nbddp.worker.scaler import SMALLEST_SCALE

if TYPE_CHECKING:
    from torch import nn

    from nbddp.config import TrainConfig
    from nbddp.evaluation.ranks import Ranks
    from nbddp.worker.scaler import LossScaler


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the optimizer steps; if not, whether the loss scale was merely too large; and whether the run ends here."""

    applied: bool = True
    overflow: bool = False
    stop: bool = False


CLIP_EPS = 1e-6
"""What torch's own clipping adds to the norm that it divides by."""
TAKEN = Verdict()
TOO_LARGE = Verdict(applied=False, overflow=True)


class Guard:
    """Decides alike on every rank: after DDP's reduction the gradients are the same everywhere.

    Without a loss scaler, `on_nan` says whether anything is looked at: for `warn` nothing is, and nothing waits for a GPU; for `skip` and `stop` the norm
    of the gradients is. A loss scaler looks at them in every step and leaves out those that are not finite, whatever `on_nan` says. Where the loss is
    finite on all ranks, the scale was too large: it falls, and that is all. Where it is not, or where the scale has fallen below 1 already, `on_nan` holds:
    the step counts as one that is not finite, and the scale stays, since it is not to blame.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, trainable: list[nn.Parameter], ranks: Ranks | None = None, scaler: LossScaler | None = None
    ) -> None:
        self.refuses = config.on_nan in ("skip", "stop")
        self._refused = Verdict(applied=False, stop=config.on_nan == "stop")
        self._clip_norm = config.clip_norm
        self._trainable, self._ranks, self._scaler = trainable, ranks, scaler
        keeps = self.refuses or scaler is not None
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()] if keeps else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin(self) -> None:
        """Remember the buffers as they are before the step: running statistics take in a batch that the step then refuses."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)

    def judge(self, loss_sum: torch.Tensor | float = 0.0) -> Verdict:
        """Unscale and clip the gradients, and say what becomes of the step.

        Args:
            loss_sum: this rank's sum of loss x weight, asked for only where the loss scaler finds gradients that are not finite.
        """
        if self._scaler is None:
            return TAKEN if self._finite() else self._refuse()
        if not self._scaler.unscale():
            if self._scaler.scale >= SMALLEST_SCALE and self._finite_everywhere(loss_sum):
                self._scaler.update()
                return TOO_LARGE
            self._scaler.update(keep=True)
            return self._refuse()
        self._scaler.update()
        return TAKEN if self._finite() else self._refuse()

    def _finite(self) -> bool:
        """Clip; return False where the norm is not finite and the options say not to step then."""
        if self._clip_norm is None and not self.refuses:
            return True
        dense, sparse = self._gradients()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in dense if parameter.grad is not None] + sparse)
        if self.refuses and not math.isfinite(float(norm)):
            return False
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(dense, self._clip_norm, norm)
            for values in sparse:
                values.mul_((self._clip_norm / (norm + CLIP_EPS)).clamp(max=1.0))
        return True

    def _gradients(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Parameters with dense gradients, and the values of sparse ones, each entry once."""
        dense, sparse = [], []
        for parameter in self._trainable:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                sparse.append(parameter.grad._values())
            else:
                dense.append(parameter)
        return dense, sparse

    def _refuse(self) -> Verdict:
        with torch.no_grad():
            for before, buffer in zip(self._before, self._buffers, strict=True):
                buffer.copy_(before)
        return self._refused

    def _finite_everywhere(self, loss_sum: torch.Tensor | float) -> bool:
        """Whether the loss of every rank is finite: asked of the others only after a step that none of them takes."""
        own = float(not math.isfinite(float(loss_sum)))
        return not (own if self._ranks is None else self._ranks.sum([own])[0])
