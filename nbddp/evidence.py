"""Evidence: what advice about a run rests on, read off its state and its options: where recent steps' time went, and what the run is.

A pure function of both. Used in the kernel by `nbddp.advice`; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.stage import STAGE_FIELDS
from nbddp.window import OWN, Block

if TYPE_CHECKING:
    from nbddp.state import RunState


@dataclass(frozen=True)
class Evidence:
    """What the rules look at. What a run of an earlier version did not write down reads as nothing known."""

    state: RunState
    of_run: TrainConfig

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The options of the stage, or of the run where it has no stages."""
        options = self.facts.get("options")
        if options is None:
            return self.of_run
        try:
            return TrainConfig(**options)
        except ConfigError:  # written by another version
            return self.of_run

    @functools.cached_property
    def recent(self) -> Block:
        """The steps that figures are of."""
        return self.state.window.recent

    @functools.cached_property
    def stage(self) -> dict[str, Any]:
        """The plan of the stage that the steps are of; empty where there is none."""
        stages = self.state.plan.get("stages") or []
        index = self.state.window.stage
        return stages[index] if index is not None and index < len(stages) else {}

    @property
    def facts(self) -> dict[str, Any]:
        """What the rank found out when the stage began."""
        return self.state.stage_facts

    @property
    def nproc(self) -> int:
        return int(self.state.plan.get("nproc", 1))

    @property
    def on_gpu(self) -> bool:
        return self.state.plan.get("device") == "cuda"

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step over all ranks; 0 where that is not known."""
        return int(self.stage.get("batch_size", 0))

    @property
    def per_rank(self) -> int:
        return self.batch_size // self.nproc

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return int(self.stage.get("accumulate", 1))

    @property
    def meet_early(self) -> bool:
        """Whether the ranks wait for each other in the forward pass already, for the statistics of synchronised BatchNorm, and not just for gradients."""
        return self.nproc > 1 and bool(self.facts.get("synced_norm"))

    @property
    def cores(self) -> int | None:
        return self.facts.get("cores")

    @property
    def workers(self) -> int:
        """Loader workers of each rank."""
        return self.config.num_workers // self.nproc

    def most_workers(self) -> int:
        """How many workers each rank can have where every rank and every worker has a core; one each where the workers alone have."""
        if self.cores is None:
            return self.workers
        return max((self.cores - self.nproc) // self.nproc, int(self.cores >= self.nproc))

    @functools.cached_property
    def late(self) -> int | None:
        """The rank that recent steps waited for most often, or where it can't be told for how long, the one whose data took longest; None on one rank."""
        if len(self.recent.ranks_s) < 2:
            return None
        if self.meet_early:
            return max(self.recent.ranks_s, key=lambda rank: (self.recent.rank_s(rank, "data"), -rank))
        return max(self.recent.slowest, key=lambda rank: (self.recent.slowest[rank], -rank))

    def others_s(self, block: Block, *phases: str) -> float:
        """Mean time per step in some phases of the median of the ranks besides `late`; of two in the middle the slower one's."""
        return statistics.median_high([block.rank_s(rank, *phases) for rank in block.ranks_s if rank != self.late] or [0.0])

    def excess_s(self, block: Block, *phases: str) -> float:
        """How much longer than the others the rank `late` takes in some phases, per step."""
        return 0.0 if self.late is None else block.rank_s(self.late, *phases) - self.others_s(block, *phases)

    @property
    def late_in(self) -> str:
        """The phase in which it loses most."""
        return "data" if self.meet_early else max(OWN, key=lambda phase: self.excess_s(self.recent, phase))

    @property
    def stage_steps(self) -> int | None:
        """Steps of the stage from its first to its last, as planned, or as taken where the run is over; None where time alone ends it."""
        first = self.state.stages[-1].step if self.state.stages else 0
        if self.state.done:
            return self.state.step - first
        epochs, limit, total = self.stage.get("epochs"), self.stage.get("max_steps"), self.state.total_steps
        limits = [] if epochs is None else [epochs * self.stage["steps_per_epoch"]]
        limits += ([] if limit is None else [limit]) + ([] if total is None else [total - first])
        return min(limits, default=None)

    @property
    def stage_s(self) -> float | None:
        """Seconds that the steps of the stage take altogether; None where that is not known."""
        steps, limit = self.stage_steps, self.config.max_time
        by_steps = [] if steps is None else [steps * self.state.window.total.step_s]
        return min([*by_steps, *([] if limit is None or self.state.done else [limit])], default=None)

    def written(self, **options: object) -> str:
        """Options as they are written: flags, or where the run has several stages, and a stage can have them, those of the stage."""
        if len(self.state.plan.get("stages") or []) > 1 and all(name in STAGE_FIELDS for name in options):
            return f"Stage({', '.join([repr(self.stage['name']), *(f'{name}={value!r}' for name, value in options.items())])})"
        return " ".join(f"--{name.replace('_', '-')}{_value(value)}" for name, value in options.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "" if value else " false"
    return f" {value:g}" if isinstance(value, float) else f" {value}"
