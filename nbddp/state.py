"""RunState: what a run looks like now, folded from its events.

A pure fold without IO: watching a run live and attaching to it later are the same code. Memory is bounded however long the run is: curves are
thinned to about 600 points. Used in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from nbddp.curve import Curve
from nbddp.window import PHASES as PHASES
from nbddp.window import Block, Window

if TYPE_CHECKING:
    from nbddp.events import Event

State = Literal["starting", "running", "finished", "stopped", "failed"]
EPOCHS = 500
"""How many of the last epochs a state remembers; `nbddp.kernel.history` has them all."""


@dataclass(slots=True)
class RankState:
    """One row of the per-rank table; durations are means per step over the last report."""

    rank: int
    device: str = ""
    backend: str = ""
    process: list[int] = field(default_factory=list)
    step: int = 0
    epoch: int = 0
    phase: str = "starting"
    memory: int = 0
    samples_per_s: float = 0.0
    times_s: dict[str, float] = field(default_factory=dict)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What an epoch ended with; `values` holds val_loss and whatever else was recorded."""

    epoch: int
    step: int
    stage: int
    loss: float
    duration_s: float
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage that was begun, after how many steps of the run."""

    index: int
    name: str
    step: int
    precision: str = ""
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class Extreme:
    """The smallest value that a quantity had, and where."""

    value: float
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of the log line: the last step's and the mean over the epoch so far, in seconds; times are maxima over ranks."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_per_epoch: int = 0
    loss: float = math.nan
    epoch_loss: float = math.nan
    data_s: float = 0.0
    network_s: float = 0.0
    aggregation_s: float = 0.0
    mean_data_s: float = 0.0
    mean_network_s: float = 0.0
    mean_aggregation_s: float = 0.0

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Report:
        """Read the figures of an event; those that it lacks keep their default, those that are not known here are left out."""
        values: dict[str, Any] = {item.name: (int if item.type == "int" else float)(record[item.name]) for item in fields(cls) if item.name in record}
        return cls(**values)


@dataclass(slots=True)
class RunState:
    """Everything a view shows, bounded in size. Feed it with `fold`. `steady` is all steps of the run without warm-up, `window` the recent ones."""

    state: State = "starting"
    phase: str = "starting"
    plan: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, RankState] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    stage: int = 0
    stages: list[StageRecord] = field(default_factory=list)
    total_steps: int | None = None
    lr: float = math.nan
    report: Report = field(default_factory=Report)
    train_curve: Curve = field(default_factory=Curve)
    val_curve: Curve = field(default_factory=Curve)
    epochs: deque[EpochRecord] = field(default_factory=lambda: deque(maxlen=EPOCHS))
    validated: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, Extreme] = field(default_factory=dict)
    nonfinite_steps: int = 0
    overflows: int = 0
    recompiles: int = 0
    compile_s: float = 0.0
    stage_facts: dict[str, Any] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    steady: Block = field(default_factory=Block)
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    messages: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=50))
    stop_reason: str | None = None
    stop_text: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)
    started_mono: float | None = None
    last_mono: float | None = None
    launched_time: float | None = None
    first_step_time: float | None = None
    finished_time: float | None = None
    _rate: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=64))
    _first: tuple[float, int] | None = None
    _compiling: float | None = None

    @property
    def done(self) -> bool:
        """Whether the state is a terminal one."""
        return self.state in ("finished", "stopped", "failed")

    @property
    def newest_step(self) -> int:
        """The last step that is known of: heartbeats tell of it before the report with its figures comes."""
        return max((self.step, *(row.step for row in self.ranks.values())))

    @property
    def newest_epoch(self) -> int:
        """The epoch of that step, counted from 1."""
        return max((self.epoch, *(row.epoch for row in self.ranks.values())))

    @property
    def progress(self) -> float | None:
        """Share of the run that is done, 0 to 1; None where only time limits it."""
        return None if not self.total_steps else min(1.0, self.newest_step / self.total_steps)

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the rate so far, pauses for validation included; None while that is not known."""
        if not self.total_steps or self.steps_per_s <= 0:
            return None
        per_step = 1 / self.steps_per_s
        if self._first is not None and self.last_mono is not None and self.step > self._first[1]:
            per_step = max(per_step, (self.last_mono - self._first[0]) / (self.step - self._first[1]))
        return max(0, self.total_steps - self.newest_step) * per_step

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from rank 0's start to its latest event."""
        return None if self.started_mono is None or self.last_mono is None else max(0.0, self.last_mono - self.started_mono)

    def fold(self, event: Event) -> None:
        """Take one event in; kinds that are not known are kept out of the way."""
        if event.rank == 0:
            self.last_mono = event.mono
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    def snapshot(self) -> RunState:
        """A state that later events do not reach, for another thread."""
        other = copy.copy(self)
        other.ranks = {rank: copy.copy(row) for rank, row in self.ranks.items()}
        other.train_curve, other.val_curve = self.train_curve.copy(), self.val_curve.copy()
        for name in _CONTAINERS:
            setattr(other, name, copy.copy(getattr(self, name)))
        return other

    def rank(self, rank: int) -> RankState:
        """The row of a rank, made where there was none."""
        return self.ranks.setdefault(rank, RankState(rank))


