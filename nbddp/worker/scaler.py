"""Loss scaling of fp16: gradients too small for float16 are lifted by a factor that is found while training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError

if TYPE_CHECKING:
    from torch.optim import Optimizer

SMALLEST_SCALE = 1.0
"""Below it the loss is not lifted any more: gradients that are not finite there are so by themselves."""


class LossScaler:
    """torch's GradScaler over all parameters that train, those included that the optimizer does not hold, since clipping looks at them too.

    After DDP's reduction the gradients are the same on every rank, and so is what follows from them. Looking at them makes the host wait for a GPU, as
    GradScaler itself does.

    Raises:
        StepError: at construction, for parameters in float16, whose gradients can't be scaled back.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> None:
        parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if half := [name for name, parameter in parameters if parameter.dtype in (torch.float16, torch.complex32)]:
            shown = ", ".join(half[:4]) + (f" and {len(half) - 4} more" if len(half) > 4 else "")
            message = (
                f"precision=fp16 keeps the parameters in float32 and casts in the forward pass, and {shown} are float16 already: "
                "model.float() before training, or --precision fp32, which keeps the dtypes as they are"
            )
            raise StepError(message)
        self._scaler = torch.amp.GradScaler(device.type)
        self._trained = _Trained([parameter for _, parameter in parameters])

    @property
    def scale(self) -> float:
        """The factor in effect; on a GPU, asking for it waits."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor, to go backward from."""
        scaled: torch.Tensor = self._scaler.scale(loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss)
        return scaled

    def unscale(self) -> bool:
        """Divide the gradients by the factor, once in a step; return whether all of them are finite."""
        self._trained.collect()
        self._scaler.unscale_(self._trained.as_optimizer())
        found = self._scaler._found_inf_per_device(self._trained.as_optimizer())  # what GradScaler.step asks for; there is no public name
        return not any(float(value) for value in found.values())

    def update(self, *, keep: bool = False) -> None:
        """End the step: the factor falls where gradients were not finite and grows after many that were; or, with `keep`, it stays."""
        if keep or not self._trained.any:
            self._scaler.update(self.scale)
        else:
            self._scaler.update()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers."""
        return dict(self._scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Go on with the factor of a checkpoint."""
        self._scaler.load_state_dict(state)


class _Trained:
    """What GradScaler reads of an optimizer: gradients. Those of complex parameters are shown to it as pairs of real numbers."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._complex = [(p, torch.empty_like(torch.view_as_real(p.detach()))) for p in parameters if p.is_complex()]
        self._real = [p for p in parameters if not p.is_complex()]
        self.param_groups: list[dict[str, Any]] = [{"params": [*self._real, *(pairs for _, pairs in self._complex)]}]

    def collect(self) -> None:
        for parameter, pairs in self._complex:
            pairs.grad = None if parameter.grad is None else torch.view_as_real(parameter.grad)

    @property
    def any(self) -> bool:
        return any(held.grad is not None for held in self.param_groups[0]["params"])

    def as_optimizer(self) -> Optimizer:
        return self  # type: ignore[return-value]  # of an optimizer, GradScaler.unscale_ reads the groups alone
