"""One run of a list: what its small files say, and of a live run the end of rank 0's events.

Read in the kernel, so that a hundred runs are listed at once. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.events import parse
from nbddp.kernel.losses import attempts
from nbddp.kernel.record import duration_s, number, started
from nbddp.kernel.sketch import Sketch
from nbddp.visible import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from nbddp.rundir import RunDir

TAIL_BYTES = 1 << 17
NOT_TOLD = ("run_root", "name", "on_kernel_exit", "resume")
"""Options that say nothing about how a run differs from another."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of a table.

    Attributes:
        id: name of the run directory.
        state: starting, running, finished, stopped, failed, or unreadable.
        started: unix time of the request.
        duration_s: seconds from the request to the end, or until now.
        step: optimizer steps so far.
        best: name, value and epoch of the best checkpoint.
        loss: mean over the last epoch.
        differs: the options that are not the default.
        size: of the run's own files, in bytes.
        note: what was noted with the run.
        dir: the run directory.
        parent: id of the run that it goes on from.
        curve: the training loss in a few points.
        largest: whether the best value is the largest.
        prunable: whether `%ddp_runs --prune` would name it.
        damage: why it is unreadable.
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
    curve: Sketch = field(default_factory=Sketch, repr=False)
    largest: bool = False
    prunable: bool = False
    damage: str | None = None

    @property
    def remark(self) -> str:
        """Why it is unreadable, else its note, in one line."""
        return one_line(self.damage or self.note or "")


def plain_text(value: object) -> str:
    """The value of an option as it would be written, in one line."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return one_line(",".join(map(str, value)))
    return one_line(str(value))


def read_entry(run: RunDir, *, prunable: bool = False) -> RunEntry:
    """Read one run's row from its small files."""
    spec, result, damage = run.read_spec() or {}, run.read_result(), run.damage
    if damage is not None:
        state, summary, until = "unreadable", _latest(run), None
    elif result is None:
        state, summary = _unfinished(run), _latest(run)
        until = time.time() if state != "failed" else None
    else:
        state, until = str(result["state"]), result["time"]
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
        curve=Sketch.of(run),
        largest=(spec.get("config") or {}).get("mode") == "max",
        prunable=prunable,
        damage=damage,
    )


def _monitor(spec: dict[str, Any]) -> str:
    """What the last stage monitors."""
    stages = spec.get("plan", {}).get("stages") or [{}]
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
    try:
        with attempts(run)[-1].open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, IndexError):  # no rank has started, or the run was pruned meanwhile
        return {}
    found: dict[str, Any] = {}
    for line in reversed(lines):
        if b'"kind":"steps"' not in line and b'"kind":"checkpoint"' not in line:
            continue
        if (event := parse(line)) is None:  # the first line of the piece, cut, or the last, half-written
            continue
        if "step" not in found and event.kind == "steps":
            report = event.data.get("report", {})
            found.update({key: report[name] for key, name in (("step", "step"), ("epoch", "epoch"), ("loss", "epoch_loss")) if name in report})
        elif "best" not in found and event.kind == "checkpoint" and event.data["name"] == "best":
            found["best"] = event.data
        if "step" in found and "best" in found:
            break
    return found


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
