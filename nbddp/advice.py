"""Advice: what would make a run quicker, or better, by where the time of its steps goes.

A table of rules over the state of a run: pure, so that a run that is watched and one that is looked at later get the same. What each has to say is in
`nbddp.remedies`. Used in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp import remedies
from nbddp.evidence import Evidence
from nbddp.remarks import ENOUGH_PER_RANK, SMALL_NORM_BATCH
from nbddp.remedies import NATIVE_BF16, TENSOR_CORES
from nbddp.window import OWN, Block

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.state import RunState

CONFIRMED = 2
"""Blocks in a row that have to agree before advice comes or goes: nothing is said before 10 steps and 2 s of them, nor for a single hiccup."""
ENOUGH_STEPS = 5
"""Steps after which a rule over the whole stage says something."""

HANDOVER_S = 1e-3
"""What a micro-batch from a loader worker costs anyway: less time for data than this is not worth one."""
OFTEN = 0.6
"""Share of the steps in which a straggler is the slowest."""
MANY_RECOMPILES, TOO_MANY_RECOMPILES = 3, 8
"""Twice is how torch finds out that a shape varies; after 8 versions of the same code it runs it uncompiled."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to change.

    Attributes:
        rule: which rule says so.
        text: what is seen, with figures, and why that is slow.
        option: what to write; None where no option helps.
    """

    rule: str
    text: str
    option: str | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds from when `measure` reaches `on` in `CONFIRMED` blocks in a row until it stays below `off` as long; what lies between changes nothing.

    Attributes:
        applies: whether there is anything to measure in this run.
        measure: of a block, or where the rule is `of_stage`, of the whole stage so far.
        tell: text and option.
        unless: rules that say the same, or the opposite, with better reason.
    """

    name: str
    applies: Callable[[Evidence], bool]
    measure: Callable[[Evidence, Block], float]
    on: float
    off: float
    tell: Callable[[Evidence], tuple[str, str | None]]
    unless: tuple[str, ...] = ()
    of_stage: bool = False

    def holds(self, evidence: Evidence) -> bool:
        """Whether the rule holds after the blocks that are remembered."""
        if not self.applies(evidence):
            return False
        window = evidence.state.window
        if self.of_stage:
            return window.total.steps >= ENOUGH_STEPS and self.measure(evidence, window.total) >= self.on
        holding, against = False, 0
        for block in window.blocks:
            value = self.measure(evidence, block)
            differs = value < self.off if holding else value >= self.on
            against = against + 1 if differs else 0
            if against == CONFIRMED:
                holding, against = not holding, 0
        return holding


def _data(evidence: Evidence, block: Block) -> float:
    return block.share("data") if block.phase_s("data") >= HANDOVER_S * evidence.accumulate else 0.0


def _straggling(evidence: Evidence, block: Block) -> float:
    """Share of the step that the others lose to the rank that is late; 0 where it is now one and now another.

    Where the ranks meet in the forward pass, those of all of them take as long as the slowest's, and `wait_s` says nothing. What a rank is late by with its
    data shows all the same, since that comes before; which of them is late in the passes themselves is not to be seen from their times, and nothing is said.
    """
    if evidence.meet_early:
        late_with_data = max(block.ranks_s, key=lambda rank: block.rank_s(rank, "data"), default=None)
        return evidence.excess_s(block, "data") / block.step_s if late_with_data == evidence.late else 0.0
    if block.slowest.get(-1 if evidence.late is None else evidence.late, 0) < OFTEN * block.steps:
        return 0.0
    return min(evidence.excess_s(block, *OWN), block.wait_s / block.steps) / block.step_s


def _fixed(evidence: Evidence, block: Block) -> float:
    """How much of the step does not shrink with the share of a rank: the exchange and the update; all of it, where the GPU waits to be asked."""
    return max(block.share("sync", "optimizer"), block.starved / block.steps)


def _recompiled(evidence: Evidence, total: Block) -> float:
    """As often as it was compiled again, if that goes on or has gone too far."""
    return total.recompiles if evidence.recent.recompiles or total.recompiles >= TOO_MANY_RECOMPILES else 0


def _compiling(evidence: Evidence, total: Block) -> float:
    """Compiling over what the steps could save by it, were they twice as slow without."""
    return evidence.state.compile_s / max(evidence.stage_s or 0.0, 1e-9)


