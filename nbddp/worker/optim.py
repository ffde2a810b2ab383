"""The optimizer of a stage."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds: here it is part of the warm-up
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.rules import FUSED_OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from nbddp.config import TrainConfig

_CLASSES: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "lbfgs": torch.optim.LBFGS,
}


def make_optimizer(model: nn.Module, config: TrainConfig, *, lr: float | None, hook: Callable[[nn.Module], Any] | None) -> Optimizer:
    """The hook's optimizer, or the one that the options name, over the parameters that require a gradient.

    `lr` is the rate in effect, after scaling; None is torch's own default.

    Raises:
        StepError: where the hook returns something else, or the options ask for what this optimizer does not have.
    """
    made = _by_option(model, config, lr) if hook is None else _checked(hook(model), model)
    if config.grad_compression == "powersgd" and needs_closure(made):
        message = (
            f"grad_compression=powersgd gives another gradient at each look at the same weights, and {type(made).__name__} compares them: "
            "use bf16 or fp16, or leave grad_compression out"
        )
        raise StepError(message)
    return made


def _by_option(model: nn.Module, config: TrainConfig, lr: float | None) -> Optimizer:
    cls = _CLASSES[config.optimizer]
    known = inspect.signature(cls).parameters
    asked = {"lr": lr, "weight_decay": config.weight_decay, "momentum": config.momentum, "fused": config.fused or None}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if config.fused:
        _check_fused(config.optimizer, model)
    for name, value in options.items():
        if name not in known:
            message = f"{name}={value}: {config.optimizer} has no {name}"
            raise StepError(message)
    return cls([p for p in model.parameters() if p.requires_grad], **options)


def _checked(made: Any, model: nn.Module) -> Optimizer:
    if not isinstance(made, torch.optim.Optimizer):
        message = f"optimizer(model) returned {type(made).__name__}: it must be a torch.optim.Optimizer"
        raise StepError(message)
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in model.parameters()}
    if foreign := [parameter for parameter in held if id(parameter) not in known]:
        message = (
            f"optimizer(model) holds {len(foreign)} parameters that are not the model's (the first of shape {tuple(foreign[0].shape)}): "
            "only those of the model it was given are kept equal between the ranks"
        )
        raise StepError(message)
    if not any(parameter.requires_grad for parameter in held):
        message = f"optimizer(model) returned {type(made).__name__} over parameters of which none requires a gradient: nothing would train"
        raise StepError(message)
    return made


def _check_fused(optimizer: str, model: nn.Module) -> None:
    """Fused kernels take parameters of real floating-point types with dense gradients; torch itself says so only in the first step."""
    have = f"fused=True: {', '.join(FUSED_OPTIMIZERS)} have fused kernels"
    if optimizer not in FUSED_OPTIMIZERS:
        message = f"{have}, {optimizer} has none"
        raise StepError(message)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)
    sparse = {id(module.weight) for module in embeddings}
    for name, parameter in trainable.items():
        if not parameter.is_floating_point() or id(parameter) in sparse:
            what = "has sparse gradients" if id(parameter) in sparse else f"is {str(parameter.dtype).removeprefix('torch.')}"
            message = f"{have} for dense gradients of real numbers, and {name} {what}: leave fused out"
            raise StepError(message)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` can't be called without a closure, as for LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
