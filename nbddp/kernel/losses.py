"""The losses of a run over steps, epochs and time, joined with the runs that it goes on from.

Read from rank 0's event files by a scan that takes apart only what a curve needs, about three times as fast as reading all of every line: fifty runs are
drawn at once. Used in the kernel to compare runs; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from nbddp.events import parse
from nbddp.kernel.ancestry import Ancestry
from nbddp.kernel.record import started
from nbddp.shapes import LARGEST, LATEST_S

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nbddp.events import Event
    from nbddp.rundir import RunDir

    Floats = NDArray[np.float64]

Axis = Literal["step", "epoch", "time"]
AXES: tuple[Axis, ...] = ("step", "epoch", "time")
STEP, EPOCH, TIME, LOSS = range(4)
"""Rows of `Losses.train` and `Losses.val`."""
POINTS = 600
"""Of a curve that is drawn."""
_HEAD = 400
"""Bytes of a line within which its kind is."""
_COLUMNS = re.compile(rb'"data":\{"step":\[([\d,]+)\],"epoch":\[([\d,]+)\],"stage":\[[\d,]+\],"loss":\[([^\]]+)\],"lr":\[[^\]]*\],"samples":\[([\d,]+)\]')
_REPORT = re.compile(rb'"report":\{"step":\d+,"epoch":(\d+),"samples":(\d+),"samples_per_epoch":(\d+),')
_TIME = re.compile(rb'"time":([\d.eE+-]+)')


@dataclass(frozen=True, slots=True)
class Steps:
    """What one `steps` event says; `place` is the epoch's number and its samples so far, of how many, after the last of the steps."""

    step: list[int]
    epoch: list[int]
    loss: list[float]
    samples: list[int]
    time: float
    place: tuple[int, int, int] | None

    @classmethod
    def of(cls, line: bytes) -> Steps | None:
        """Take a line apart; None where it is cut, damaged, or of another kind."""
        if line.find(b'"kind":"steps"', 0, _HEAD) < 0:
            return None
        try:
            columns, time = _COLUMNS.search(line), _TIME.search(line, 0, _HEAD)
            if columns is None or time is None:
                return None if (event := parse(line)) is None or event.kind != "steps" or not event.data["step"] else cls._of(event)
            found = _REPORT.search(line, max(0, line.rfind(b'"report":{')))
            step, epoch, loss, samples = columns.groups()
            steps = cls(
                list(map(int, step.split(b","))),
                list(map(int, epoch.split(b","))),
                list(map(float, loss.replace(b'"', b"").split(b","))),  # "nan" and "inf" are words
                list(map(int, samples.split(b","))),
                float(time[1]),
                None if found is None else (int(found[1]), int(found[2]), int(found[3])),
            )
        except ValueError:
            return None
        return steps if steps._sound() else None

    def _sound(self) -> bool:
        """Whether columns are of one length and numbers are of a possible size: the line was not taken apart as an event is."""
        columns = (self.step, self.epoch, self.samples)
        alike = all(len(column) == len(self.loss) and max(column) <= LARGEST for column in columns)
        return alike and 0 <= self.time <= LATEST_S and (self.place is None or max(self.place) <= LARGEST)

    @classmethod
    def _of(cls, event: Event) -> Steps:
        """The same of a line whose columns are in another order."""
        data, names = event.data, ("epoch", "samples", "samples_per_epoch")
        report = data.get("report", {})
        place = tuple(report[name] for name in names) if all(name in report for name in names) else None
        return cls(data["step"], data["epoch"], data["loss"], data["samples"], event.time, place)

    def epochs(self) -> Floats:
        """How many epochs were done after each step; a step of which that is not known counts for the whole of its epoch."""
        done = np.asarray(self.epoch, np.float64)
        if self.place is None or self.place[2] <= 0:
            return done
        number, seen, of = self.place
        behind = np.cumsum(self.samples[::-1])[::-1] - self.samples
        share = np.clip((seen - behind) / of, 0.0, 1.0)
        return np.where(done == number, number - 1 + share, done)


