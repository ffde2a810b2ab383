"""Plan: what will happen in a run and its stages, in numbers, and in the words of the plan line.

Made by `nbddp.planning` in the kernel, read by the ranks from spec.json. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What will happen in a stage, in numbers; a run without stages has one. Batches are in samples; `None` steps or epochs are unlimited.

    `lr` is the one in effect, after `lr_scale`; None where a hook makes the optimizer. `precision` is resolved. `besides` says in words which other
    options of the optimisation are not the default, `trains` what is frozen.
    """

    index: int
    name: str
    batch_size: int
    per_rank_batch_size: int
    micro_batch_size: int
    accumulate: int
    default_batch_size: bool
    steps_per_epoch: int
    dropped: int
    epochs: int | None
    max_steps: int | None
    lr: float | None
    scaled_lr: str
    precision: str
    default_precision: bool
    compile: bool
    monitor: str
    patience: int | None = None
    besides: str = ""
    trains: str = ""

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that the stage ends at; None where only time, or the limit of the run, ends it."""
        by_epochs = None if self.epochs is None else self.epochs * self.steps_per_epoch
        known = [steps for steps in (by_epochs, self.max_steps) if steps is not None]
        return min(known) if known else None

    def parts(self, nproc: int) -> list[str]:
        """Batch, steps, learning rate, precision and what is frozen, in the words of the plan line."""
        batch = f"{self.batch_size} = {nproc} x {self.per_rank_batch_size}"
        if self.accumulate > 1:
            batch += f" (in {self.accumulate} micro-batches of {self.micro_batch_size})"
        if self.default_batch_size:
            batch += " (default)"
        steps = f"{self.steps_per_epoch} step{'s' if self.steps_per_epoch > 1 else ''}/epoch"
        if self.dropped:
            steps += f", {self.dropped} sample{'s' if self.dropped > 1 else ''} dropped"
        rate = "optimizer hook" if self.lr is None else f"lr {self.lr:g}{self.scaled_lr}"
        precision = f"{self.precision} (auto)" if self.default_precision else self.precision
        return [batch, steps, rate, precision, *(part for part in ("compiled" if self.compile else "", self.besides, self.trains) if part)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will happen, in numbers. Batches are in samples; `None` steps or epochs are unlimited."""

    nproc: int
    device: Literal["cpu", "cuda"]
    device_indices: tuple[int, ...]
    device_name: str
    backend: Literal["gloo", "nccl"]
    threads: int
    n_train: int
    n_val: int
    val_batch_size: int
    max_steps: int | None
    workers_per_rank: int
    stages: tuple[StagePlan, ...]
    warnings: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that the run ends at; None where only time limits it."""
        of_stages = [stage.total_steps for stage in self.stages]
        known = [] if None in of_stages else [sum(steps for steps in of_stages if steps is not None)]
        if self.max_steps is not None:
            known.append(self.max_steps)
        return min(known) if known else None

    @property
    def epochs(self) -> int | None:
        """Epochs of all stages together; None where their number is not known."""
        of_stages = [stage.epochs for stage in self.stages]
        return None if None in of_stages else sum(epochs for epochs in of_stages if epochs is not None)

    def line(self, *extra: str) -> str:
        """One line that heads a run; `extra` parts, such as the data's size, come last."""
        unit = self.device_name if self.device == "cuda" else f"{self.device_name} rank{'s' if self.nproc > 1 else ''}"
        if len(self.stages) == 1:
            parts = self.stages[0].parts(self.nproc)
        else:
            total = self.total_steps
            parts = [f"{len(self.stages)} stages", *([] if total is None else [f"{total} steps"])]
        return " · ".join([f"{self.nproc} x {unit}", *parts, *(part for part in extra if part)])

    def stage_lines(self) -> list[str]:
        """A line for each stage, where there are several."""
        if len(self.stages) == 1:
            return []
        return [f"stage {stage.name}: " + " · ".join([*_length(stage), *stage.parts(self.nproc)]) for stage in self.stages]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        values = {field.name: record[field.name] for field in fields(cls)}
        for name in ("device_indices", "warnings"):
            values[name] = tuple(values[name])
        known = [field.name for field in fields(StagePlan)]
        values["stages"] = tuple(StagePlan(**{name: stage[name] for name in known if name in stage}) for stage in values["stages"])
        return cls(**values)


def _length(stage: StagePlan) -> list[str]:
    if stage.max_steps is not None and stage.total_steps == stage.max_steps:
        return [f"{stage.max_steps} steps"]
    return [] if stage.epochs is None else [f"{stage.epochs} epoch{'s' if stage.epochs > 1 else ''}"]
