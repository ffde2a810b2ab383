"""What a rank works with: the run's files, options and plan, this rank's place, and what travelled from the notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbddp.config import TrainConfig
from nbddp.events import EventWriter
from nbddp.plans import Plan, StagePlan
from nbddp.rundir import RunDir
from nbddp.stage import Stage
from nbddp.worker.errors import StepError
from nbddp.worker.group import Ranks
from nbddp.worker.position import Position
from nbddp.worker.step import Step, step_from_loss


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


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage as a rank takes it: the options that hold in it, its plan, and the hooks that make its optimizer and scheduler."""

    index: int
    name: str
    config: TrainConfig
    plan: StagePlan
    spec: Stage | None
    optimizer: Callable[[nn.Module], Any] | None
    scheduler: Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's view of the run."""

    run_dir: RunDir
    spec: dict[str, Any]
    config: TrainConfig
    plan: Plan
    ranks: Ranks
    events: EventWriter
    position: Position
    hooks: Hooks
    model: nn.Module
    train_data: Any
    val_data: Any | None

    @property
    def matmul_precision(self) -> str:
        """That of the run: as asked for, else the kernel's own."""
        return str(self.spec.get("matmul_precision", "highest"))

    @property
    def stages(self) -> list[RankStage]:
        """The stages of the run, in order; one where the user gave none."""
        specs: tuple[Stage | None, ...] = self.hooks.stages or (None,)
        return [self._stage(spec, plan) for spec, plan in zip(specs, self.plan.stages, strict=True)]

    def _stage(self, spec: Stage | None, plan: StagePlan) -> RankStage:
        optimizer, scheduler = self.hooks.optimizer, self.hooks.scheduler
        if spec is not None:
            optimizer = spec.optimizer or (None if "optimizer" in spec.options else optimizer)
            scheduler = spec.scheduler or (None if "schedule" in spec.options else scheduler)
        return RankStage(plan.index, plan.name, self.config if spec is None else spec.config(self.config), plan, spec, optimizer, scheduler)

    def message(self, text: str, *, level: str = "info") -> None:
        """Tell the user something, from rank 0."""
        if self.ranks.rank == 0:
            self.events.emit("message", level=level, text=text)
