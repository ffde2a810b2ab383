"""A run whose steps took what a test says: written by the reporter of rank 0 and folded as the view does it.

For tests of what is made of the times. Only the clock is made up; nothing trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.config import TrainConfig
from nbddp.events import EventReader, EventWriter
from nbddp.planning import Machine, make_plan
from nbddp.rundir import RunDir
from nbddp.state import RunState
from nbddp.worker.clock import NO_TIMES
from nbddp.worker.report import Reporter
from nbddp.worker.telemetry import FIRST_SCALAR, LOSS, SAMPLES, STARVED, STEP, TIMES, WEIGHT, Gathered, StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nbddp.stage import Stage

WARMUP = 3


@dataclass(frozen=True)
class Step:
    """How long the phases of a step take on one rank, in seconds."""

    data: float = 0.01
    forward: float = 0.03
    backward: float = 0.05
    sync: float = 0.005
    optimizer: float = 0.005

    def times(self, factor: float = 1.0) -> list[float]:
        return [factor * value for value in (self.data, self.forward, self.backward, self.sync, self.optimizer)]


class TimedRun:
    """The events of rank 0, and the state that they fold to.

    Args:
        folder: where the run directory is made.
        nproc: ranks.
        gpu: the compute capability of the GPUs; None is the CPU.
        facts: what the event of a stage says otherwise than by default.
        options: of the configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nproc: int = 1,
        gpu: float | None = None,
        cores: int = 16,
        n_train: int = 100_000,
        stages: Sequence[Stage] = (),
        facts: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.config = TrainConfig(**{"nproc": nproc, "devices": "cpu" if gpu is None else "auto", **options})
        machine = Machine(() if gpu is None else ("H100",) * nproc, cores, bf16=gpu is not None and gpu >= 8)
        self.plan = make_plan(self.config, n_train=n_train, n_val=0, machine=machine, stages=stages)
        self.state, self.now, self.step, self.stage = RunState(), 0.0, 0, 0
        self._stages = stages
        self.folder = RunDir.create(folder, "timed").events
        self._events, self._reader = EventWriter(self.folder / "rank-00000.0.jsonl", run="timed", rank=0), EventReader(self.folder)
        self._reporter = Reporter(self._events, rank=0, world_size=self.plan.nproc)
        self._reporter.begin_stage(samples_per_epoch=n_train, on_nan="warn", scaled=False)
        self._facts = {
            "trainable": 10_000_000,
            "float32": True,
            "batch_norm": 0,
            "synced_norm": 0,
            "matmul_precision": self.config.matmul_precision,
            "cores": cores,
            "capability": gpu,
            "options": None,
            **(facts or {}),
        }
        for rank in range(self.plan.nproc):
            with_rank = EventWriter(self.folder / f"rank-{rank:05d}.1.jsonl", run="timed", rank=rank, attempt=1)
            with_rank.emit("started", device="cpu" if gpu is None else f"cuda:{rank}", backend=self.plan.backend)
            with_rank.close()
        self.emit("plan", **self.plan.to_json(), total_steps=self.plan.total_steps, epochs=self.plan.epochs)

    def emit(self, kind: str, **data: Any) -> None:
        self._events.emit(kind, **data)
        self.fold()

    def fold(self) -> None:
        """Take in what was written, as of the test's own time."""
        for event in self._reader.poll():
            self.state.fold(replace(event, mono=self.now))

    def begin(self, stage: int = 0, compile_s: float | None = None) -> TimedRun:
        """Begin a stage."""
        if compile_s is not None:
            self.emit("phase", phase="compiling")
            self.now += compile_s
        if self._stages:
            self._facts["options"] = self._stages[stage].config(self.config).to_json()
        plan, self.stage, self._warm_from = self.plan.stages[stage], stage, self.step + WARMUP
        at = {"stage": stage, "name": plan.name, "step": self.step, "total_steps": self.plan.total_steps}
        self.emit("stage", **at, epochs=plan.epochs, batch_size=plan.batch_size, lr=plan.lr, precision=plan.precision, **self._facts)
        self.emit("phase", phase="training")
        return self

    def train(
        self,
        steps: int,
        *ranks: Step,
        starved: float = 0.0,
        recompiles: Sequence[int] = (),
        report: int = 5,
        scale: float = 1.0,
        samples: int | None = None,
    ) -> TimedRun:
        """Take steps that take these times on the ranks (one for all); in the steps of `recompiles` the step is compiled again.

        `samples` are those of a step that is not a whole batch, dealt as `nbddp.data.Shares` does: rank r has every N-th.
        """
        each = ranks * self.plan.nproc if len(ranks) == 1 else ranks
        assert len(each) == self.plan.nproc
        last, nproc = self.step + steps, self.plan.nproc
        samples = self.plan.stages[self.stage].batch_size if samples is None else samples
        while self.step < last:
            count = min(report, last - self.step, max(1, self._warm_from - self.step) if self.step < self._warm_from else report)
            rows = np.zeros((self.plan.nproc, count, FIRST_SCALAR))
            records = []
            for index in range(count):
                self.step += 1
                warmup = self.step <= self._warm_from
                rows[:, index, STEP], rows[:, index, LOSS], rows[:, index, WEIGHT], rows[:, index, STARVED] = self.step, 1.0, 1.0, starved
                for rank, step in enumerate(each):
                    rows[rank, index, SAMPLES] = len(range(rank, samples, nproc))
                    rows[rank, index, TIMES : TIMES + 5] = step.times(scale * (100 if warmup else 1))
                self._reporter.recompiles += self.step in recompiles
                own = int(rows[0, index, SAMPLES])
                records.append(
                    StepRecord(self.step, 1, self.stage, 0.1, samples, own, warmup=warmup, applied=True, sums=[1.0, 1.0], times=NO_TIMES, aggregation_s=0.0)
                )
            self._reporter(Gathered(records, rows, [0] * self.plan.nproc))
            self.now += float(rows[:, :, TIMES : TIMES + 5].sum(axis=2).max(axis=0).sum())
            self.fold()
        return self

    def close(self) -> None:
        self._events.close()