@dataclass(frozen=True, slots=True)
class Losses:
    """Training losses of every step and validation losses, each over steps, epochs and seconds.

    Seconds count from the request of the run, those of the runs that it goes on from first.

    Attributes:
        train: one column per step; its rows are step, epoch, time and loss.
        val: the same of the validations.
        missing: id of a run before it that is gone.
    """

    train: Floats
    val: Floats
    missing: str | None = None

    @classmethod
    def of(cls, run: RunDir) -> Losses:
        """Read a run, live or ended, and the runs before it."""
        ancestry = Ancestry.of(run, run.read_spec() or {})
        whole = cls.empty()
        for parent in ancestry.parents:
            whole = whole.then(_of_run(parent.run).until(parent.until))
        return replace(whole.then(_of_run(run)), missing=ancestry.missing)

    @classmethod
    def empty(cls) -> Losses:
        return cls(np.empty((4, 0)), np.empty((4, 0)))

    @property
    def loss(self) -> Floats:
        """The training losses."""
        row: Floats = self.train[LOSS]
        return row

    @property
    def val_loss(self) -> Floats:
        """The validation losses."""
        row: Floats = self.val[LOSS]
        return row

    def until(self, step: float) -> Losses:
        """What was recorded up to a step."""
        return Losses(self.train[:, self.train[STEP] <= step], self.val[:, self.val[STEP] <= step])

    def then(self, later: Losses, *, pause: bool = True) -> Losses:
        """Go on with what came later, whose steps replace those that it repeated; `pause`: the seconds of `later` count from its own beginning."""
        first = later.train[STEP, 0] if later.train.size else math.inf
        kept = self.until(first - 1)
        offset = kept.train[TIME, -1] if pause and kept.train.size else 0.0
        shift = np.array([[0.0], [0.0], [offset], [0.0]])
        return Losses(np.concatenate((kept.train, later.train + shift), axis=1), np.concatenate((kept.val, later.val + shift), axis=1))

    def thinned(self, points: int = POINTS) -> Losses:
        """The same as curves of at most `points` means."""
        return Losses(np.stack([thinned(row, points) for row in self.train]), np.stack([thinned(row, points) for row in self.val]), self.missing)


def thinned(values: Floats, points: int = POINTS) -> Floats:
    """Means over stretches of equal length, of what is finite in them; nan where nothing is."""
    stride = -(-len(values) // points)
    if stride <= 1:
        return np.where(np.isfinite(values), values, np.nan)
    padded = np.full(-(-len(values) // stride) * stride, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(-1, stride)
    finite = np.isfinite(table)
    count = finite.sum(axis=1)
    means: Floats = np.where(count > 0, np.where(finite, table, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
    return means


def attempts(run: RunDir) -> list[Path]:
    """Rank 0's event files, the first attempt's first."""
    found = {path.name.split(".")[1]: path for path in run.events.glob("rank-00000.*.jsonl") if path.is_file()}
    return [found[number] for number in sorted((number for number in found if number.isdigit()), key=int)]


def _of_run(run: RunDir) -> Losses:
    """One run alone; a later attempt goes on from the checkpoint that it found."""
    begin = started(run.read_spec() or {})
    whole = Losses.empty()
    for path in attempts(run):
        try:
            whole = whole.then(_scan(path, begin), pause=False)
        except OSError:  # pruned meanwhile, or its disk is away for a moment
            continue
    return whole


def _scan(path: Path, begin: float | None) -> Losses:
    """One event file, to its last complete line."""
    step, epoch, time, loss = (array("d") for _ in range(4))
    val: list[tuple[float, float]] = []
    with path.open("rb") as file:
        for line in file:
            if (steps := Steps.of(line)) is not None:
                begin = steps.time if begin is None else begin
                now = max(0.0, steps.time - begin)
                step.extend(steps.step)
                loss.extend(steps.loss)
                epoch.extend(steps.epochs())
                time.extend(np.linspace(time[-1] if time else now, now, len(steps.step) + 1)[1:])
            elif line.find(b'"kind":"validation"', 0, _HEAD) > 0 and (value := _val_loss(line)) is not None:
                val.append(value)
    if not step:
        return Losses.empty()
    train = np.stack([np.frombuffer(column) for column in (step, epoch, time, loss)])
    at, values = np.array(val).reshape(-1, 2).T
    return Losses(train, np.stack([at, *(np.interp(at, train[STEP], train[row]) for row in (EPOCH, TIME)), values]))


def _val_loss(line: bytes) -> tuple[float, float] | None:
    event = parse(line)
    if event is None or event.kind != "validation" or "val_loss" not in event.data["values"]:
        return None
    return float(event.data["step"]), float(event.data["values"]["val_loss"])
