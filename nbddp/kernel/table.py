"""Tables of runs and of checkpoints: sequences that display as a table.

Made in the kernel from the small files of each run, so that a hundred runs are listed at once; of a live run the end of rank 0's events is read.
Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel import markup
from nbddp.kernel.record import duration_s, number, started
from nbddp.kernel.text import bytes_text, clock_text, count_text, short_id, value_text
from nbddp.rundir import RunDir, run_dirs
from nbddp.tabular import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

TAIL_BYTES = 1 << 17
NOT_TOLD = ("run_root", "name", "on_kernel_exit", "resume")
"""Options that say nothing about how a run differs from another."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of a table.

    `parent` is the id of the run that it goes on from, `best` is name, value and epoch, `differs` the options that are not the default, `size` is in bytes.
    """

    id: str
    state: str
    started: float | None
    duration_s: float | None
    step: int | None
    best: tuple[str, float, int | None] | None
    loss: float | None
    differs: dict[str, Any]
    size: int
    note: str | None
    dir: Path
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint file; `value` is the monitored value, None where there was none; `bytes` its size."""

    name: str
    path: Path
    epoch: int
    step: int
    value: float | None
    bytes: int


class RunTable(Table[RunEntry]):
    """Runs, newest first."""

    HEADER = ("run", "state", "started", "goes on from", "differs by", "note", "duration", "steps", "best", "loss", "size")
    LEFT = 6
    EMPTY = "no runs here yet"

    @classmethod
    def of(cls, root: Path) -> RunTable:
        """The runs of a root."""
        return cls(read_entry(run) for run in reversed(run_dirs(root)))

    def _cells(self, row: RunEntry) -> tuple[str, ...]:
        best = ""
        if row.best is not None:
            name, value, epoch = row.best
            best = f"{name} {value_text(value)}" + (f" (epoch {epoch})" if epoch is not None else "")
        return (
            row.id,
            row.state,
            "" if row.started is None else time.strftime("%m-%d %H:%M", time.localtime(row.started)),
            "" if row.parent is None else short_id(row.parent),
            ", ".join(f"{name}={plain_text(value)}" for name, value in row.differs.items()),
            row.note or "",
            "" if row.duration_s is None else clock_text(row.duration_s),
            "" if row.step is None else count_text(row.step),
            best,
            "" if row.loss is None else value_text(row.loss),
            bytes_text(row.size),
        )

    def _html_cells(self, row: RunEntry) -> tuple[str, ...]:
        cells = list(super()._html_cells(row))
        cells[1] = markup.badge(row.state)
        for index in (4, 5):
            cells[index] = markup.div(cells[index], "white-space:normal;min-width:80px;max-width:260px;overflow-wrap:anywhere")
        return tuple(cells)


class CheckpointTable(Table[CheckpointEntry]):
    """The checkpoint files of a run."""

    HEADER = ("name", "path", "epoch", "step", "value", "size")
    LEFT = 2
    EMPTY = "no checkpoints"

    def __getitem__(self, key: Any) -> Any:
        """An entry by its place, or by its name: ``run.checkpoints["best"]``."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for row in self:
            if row.name == key:
                return row
        message = f"no checkpoint {key}; there are {', '.join(row.name for row in self) or 'none'}"
        raise KeyError(message)

    @classmethod
    def of(cls, run: RunDir, events: Iterable[dict[str, Any]]) -> CheckpointTable:
        """The checkpoints that a `RunState` lists, as far as their files are there."""
        rows = []
        for event in events:
            path = run.checkpoints / Path(str(event["file"])).name
            with contextlib.suppress(FileNotFoundError):  # pruned, perhaps just now
                size = path.stat().st_size
                rows.append(CheckpointEntry(str(event["name"]), path, int(event["epoch"]), int(event["step"]), number(event.get("value")), size))
        return cls(rows)

    def _cells(self, row: CheckpointEntry) -> tuple[str, ...]:
        value = "" if row.value is None else value_text(row.value)
        return (row.name, _from_here(row.path), str(row.epoch), count_text(row.step), value, bytes_text(row.bytes))


def _from_here(path: Path) -> str:
    """A path as it is written in this folder: a saved notebook is read in other places."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def plain_text(value: object) -> str:
    """The value of an option as it would be written."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def read_entry(run: RunDir) -> RunEntry:
    """Read one run's row from its small files."""
    spec, result = run.read_spec() or {}, run.read_result()
    if result is None:
        state, summary = _unfinished(run), _latest(run)
        until = time.time() if state != "failed" else None
    else:
        state, until = str(result.get("state", "failed")), number(result.get("time"))
        summary = dict(result.get("summary") or {**_latest(run), "step": result.get("step"), "epoch": result.get("epoch")})
    return RunEntry(
        id=run.id,
        state=state,
        started=started(spec),
        duration_s=duration_s(spec, until),
        step=summary.get("step"),
        best=_best(summary, _monitor(spec)),
        loss=number(summary.get("loss")),
        differs=_differs(spec.get("config") or {}),
        size=_size(run),
        note=spec.get("note"),
        dir=run.path,
        parent=spec.get("parent"),
    )


def _monitor(spec: dict[str, Any]) -> str:
    """What the last stage monitors."""
    stages = (spec.get("plan") or {}).get("stages") or [{}]
    return str(stages[-1].get("monitor", "best"))


def _best(summary: dict[str, Any], monitor: str) -> tuple[str, float, int | None] | None:
    """Name, value and epoch of the best checkpoint."""
    best = summary.get("best") or {}
    value = number(best.get("value"))
    return None if value is None else (monitor, value, best.get("epoch"))


def _unfinished(run: RunDir) -> str:
    """The state of a run without a result; "failed" where nothing works on it any more."""
    if not run.live():
        return "failed"
    return "running" if run.rank_events(0, 0).exists() else "starting"


def _latest(run: RunDir) -> dict[str, Any]:
    """Step, epoch, loss and best checkpoint, from the end of rank 0's event file."""
    files = sorted(run.events.glob("rank-00000.*.jsonl"))
    try:
        with files[-1].open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, IndexError):  # no rank has started, or the run was pruned meanwhile
        return {}
    found: dict[str, Any] = {}
    for line in reversed(lines):
        if "step" not in found and b'"kind":"steps"' in line:
            report = (_data(line) or {}).get("report") or {}
            found.update({key: report[name] for key, name in (("step", "step"), ("epoch", "epoch"), ("loss", "epoch_loss")) if name in report})
        if "best" not in found and b'"kind":"checkpoint"' in line and (data := _data(line) or {}).get("name") == "best":
            found["best"] = data
        if "step" in found and "best" in found:
            break
    return found


def _data(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)["data"]
    except (ValueError, KeyError):  # the first line of the piece, cut, or the last, half-written
        return None
    return data if isinstance(data, dict) else None


def _differs(values: dict[str, Any]) -> dict[str, Any]:
    """The options that are not the default; as written where a later version wrote them."""
    try:
        changes = TrainConfig(**values).changes()
    except ConfigError:
        changes = values
    return {name: value for name, value in changes.items() if name not in NOT_TOLD}


def _size(run: RunDir) -> int:
    try:
        return run.bytes()
    except OSError:  # pruned meanwhile
        return 0
