"""What the user defined in the cell's body, as the loop and evaluations call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.step import Step, step_from_loss
from nbddp.stage import Stage


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's functions, under the names of the cell's body."""

    training_step: Step
    validation_step: Step
    loss: Any
    training_name: str
    validation_name: str
    optimizer: Callable[[nn.Module], Any] | None
    scheduler: Callable[[Any], Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    val_collate_fn: Callable[[list[Any]], Any] | None
    worker_init_fn: Callable[[int], None] | None
    metrics: dict[str, Any]
    sampler: Any
    stages: tuple[Stage, ...]
    on_epoch_end: Callable[[Any], Any] | None

    @classmethod
    def of(cls, hooks: dict[str, Any]) -> Hooks:
        training, validation = hooks.get("training_step"), hooks.get("validation_step")
        from_loss = step_from_loss(hooks["loss"]) if hooks.get("loss") is not None else None
        step = training or from_loss
        assert step is not None
        return cls(
            training_step=step,
            loss=hooks.get("loss"),
            validation_step=validation or step,
            training_name="training_step" if training else "loss",
            validation_name="validation_step" if validation else "training_step" if training else "loss",
            optimizer=hooks.get("optimizer"),
            scheduler=hooks.get("scheduler"),
            collate_fn=hooks.get("collate_fn"),
            val_collate_fn=hooks.get("val_collate_fn", hooks.get("collate_fn")),
            worker_init_fn=hooks.get("worker_init_fn"),
            metrics=hooks.get("metrics") or {},
            sampler=hooks.get("sampler"),
            stages=tuple(hooks.get("stages") or ()),
            on_epoch_end=hooks.get("on_epoch_end"),
        )

    def prepare_loss(self, model: nn.Module, device: torch.device) -> None:
        """Move a loss that is a module (it may hold class weights) to the device.

        Raises:
            StepError: where it has parameters of its own, which would not be trained.
        """
        if not isinstance(self.loss, nn.Module):
            return
        known = {id(parameter) for parameter in model.parameters()}
        if own := [name for name, p in self.loss.named_parameters() if p.requires_grad and id(p) not in known]:
            message = f"loss ({type(self.loss).__name__}) has parameters of its own, {', '.join(own[:4])}: make it a part of the model, which is trained"
            raise StepError(message)
        self.loss.to(device)
