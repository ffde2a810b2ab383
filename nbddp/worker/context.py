"""What a rank works with: the run's files, options and plan, this rank's place, and what travelled from the notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from nbddp.config import TrainConfig
from nbddp.evaluation.hooks import Hooks
from nbddp.evaluation.ranks import Ranks
from nbddp.events import EventWriter
from nbddp.plans import Plan, StagePlan
from nbddp.rundir import RunDir
from nbddp.stage import Stage
from nbddp.worker.position import Position


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
