"""History: every step and every epoch of a run as numpy arrays, read from its event files and those of the runs that it goes on from.

Runs in the kernel, when the user asks; reads only what was written since it was asked last. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.events import EventReader
from nbddp.state import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from nbddp.events import Event

    Array = NDArray[Any]

INTEGERS = ("step", "epoch", "stage", "samples", "slowest_rank")
STEP_COLUMNS = ("step", "epoch", "stage", "loss", "lr", "samples", *(f"{phase}_s" for phase in PHASES), "wait_s", "slowest_rank")
EPOCH_COLUMNS = ("epoch", "step", "stage", "loss", "val_loss", "duration_s")


class Table:
    """Columns of equal length that grow by appending: each lives in a buffer that doubles when it is full."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._columns: dict[str, Array] = {name: self._blank(name, 0) for name in columns}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @staticmethod
    def _blank(name: str, size: int) -> Array:
        return np.zeros(size, np.int64) if name in INTEGERS else np.full(size, np.nan)

    def append(self, rows: int, columns: Mapping[str, Any]) -> None:
        """Append rows; a column that is new is nan before them, one that is not given is nan (0 for integers) in them."""
        end = self._rows + rows
        for name in columns:
            if name not in self._columns:
                self._columns[name] = self._blank(name, max(end, self._capacity()))
        if end > self._capacity():
            size = max(1024, 2 * end)
            for name, old in self._columns.items():
                self._columns[name] = self._blank(name, size)
                self._columns[name][: self._rows] = old[: self._rows]
        for name, values in columns.items():
            buffer = self._columns[name]
            buffer[self._rows : end] = np.asarray(values, buffer.dtype)  # "nan" and "inf" arrive as words, which this reads
        self._rows = end

    def _capacity(self) -> int:
        return min((len(column) for column in self._columns.values()), default=0)

    def set(self, row: int, columns: Mapping[str, float]) -> None:
        """Fill cells of one row."""
        for name, value in columns.items():
            if name not in self._columns:
                self._columns[name] = self._blank(name, self._capacity())
            self._columns[name][row] = float(value)

    def arrays(self, rows: int | None = None) -> dict[str, Array]:
        """The first `rows` rows: read-only views, which later appends don't change."""
        count = self._rows if rows is None else min(rows, self._rows)
        views = {name: column[:count] for name, column in self._columns.items()}
        for view in views.values():
            view.flags.writeable = False
        return views


class _Attempt:
    """What one attempt of the process group recorded."""

    def __init__(self) -> None:
        self.steps = Table(STEP_COLUMNS)
        self.epochs = Table(EPOCH_COLUMNS)
        self.partial: set[int] = set()
        """Steps at which an epoch was left before its end."""

    def fold(self, event: Event) -> None:
        data = event.data
        if event.kind == "steps" and data.get("step"):
            columns = {name: data[name] for name in STEP_COLUMNS if name in data}
            self.steps.append(len(data["step"]), {**data.get("scalars", {}), **columns})
        elif event.kind == "epoch":
            known = {name: data[name] for name in EPOCH_COLUMNS if name in data}
            self.epochs.append(1, {name: [value] for name, value in {**data.get("values", {}), **known}.items()})
            if not data.get("whole", True):
                self.partial.add(int(data["step"]))
        elif event.kind in ("validation", "reported") and len(self.epochs):
            last = self.epochs.arrays()["step"][-1]
            if last == data["step"]:
                self.epochs.set(len(self.epochs) - 1, data["values"])

    def first_step(self) -> int | None:
        steps = self.steps.arrays()["step"]
        return int(steps[0]) if len(steps) else None


class History:
    """The arrays of a run, kept up with its event files.

    `steps` and `epochs` are dicts of read-only arrays of equal length, int64 where a column counts and float64 elsewhere, nan where nothing was
    recorded. Where the process group was restarted, the later attempt's steps replace those that it repeated. The steps of the runs that this one goes
    on from come first, up to the checkpoint; an epoch that was left in its middle there is the one that is finished here.

    Args:
        events: the folder of the run's event files.
        parents: folder and last step of each run that it goes on from, the oldest first; they have ended.
    """

    def __init__(self, events: Path, parents: Iterable[tuple[Path, int]] = ()) -> None:
        self._reader = EventReader(events, "rank-00000.*.jsonl")
        self._attempts: dict[int, _Attempt] = {}
        self._parents = [(History(path), until) for path, until in parents]
        self._lock = threading.Lock()

    @property
    def steps(self) -> dict[str, Array]:
        """One entry per optimizer step: the columns of `STEP_COLUMNS` and the step's own scalars."""
        with self._lock:
            self._update()
            own = _joined([attempt.steps for attempt in self._in_order()], self._cuts())
        return _stacked([*(_rows(parent.steps, parent.steps["step"] <= until) for parent, until in self._parents), own])

    @property
    def epochs(self) -> dict[str, Array]:
        """One entry per epoch: the columns of `EPOCH_COLUMNS`, and what else was recorded of it."""
        with self._lock:
            self._update()
            own = _joined([attempt.epochs for attempt in self._in_order()], self._cuts())
            begun = _joined([attempt.steps for attempt in self._in_order()], self._cuts())["epoch"][:1]
        parts = [own]
        for parent, until in reversed(self._parents):
            earlier = parent.epochs
            again = np.isin(earlier["epoch"], np.concatenate([part["epoch"] for part in parts]))
            left = np.isin(earlier["step"], list(parent._partial())) & np.isin(earlier["epoch"], begun)
            parts.insert(0, _rows(earlier, (earlier["step"] <= until) & ~again & ~left))
            begun = parent.steps["epoch"][:1]
        return _stacked(parts)

    def _partial(self) -> set[int]:
        return set().union(*(attempt.partial for attempt in self._attempts.values()))

    def _update(self) -> None:
        while events := self._reader.poll():
            for event in events:
                if event.rank == 0:
                    self._attempts.setdefault(event.attempt, _Attempt()).fold(event)

    def _in_order(self) -> list[_Attempt]:
        return [self._attempts[number] for number in sorted(self._attempts)] or [_Attempt()]

    def _cuts(self) -> list[int | None]:
        """For each attempt the step that a later one went on from."""
        cuts: list[int | None] = []
        cut: int | None = None
        for attempt in reversed(self._in_order()):
            cuts.append(cut)
            first = attempt.first_step()
            if first is not None:
                cut = first if cut is None else min(cut, first)
        return cuts[::-1]


def _joined(tables: list[Table], cuts: list[int | None]) -> dict[str, Array]:
    def rows(table: Table, cut: int | None) -> int:
        return len(table) if cut is None else int(np.searchsorted(table.arrays()["step"], cut))

    return _stacked([table.arrays(rows(table, cut)) for table, cut in zip(tables, cuts, strict=True)])


def _rows(arrays: dict[str, Array], keep: NDArray[np.bool_]) -> dict[str, Array]:
    return {name: column[keep] for name, column in arrays.items()}


def _stacked(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Parts one after the other; the names of all of them, also where one has no rows."""
    if len(parts) == 1:
        return parts[0]
    whole = Table([])
    for part in parts:
        if rows := len(part["step"]):
            whole.append(rows, part)
    names: dict[str, Any] = {name: None for part in reversed(parts) for name in part}
    return {**Table(names).arrays(), **whole.arrays()}