def _started(state: RunState, event: Event) -> None:
    row = state.rank(event.rank)
    row.device, row.backend = str(event.data.get("device", "")), str(event.data.get("backend", ""))
    row.process = list(event.data.get("process", []))
    if event.rank == 0:
        state.started_mono = event.mono


def _plan(state: RunState, event: Event) -> None:
    state.plan = event.data
    state.total_steps = event.data.get("total_steps")


def _phase(state: RunState, event: Event) -> None:
    phase = str(event.data.get("phase", ""))
    state.rank(max(event.rank, 0)).phase = phase
    if event.rank == 0:
        since, state._compiling = state._compiling, event.mono if phase == "compiling" else None
        state.compile_s = state.compile_s if since is None else event.mono - since
        state.phase = phase
        if phase == "training" and not state.done:
            state.state = "running"
        if event.data.get("first_step") and state.first_step_time is None:
            state.first_step_time = event.time


def _steps(state: RunState, event: Event) -> None:
    columns = event.data
    steps = columns.get("step", [])
    if not steps:
        return
    if not state.done:
        state.state = "running"
    losses = [float(value) for value in columns["loss"]]
    for step, loss in zip(steps, losses, strict=True):
        state.train_curve.add(float(step), loss)
        state.nonfinite_steps += not math.isfinite(loss)
    state.recompiles = columns.get("recompiles", state.recompiles)
    state.window = state.window.add(columns)
    state.overflows += sum(columns.get("overflow", ()))
    warm = [index for index, flag in enumerate(columns["warmup"]) if not flag]
    state.steady += Block.of(columns, warm)
    state.step, state.epoch, state.stage = steps[-1], columns["epoch"][-1], columns["stage"][-1]
    state.lr = float(columns["lr"][-1])
    if warm:
        _rate(state, columns, warm)
        if state._first is None:
            state._first = (event.mono, state.step)
    for row in columns.get("ranks", []):
        known = state.rank(row["rank"])
        known.step, known.memory = max(known.step, state.step), row.get("memory", 0)  # its heartbeat may have told of a later step
        known.samples_per_s = float(row.get("samples_per_s", 0.0))
        known.times_s = {phase: float(row[f"{phase}_s"]) for phase in PHASES}
    if "report" in columns:
        state.report = Report.from_json(columns["report"])


def _rate(state: RunState, columns: dict[str, Any], warm: list[int]) -> None:
    """Throughput within steps over the last reports: warm-up, validation and checkpoints left out, however short an epoch is."""
    busy_s = sum(columns[f"{phase}_s"][index] for phase in PHASES for index in warm)
    state._rate.append((busy_s, len(warm), sum(columns["samples"][index] for index in warm)))
    busy_s, steps, samples = (sum(column) for column in zip(*state._rate, strict=True))
    if busy_s > 0:
        state.steps_per_s, state.samples_per_s = steps / busy_s, samples / busy_s


def _note_lowest(state: RunState, name: str, value: float, epoch: int, step: int) -> None:
    if math.isfinite(value) and (name not in state.lowest or value < state.lowest[name].value):
        state.lowest[name] = Extreme(value, epoch, step)


