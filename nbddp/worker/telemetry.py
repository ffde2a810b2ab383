"""What every rank measured in every step, on every rank, at little cost.

Steps are collected in a float64 buffer of fixed size. Every K steps it is all-gathered, asynchronously and over a process group of its own, and
applied by all ranks at the next such boundary: no step waits for it. The header of rank 0's buffer carries decisions (stop, checkpoint, the next
K), so the ranks can't disagree on them. K is chosen by the slowest rank, such that a boundary comes about every 0.25 s, or with every step where
steps are longer; it at most doubles from one boundary to the next, since the first steps say little: loader workers hold some batches ready. Steps and
validations each have a K of their own, which an epoch's end leaves as it is: a run of many short epochs would else report after every few steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nbddp.evaluation.ranks import Ranks
from nbddp.worker.clock import N_PHASES, StepTimes
from nbddp.worker.position import memory

BOUNDARY_S = 0.25
K_MAX = 64
K_GROWTH = 2
"""How much longer the next stretch may be: a few quick steps do not say that all are."""

STOP_ASKED, STOP_TIME, SAVE_DUE, SAVE_OK = 1, 2, 4, 8
"""Decisions of rank 0: the user asked to stop, the time is up, a checkpoint is due by the clock, the last checkpoint is old enough for another."""

STEP, LOSS, WEIGHT, TIMES, AGGREGATION, STARVED, SAMPLES, FIRST_SCALAR = 0, 1, 2, 3, 3 + N_PHASES, 4 + N_PHASES, 5 + N_PHASES, 6 + N_PHASES
"""Columns of a row: step, sum of loss x weight, weight, the phases, the time spent here, whether the GPU waited for the host, how many samples of the step
were this rank's, then sums of scalar x weight."""

_ROWS, _FLAGS, _NEXT_K, _MEMORY = range(4)


@dataclass(slots=True)
class StepRecord:
    """One step of this rank.

    `sums` are loss x weight, weight and the scalars x weight, as numbers or as tensors on the device; `samples` are those of all ranks, `own_samples` those of
    this one that count: a rank that has none left repeats one, which does not.
    """

    step: int
    epoch: int
    stage: int
    lr: float
    samples: int
    own_samples: int
    warmup: bool
    applied: bool
    sums: Sequence[torch.Tensor | float]
    times: StepTimes
    aggregation_s: float
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class Gathered:
    """The same steps of all ranks: `rows` is float64 of shape (ranks, steps, columns), `memory` in bytes per rank."""

    records: list[StepRecord]
    rows: np.ndarray
    memory: list[int]


