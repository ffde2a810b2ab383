"""The model and the training step as one module, so that DDP synchronises whatever the step calls: methods other than forward, several calls, sub-modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.step import Step, StepResult, read_result


class StepModule(nn.Module):
    """The user's model and training step as one module.

    Its output is the loss alone, so that DDP looks for unused parameters from there and not from outputs that no gradient will come from; the rest of
    what the step returned waits in `results`. `call` is what runs: the step, or what a compiler made of it.

    Raises:
        StepError: at construction, where nothing is trainable.
    """

    def __init__(self, model: nn.Module, step: Step, hook: str) -> None:
        super().__init__()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            message = "the model has no parameter that requires a gradient: there is nothing to train"
            raise StepError(message)
        self.model = model
        self.step = self.call = step
        self._hook = hook
        self.results: list[StepResult] = []

    def forward(self, batch: Any) -> torch.Tensor:
        result = read_result(self.call(self.model, batch), self._hook, training=True)
        result.output = result.target = None  # as large as the batch, and needed by metrics in validation only
        self.results.append(result)
        return result.loss