def _low_precision(evidence: Evidence) -> bool:
    facts = evidence.facts
    capability = facts.get("capability") or 0.0
    unused = (capability >= NATIVE_BF16 and facts.get("matmul_precision") == "highest") or TENSOR_CORES <= capability < NATIVE_BF16
    return evidence.on_gpu and facts.get("precision") == "fp32" and bool(facts.get("float32")) and unused


def _small_norm_batch(evidence: Evidence) -> bool:
    return evidence.nproc > 1 and bool(evidence.facts.get("batch_norm")) and evidence.stage.get("micro_batch_size", SMALL_NORM_BATCH) < SMALL_NORM_BATCH


def _compiled(evidence: Evidence) -> bool:
    return bool(evidence.stage.get("compile"))


RULES = (
    Rule(
        "compile-cannot-pay",
        applies=lambda e: _compiled(e) and e.state.compile_s > 0 and e.stage_s is not None,
        measure=_compiling,
        on=1.0,
        off=1.0,
        tell=remedies.compile_cannot_pay,
        of_stage=True,
    ),
    Rule(
        "recompiling",
        applies=_compiled,
        measure=_recompiled,
        on=MANY_RECOMPILES,
        off=MANY_RECOMPILES,
        tell=remedies.recompiling,
        unless=("compile-cannot-pay",),
        of_stage=True,
    ),
    Rule("loader-bound", applies=lambda e: True, measure=_data, on=0.25, off=0.15, tell=remedies.loader_bound),
    Rule("straggler", applies=lambda e: e.nproc > 1 and e.late is not None, measure=_straggling, on=0.15, off=0.10, tell=remedies.straggler),
    Rule(
        "unscaled-batch",
        applies=lambda e: e.nproc > 1 and 0 < e.per_rank < ENOUGH_PER_RANK,
        measure=_fixed,
        on=0.20,
        off=0.12,
        tell=remedies.unscaled_batch,
    ),
    Rule(
        "sync-bound",
        applies=lambda e: e.nproc > 1,
        measure=lambda e, block: block.share("sync"),
        on=0.30,
        off=0.20,
        tell=remedies.sync_bound,
        unless=("straggler", "unscaled-batch"),
    ),
    Rule(
        "launch-bound",
        applies=lambda e: e.on_gpu,
        measure=lambda e, block: block.starved / block.steps,
        on=0.8,
        off=0.6,
        tell=remedies.launch_bound,
        unless=("compile-cannot-pay", "recompiling", "loader-bound", "unscaled-batch", "sync-bound"),
    ),
    Rule(
        "precision",
        applies=_low_precision,
        measure=lambda e, block: block.share("forward", "backward"),
        on=0.5,
        off=0.4,
        tell=remedies.precision,
        unless=("launch-bound", "unscaled-batch"),
    ),
    Rule(
        "too-many-workers",
        applies=lambda e: e.cores is not None and e.config.num_workers > e.cores and 0 < e.most_workers() < e.workers,
        measure=lambda e, block: 1 - block.share("data"),
        on=0.95,
        off=0.90,
        tell=remedies.too_many_workers,
    ),
    Rule(
        "small-batch-norm",
        applies=_small_norm_batch,
        measure=lambda e, block: 1.0,
        on=1.0,
        off=1.0,
        tell=remedies.small_batch_norm,
        unless=("unscaled-batch",),
    ),
)
"""Most important first. `unless` and `_one_cause` see to it that no two of them say the same, or opposites."""

LOADER, STRAGGLER = "loader-bound", "straggler"


def _one_cause(holding: set[str], evidence: Evidence) -> set[str]:
    """Where a rank is late with its data, either all ranks wait for theirs, or this one does."""
    if not {LOADER, STRAGGLER} <= holding or evidence.late_in != "data":
        return holding
    loader = next(rule for rule in RULES if rule.name == LOADER)
    all_wait = evidence.others_s(evidence.recent, "data") >= loader.off * evidence.recent.step_s
    return holding - {STRAGGLER if all_wait else LOADER}


def advise(state: RunState, config: TrainConfig) -> list[Advice]:
    """What there is to say about a run, most important first.

    Args:
        state: as it is now, or as it was at the end.
        config: its options.

    Returns:
        Nothing before enough steps were seen, in a run that failed, and where nothing is to be gained.
    """
    if state.state == "failed":
        return []
    evidence = Evidence(state, config)
    holding = _one_cause({rule.name for rule in RULES if rule.holds(evidence)}, evidence)
    said = [rule for rule in RULES if rule.name in holding and not holding & set(rule.unless)]
    return [Advice(rule.name, *rule.tell(evidence)) for rule in said]