class _Sums:
    """The sums of some steps, on their way from the device: copied asynchronously, read one boundary later."""

    def __init__(self, records: list[StepRecord], device: torch.device) -> None:
        self.records = records
        self._host: torch.Tensor | None = None
        if device.type == "cuda" and records:
            columns = [torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in record.sums]) for record in records]
            stacked = torch.stack(columns)
            self._host = torch.empty(stacked.shape, dtype=torch.float64, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[list[float]]:
        if self._host is not None:
            self._copied.synchronize()
            return self._host.tolist()
        return [[float(value) for value in record.sums] for record in self.records]


class _Pace:
    """After how many ticks a boundary comes: K, which all ranks agree on, and what this rank measures to propose the next."""

    __slots__ = ("_since", "_ticks", "_timed", "k")

    def __init__(self) -> None:
        self.k, self._ticks, self._timed = 1, 0, 0
        self._since: float | None = time.monotonic()

    def tick(self) -> bool:
        """Count; return whether this is a boundary."""
        self._ticks += 1
        if self._since is None:
            self._since = time.monotonic()
        else:
            self._timed += 1
        return self._ticks >= self.k

    def propose(self) -> int:
        """The next K, by the time of the ticks since the last boundary."""
        now, k = time.monotonic(), self.k
        if self._timed and self._since is not None:
            tick_s = (now - self._since) / self._timed
            k = max(1, min(int(BOUNDARY_S / max(tick_s, 1e-6)), K_MAX, K_GROWTH * k))
        self._since, self._ticks, self._timed = now, 0, 0
        return k

    def pause(self) -> None:
        """Something else takes place until the next tick."""
        self._since, self._ticks, self._timed = None, 0, 0


class Telemetry:
    """The channel of one rank. All ranks make the same calls in the same order."""

    def __init__(self, ranks: Ranks, *, decide: Callable[[], int], apply: Callable[[Gathered], None]) -> None:
        self._ranks, self._decide, self._apply = ranks, decide, apply
        self._width = FIRST_SCALAR
        self._lag = 1 if ranks.device.type == "cuda" else 0
        self._fresh: list[StepRecord] = []
        self._travelling = _Sums([], ranks.device)
        self._pending: tuple[dist.Work | None, torch.Tensor, list[StepRecord], _Pace | None] | None = None
        self.begin()
        self.flags = 0

    def open(self, scalars: int) -> None:
        """Set the number of scalars; nothing may be on its way."""
        assert self._pending is None
        assert not self._fresh
        self._width = FIRST_SCALAR + scalars

    def begin(self) -> None:
        """What follows may be slower than all before, such as another stage: the next boundary is the next tick."""
        self._of_steps, self._of_validation = _Pace(), _Pace()

    def tick(self, record: StepRecord | None = None) -> None:
        """Count a step, or a batch of the validation (without a record); at a boundary, `flags` takes rank 0's decisions in."""
        pace = self._of_validation
        if record is not None:
            self._fresh.append(record)
            pace = self._of_steps
        if pace.tick():
            self._settle()
            self._post(pace)

    def flush(self) -> None:
        """Apply everything that was measured so far; blocks. Steps, and batches of validations, go on at the pace that they had."""
        self._settle()
        for _ in range(1 + self._lag):
            self._post(None)
            self._settle()
        self._of_steps.pause()
        self._of_validation.pause()

    def take(self) -> int:
        """The decisions since the last call."""
        flags, self.flags = self.flags, 0
        return flags

    def _post(self, pace: _Pace | None) -> None:
        ripe = _Sums(self._fresh, self._ranks.device)
        if self._lag:
            ripe, self._travelling = self._travelling, ripe
        self._fresh = []
        rows = [
            (record.step, *sums[:2], *record.times.read(), record.aggregation_s, record.times.starved(), record.own_samples, *sums[2:])
            for record, sums in zip(ripe.records, ripe.read(), strict=True)
        ]
        buffer = np.zeros((1 + K_MAX, self._width))
        if rows:
            buffer[1 : 1 + len(rows)] = rows
        flags = self._decide() if self._ranks.rank == 0 else 0
        buffer[0, :4] = len(rows), flags, 0 if pace is None else pace.propose(), memory(self._ranks.device)
        mine, work = torch.from_numpy(buffer), None
        everyone = mine[None]
        if self._ranks.world_size > 1:
            everyone = torch.empty(self._ranks.world_size, *mine.shape, dtype=torch.float64)
            work = dist.all_gather(list(everyone.unbind()), mine, group=self._ranks.telemetry, async_op=True)
        self._pending = (work, everyone, ripe.records, pace)

    def _settle(self) -> None:
        if self._pending is None:
            return
        (work, gathered, records, pace), self._pending = self._pending, None
        if work is not None:
            work.wait()
        everyone = gathered.numpy()
        headers = everyone[:, 0]
        self.flags |= int(headers[0, _FLAGS])
        if pace is not None:
            pace.k = int(headers[:, _NEXT_K].min())  # the slowest rank's: in a validation the ranks do not wait for each other
        n = int(headers[0, _ROWS])
        if n:
            rows = everyone[:, 1 : 1 + n]
            assert n == len(records)
            assert (rows[:, :, STEP] == rows[0, :, STEP]).all(), "ranks sent different steps"
            self._apply(Gathered(records, rows, [int(value) for value in headers[:, _MEMORY]]))
