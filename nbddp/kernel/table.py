"""Tables of runs and of checkpoints: sequences that display as a table.

Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.kernel import markup
from nbddp.kernel.entry import RunEntry, plain_text, read_entry
from nbddp.kernel.record import number
from nbddp.kernel.sortable import sorting
from nbddp.kernel.table_html import runs_html
from nbddp.kernel.text import bytes_text, clock_text, count_text, short_id, value_text
from nbddp.rundir import RunDir, run_dirs
from nbddp.runpruning import prune_runs
from nbddp.tabular import FONT, Table, pad
from nbddp.visible import columns, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KEEP, OLDER_THAN_DAYS = 20, 30
"""What pruning leaves alone where nothing else is said: the newest runs, and younger ones."""


@dataclass(frozen=True, slots=True)
class Order:
    """A way to sort runs: by what, and whether the first run is then the one with the least of it. A run of which `key` is None comes last."""

    key: Callable[[RunEntry], Any]
    ascends: bool = True


def _best_first(row: RunEntry) -> tuple[str, float] | None:
    """By the name of the value, then the better first."""
    if row.best is None or math.isnan(row.best[1]):
        return None
    return row.best[0], -row.best[1] if row.largest else row.best[1]


ORDERS = {
    "run": Order(lambda row: row.id),
    "state": Order(lambda row: row.state),
    "started": Order(lambda row: (row.started, row.id[-4:]) if row.started is not None else None, ascends=False),
    "note": Order(lambda row: row.note or None),
    "duration": Order(lambda row: row.duration_s, ascends=False),
    "steps": Order(lambda row: row.step, ascends=False),
    "best": Order(_best_first),
    "loss": Order(lambda row: None if row.loss is None or math.isnan(row.loss) else row.loss),
    "size": Order(lambda row: row.size, ascends=False),
}
"""By the names of the columns."""
MOST_LETTERS = 80
"""Of a note, and of the value of an option, in text."""
RIGHT = ("duration", "loss", "steps", "size")
"""Columns of numbers, in text."""


class RunTable(Table[RunEntry]):
    """Runs, newest first, or as `sorted` arranged them."""

    HEADER = ("run", "state", "best", "duration", "curve", "started", "goes on from", "loss", "steps", "size", "note", "differs by")
    EMPTY = "no runs here yet"

    def __init__(self, rows: Iterable[RunEntry], order: tuple[str, bool] | None = None) -> None:
        super().__init__(rows)
        self._order = order

    @classmethod
    def of(cls, root: Path) -> RunTable:
        """The runs of a root."""
        old: set[str] = set()
        with contextlib.suppress(OSError):  # one of them is being deleted
            old = {run.id for run in prune_runs(root, keep=KEEP, older_than_days=OLDER_THAN_DAYS)}
        return cls(read_entry(run, prunable=run.id in old) for run in reversed(run_dirs(root)))

    def __getitem__(self, index: Any) -> Any:
        """A run by its place; a slice is a table."""
        return RunTable(self._rows[index], self._order) if isinstance(index, slice) else self._rows[index]

    def sorted(self, by: str = "started", *, reverse: bool = False) -> RunTable:
        """The same runs in another order; those without a value come last in any case.

        Args:
            by: a column: best (the best first, whether it is the smallest or the largest), loss (the smallest first), duration, steps, size (the largest
                first), started (the newest first), run, state, note; or an option, such as lr (the smallest first).
            reverse: the other way round.

        Raises:
            ConfigError: for another name.
        """
        order = _order(by)
        places = _places(self._rows, order)
        known = sorted((place, index) for index, place in enumerate(places) if place is not None)
        rows = [self._rows[index] for _, index in (reversed(known) if reverse else known)]
        return RunTable([*rows, *(row for row, place in zip(self._rows, places, strict=True) if place is None)], (by, order.ascends != reverse))

    def summary(self) -> str:
        """How many runs, how much room they take, and how many could be deleted."""
        said = f"{count_text(len(self))} run{'s' if len(self) != 1 else ''} · {bytes_text(sum(row.size for row in self))}"
        old = [row for row in self if row.prunable]
        if old:
            size = bytes_text(sum(row.size for row in old))
            said += f" · {count_text(len(old))} older than {OLDER_THAN_DAYS} days ({size}): %ddp_runs --prune names them"
        return said

    def _cells(self, row: RunEntry) -> tuple[str, ...]:
        best = ""
        if row.best is not None:
            name, value, epoch = row.best
            best = f"{one_line(name, MOST_LETTERS)} {value_text(value)}" + (f" (epoch {epoch})" if epoch is not None else "")
        return (
            row.id,
            row.state,
            best,
            "" if row.duration_s is None else clock_text(row.duration_s),
            row.curve.blocks(),
            "" if row.started is None else time.strftime("%m-%d %H:%M", time.localtime(row.started)),
            "" if row.parent is None else short_id(row.parent),
            "" if row.loss is None else value_text(row.loss),
            "" if row.step is None else count_text(row.step),
            bytes_text(row.size),
            one_line(row.remark, MOST_LETTERS),
            ", ".join(f"{one_line(name, MOST_LETTERS)}={one_line(plain_text(value), MOST_LETTERS)}" for name, value in row.differs.items()),
        )

    def __repr__(self) -> str:
        """What may be long comes last, so that it pushes nothing aside; what no run has is left out."""
        if not self._rows:
            return self.EMPTY
        filled = [(name, *cells) for name, cells in zip(self.HEADER, zip(*map(self._cells, self._rows), strict=True), strict=True) if any(cells)]
        padded = [[pad(cell, max(map(columns, cells)), right=cells[0] in RIGHT) for cell in cells] for cells in filled]
        return "\n".join([*("  ".join(line).rstrip() for line in zip(*padded, strict=True)), self.summary()])

    def _repr_html_(self) -> str:
        if not self._rows:
            return super()._repr_html_()
        orders = {name: (_places(self._rows, order), order.ascends) for name, order in ORDERS.items()}
        shown = self._order if self._order is not None and self._order[0] in orders else None
        below = markup.div(markup.quiet(self.summary()), "margin-top:5px;font-size:12px")
        return markup.div(runs_html(self._rows) + below + (sorting(orders, shown) if len(self) > 1 else ""), FONT)


def _order(by: str) -> Order:
    if by in ORDERS:
        return ORDERS[by]
    if by in TrainConfig.model_fields:
        default = TrainConfig.model_fields[by].default
        return Order(lambda row: _comparable(row.differs.get(by, default)))
    message = f"sort={by}: not a column and not an option.{suggest(by, [*ORDERS, *TrainConfig.model_fields])} Columns that sort: {', '.join(ORDERS)}"
    raise ConfigError(message)


def _comparable(value: object) -> tuple[int, float, str] | None:
    """The value of an option such that any two can be compared: numbers before words."""
    if value is None:
        return None
    try:
        return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, plain_text(value))
    except OverflowError:  # a number that no option takes
        return None


def _places(rows: Sequence[RunEntry], order: Order) -> list[int | None]:
    """The place of each run in an order; equals stay as they are, None is for one that it says nothing about."""
    keys = [order.key(row) for row in rows]
    known = [index for index, key in enumerate(keys) if key is not None]
    known.sort(key=lambda index: keys[index], reverse=not order.ascends)
    places: list[int | None] = [None] * len(rows)
    for place, index in enumerate(known):
        places[index] = place
    return places


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint file; `value` is the monitored value, None where there was none; `bytes` its size."""

    name: str
    path: Path
    epoch: int
    step: int
    value: float | None
    bytes: int


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
            with contextlib.suppress(OSError):  # pruned, perhaps just now
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
