"""Window: where the time of the recent steps went, in blocks of a second or more, without warm-up and without what is not steps.

Part of `nbddp.state`, which feeds it with the reports of rank 0; what is said about it is in `nbddp.advice`. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PHASES = ("data", "forward", "backward", "sync", "optimizer")
OWN = PHASES[:3]
"""Phases in which a rank works for itself; in the others it also waits for the slowest."""

BLOCK_STEPS = 5
BLOCK_S = 1.0
"""A block has at least as many steps, and they took at least as long."""
BLOCKS = 64
"""How many blocks are remembered: enough that what once made a rule hold is not forgotten while it goes on, and with it the rule."""
RECENT_BLOCKS = 8
"""The last of them, which figures are taken from."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sums over some steps that follow each other.

    Attributes:
        phases_s: those of the slowest rank of each step.
        wait_s: how much longer the slowest rank worked than the quickest.
        slowest: in how many steps a rank was the slowest.
        ranks_s: each rank's own phases, in the order of `PHASES`.
        starved: steps in which the GPU had nothing left to do, as a mean over ranks.
        recompiles: how often the step was compiled again.
    """

    steps: int = 0
    phases_s: tuple[float, ...] = (0.0,) * len(PHASES)
    wait_s: float = 0.0
    slowest: Mapping[int, int] = field(default_factory=dict)
    ranks_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    starved: float = 0.0
    recompiles: int = 0

    @classmethod
    def of(cls, columns: Mapping[str, Any], places: Sequence[int] | None = None, *, recompiles: int = 0) -> Block:
        """The steps of a report, or those at some places of it."""
        chosen = range(len(columns["step"])) if places is None else places
        steps = len(chosen)
        return cls(
            steps=steps,
            phases_s=tuple(sum(columns[f"{phase}_s"][place] for place in chosen) for phase in PHASES),
            wait_s=sum(columns["wait_s"][place] for place in chosen),
            slowest=Counter(columns["slowest_rank"][place] for place in chosen),
            ranks_s={row["rank"]: tuple(steps * float(row[f"{phase}_s"]) for phase in PHASES) for row in columns.get("ranks", ())},
            starved=steps * float(columns.get("starved", 0.0)),
            recompiles=recompiles,
        )

    def __add__(self, other: Block) -> Block:
        return Block(
            steps=self.steps + other.steps,
            phases_s=_added(self.phases_s, other.phases_s),
            wait_s=self.wait_s + other.wait_s,
            slowest={rank: self.slowest.get(rank, 0) + other.slowest.get(rank, 0) for rank in {**self.slowest, **other.slowest}},
            ranks_s={rank: _added(self.ranks_s.get(rank), other.ranks_s.get(rank)) for rank in {**self.ranks_s, **other.ranks_s}},
            starved=self.starved + other.starved,
            recompiles=self.recompiles + other.recompiles,
        )

    @property
    def times_s(self) -> dict[str, float]:
        """Mean time per step that the slowest rank spends in each phase; empty where there are no steps."""
        return {phase: self.phase_s(phase) for phase in PHASES} if self.seconds else {}

    @property
    def slowest_rank(self) -> int | None:
        """The rank that was the slowest most often; None with one rank."""
        return max(self.slowest, key=lambda rank: (self.slowest[rank], -rank)) if len(self.ranks_s) > 1 and self.slowest else None

    @property
    def seconds(self) -> float:
        """How long the steps took: as long as their slowest ranks."""
        return sum(self.phases_s)

    @property
    def step_s(self) -> float:
        """Mean duration of a step."""
        return self.seconds / self.steps if self.steps else 0.0

    def phase_s(self, phase: str) -> float:
        """Mean time per step that the slowest rank spends in a phase."""
        return self.phases_s[PHASES.index(phase)] / self.steps if self.steps else 0.0

    def share(self, *phases: str) -> float:
        """Which part of the steps' time the slowest ranks spend in some phases, 0 to 1."""
        return sum(self.phases_s[PHASES.index(phase)] for phase in phases) / self.seconds if self.seconds else 0.0

    def rank_s(self, rank: int, *phases: str) -> float:
        """Mean time per step that a rank spends in some phases."""
        times = self.ranks_s.get(rank)
        return sum(times[PHASES.index(phase)] for phase in phases) / self.steps if times and self.steps else 0.0


def _added(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> tuple[float, ...]:
    if one is None or other is None:
        return one or other or ()
    return tuple(map(operator.add, one, other))


@dataclass(frozen=True, slots=True)
class Window:
    """The blocks of a stage so far, oldest first, at most `BLOCKS` of them; `total` is the whole stage. Another stage begins another window."""

    stage: int | None = None
    blocks: tuple[Block, ...] = ()
    total: Block = field(default_factory=Block)
    _open: Block = field(default_factory=Block)
    _compiled: int = 0

    def add(self, columns: Mapping[str, Any]) -> Window:
        """The window after one more report; one with steps of the warm-up counts for what was compiled only."""
        stage, compiled = columns["stage"][-1], columns.get("recompiles", self._compiled)
        before = self if stage == self.stage else Window(stage, _compiled=self._compiled)
        recompiles = max(0, compiled - self._compiled)
        if any(columns["warmup"]):
            return replace(before, total=replace(before.total, recompiles=before.total.recompiles + recompiles), _compiled=compiled)
        report = Block.of(columns, recompiles=recompiles)
        block, blocks = before._open + report, before.blocks
        if block.steps >= BLOCK_STEPS and block.seconds >= BLOCK_S:
            block, blocks = Block(), (*blocks, block)[-BLOCKS:]
        return Window(stage, blocks, before.total + report, block, compiled)

    @property
    def recent(self) -> Block:
        """The last blocks as one; before the first is full, the steps so far."""
        return functools.reduce(operator.add, self.blocks[-RECENT_BLOCKS:], Block()) if self.blocks else self._open
