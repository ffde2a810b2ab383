"""The step as the user wrote it, and what it returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.state import PHASES

Step = Callable[[nn.Module, Any], Any]
RESERVED = ("loss", "weight", "output", "target")
RECORDED = ("step", "epoch", "stage", "lr", "samples", "wait_s", "slowest_rank", *(f"{phase}_s" for phase in PHASES))
"""Columns of the history that are there for every run: a step's own scalars have other names."""


@dataclass(slots=True)
class StepResult:
    """What a step returned: a scalar loss, the number of samples it is the mean over (None: those drawn), tensors for metrics, further scalars."""

    loss: torch.Tensor
    weight: torch.Tensor | float | None = None
    output: Any = None
    target: Any = None
    scalars: dict[str, torch.Tensor | float] = field(default_factory=dict)


def step_from_loss(loss: Callable[[Any, Any], Any]) -> Step:
    """The step of `loss(output, target)` for batches `(*inputs, target)`."""

    def training_step(model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            what = f"a {type(batch).__name__}" + (f" of length {len(batch)}" if isinstance(batch, list | tuple) else "")
            message = f"loss(output, target) needs batches (*inputs, target), and this data gives {what}: write training_step(model, batch)"
            raise StepError(message)
        *inputs, target = batch
        output = model(*inputs)
        return {"loss": loss(output, target), "output": output, "target": target}

    return training_step


def read_result(returned: Any, hook: str, *, training: bool) -> StepResult:
    """Check what a step returned.

    Raises:
        StepError: names the hook, what it returned and the rule.
    """
    if isinstance(returned, torch.Tensor):
        result = StepResult(returned)
    elif isinstance(returned, Mapping):
        if "loss" not in returned:
            message = f"{hook} returned a dict without 'loss': {', '.join(map(str, returned)) or 'it is empty'}"
            raise StepError(message)
        scalars = {str(name): _scalar(hook, str(name), value) for name, value in returned.items() if name not in RESERVED}
        weight = returned.get("weight")
        weight = None if weight is None else _weight(hook, weight)
        result = StepResult(returned["loss"], weight, returned.get("output"), returned.get("target"), scalars)
    else:
        message = f"{hook} returned {type(returned).__name__}: it returns the scalar loss, or a dict with 'loss'"
        raise StepError(message)
    _check_loss(result.loss, hook, training=training)
    return result


def _check_loss(loss: Any, hook: str, *, training: bool) -> None:
    if not isinstance(loss, torch.Tensor):
        message = f"{hook} returned a loss of type {type(loss).__name__}: it must be a scalar tensor"
        raise StepError(message)
    if loss.numel() != 1:
        message = f"{hook} returned a loss of shape {tuple(loss.shape)}: it must be a scalar, the mean over the samples; .mean() makes one"
        raise StepError(message)
    if not loss.is_floating_point():
        message = f"{hook} returned a loss of dtype {loss.dtype}: it must be a real floating-point scalar"
        raise StepError(message)
    if training and not loss.requires_grad:
        message = f"{hook} returned a loss without a gradient: compute it from the model's output, without detach() or no_grad()"
        raise StepError(message)


def _scalar(hook: str, name: str, value: Any) -> torch.Tensor | float:
    if name in RECORDED:
        message = f"{hook} returned a scalar {name}, which is recorded of every step already: give it another name"
        raise StepError(message)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    if isinstance(value, numbers.Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    message = f"{hook} returned {name}: {what}; beside loss, weight, output and target a step returns real scalars to record"
    raise StepError(message)


class Signature:
    """What the first step returned besides the loss: later steps, and the other ranks, return the same names."""

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self.names: tuple[str, ...] | None = None
        self.weighted = False

    def check(self, result: StepResult) -> bool:
        """Compare with the first step's, whose order of names it gives the result; return whether this was the first.

        Raises:
            StepError: names the scalars that came or went.
        """
        names, weighted = tuple(result.scalars), result.weight is not None
        if self.names is None:
            self.names, self.weighted = names, weighted
            return True
        if weighted != self.weighted or (names != self.names and set(names) != set(self.names)):
            was, now = _words(self.names, weighted=self.weighted), _words(names, weighted=weighted)
            message = f"{self._hook} returned {now}, and before that {was}: it returns the same names in every step"
            raise StepError(message)
        if names != self.names:
            self.order(result)
        return False

    def order(self, result: StepResult) -> None:
        """Bring the scalars of a result into the order that all ranks send them in."""
        result.scalars = {name: result.scalars[name] for name in self.names or ()}

    def agree(self, everyone: list[tuple[tuple[str, ...], bool]]) -> None:
        """Compare with what the other ranks' first steps returned (`describe` of each), and take over the order of rank 0.

        Raises:
            StepError: names a rank that differs.
        """
        words = [_words(names, weighted=weighted) for names, weighted in everyone]
        for rank, other in enumerate(words):
            if other != words[0]:
                message = f"{self._hook} returned {words[0]} on rank 0 and {other} on rank {rank}: it returns the same names on every rank"
                raise StepError(message)
        self.names = everyone[0][0]

    def describe(self) -> tuple[tuple[str, ...], bool]:
        """What `agree` compares."""
        return self.names or (), self.weighted


def _weight(hook: str, value: Any) -> torch.Tensor | float:
    """A finite number that is not negative; one on a GPU is taken as it is, since looking at it would make the host wait."""
    weight = _scalar(hook, "weight", value)
    if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":
        return weight
    if not (math.isfinite(number := float(weight)) and number >= 0):
        message = f"{hook} returned weight {number:g}: it is the number of samples that the loss is the mean over, finite and at least 0"
        raise StepError(message)
    return weight


def _words(names: tuple[str, ...], *, weighted: bool) -> str:
    shown = sorted(names) + (["weight"] if weighted else [])
    return f"the scalars {', '.join(shown)}" if shown else "the loss alone"