def _epoch(state: RunState, event: Event) -> None:
    data = event.data
    record = EpochRecord(data["epoch"], data["step"], data["stage"], float(data["loss"]), float(data["duration_s"]))
    state.epochs.append(record)
    _note_lowest(state, "loss", record.loss, record.epoch, record.step)
    _record(state, data.get("values", {}), record.epoch, record.step)


def _validation(state: RunState, event: Event) -> None:
    values = {name: float(value) for name, value in event.data["values"].items()}
    step, epoch = event.data["step"], event.data.get("epoch", state.epoch)
    state.validated = values
    if "val_loss" in values:
        state.val_curve.add(float(step), values["val_loss"])
    _record(state, values, epoch, step)


def _reported(state: RunState, event: Event) -> None:
    """What on_epoch_end reported."""
    _record(state, event.data["values"], event.data.get("epoch", state.epoch), event.data["step"])


def _record(state: RunState, values: dict[str, Any], epoch: int, step: int) -> None:
    """Values of an epoch, beside those that it has already."""
    numbers = {name: float(value) for name, value in values.items()}
    for name, value in numbers.items():
        _note_lowest(state, name, value, epoch, step)
    if state.epochs and (record := state.epochs[-1]).step == step:
        state.epochs[-1] = replace(record, values={**record.values, **numbers})


def _stage(state: RunState, event: Event) -> None:
    data = state.stage_facts = event.data
    state._rate.clear()  # its steps may be of another batch, and of another length
    lr = data.get("lr")
    state.stages.append(StageRecord(data["stage"], str(data["name"]), data["step"], str(data.get("precision", "")), None if lr is None else float(lr)))
    state.stage = data["stage"]
    state.total_steps = data.get("total_steps", state.total_steps)


def _checkpoint(state: RunState, event: Event) -> None:
    entry = dict(event.data)
    state.checkpoints = [known for known in state.checkpoints if known["name"] != entry["name"] and known["name"] not in entry.get("removed", ())]
    state.checkpoints.append(entry)
    if entry["name"] == "best":
        state.best = entry


def _message(state: RunState, event: Event) -> None:
    state.messages.append({"rank": event.rank, "time": event.time, **event.data})


def _heartbeat(state: RunState, event: Event) -> None:
    row = state.rank(event.rank)
    row.phase = str(event.data.get("phase", row.phase))
    if (step := int(event.data.get("step", 0))) > row.step:
        row.step, row.epoch = step, int((event.data.get("position") or [row.epoch])[0])
    row.memory = int(event.data.get("memory", row.memory))


def _stopping(state: RunState, event: Event) -> None:
    state.stop_reason = str(event.data.get("reason", ""))
    state.stop_text = str(event.data.get("text") or state.stop_reason)
    state.phase = "stopping"


def _failed(state: RunState, event: Event) -> None:
    state.failures.append({"rank": event.rank, "time": event.time, **event.data})


def _finished(state: RunState, event: Event) -> None:
    state.rank(event.rank).finished = True


def _launched(state: RunState, event: Event) -> None:
    state.launched_time = event.time


def _exited(state: RunState, event: Event) -> None:
    """The supervisor's last word, the same as in result.json."""
    state.state = event.data["state"]
    state.finished_time = event.time
    state.phase = state.state
    if (step := int(event.data.get("step") or 0)) > state.step:  # steps whose report was lost with the ranks
        state.step, state.epoch = step, max(state.epoch, int(event.data.get("epoch") or 0))
    if (reason := event.data.get("stop_reason")) and reason != state.stop_reason:  # whatever it began with, it came to this
        state.stop_reason = state.stop_text = str(reason)
    if state.state == "failed" and state.first_step_time is None:  # such a run keeps its record, not its checkpoints
        state.checkpoints, state.best = [], None


_HANDLERS = {
    "started": _started,
    "plan": _plan,
    "phase": _phase,
    "steps": _steps,
    "epoch": _epoch,
    "validation": _validation,
    "reported": _reported,
    "stage": _stage,
    "checkpoint": _checkpoint,
    "message": _message,
    "heartbeat": _heartbeat,
    "stopping": _stopping,
    "failed": _failed,
    "finished": _finished,
    "launched": _launched,
    "exited": _exited,
}

_CONTAINERS = (
    "plan",
    "stages",
    "epochs",
    "validated",
    "lowest",
    "checkpoints",
    "messages",
    "failures",
    "_rate",
)
