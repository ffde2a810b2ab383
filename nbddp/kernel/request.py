"""What a cell, or a call of `nbddp.train`, asks for: names resolved to objects, nothing checked yet.

Made by the magic and by the Python entry, consumed by `nbddp.kernel.train`. Runs in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbddp.bundle import CellSource

HOOKS = ("loss", "training_step", "validation_step", "optimizer", "scheduler", "collate_fn", "sampler", "metrics", "stages", "on_epoch_end")
"""Names that have a meaning in the body of a cell and as keywords of `nbddp.train`."""


@dataclass(frozen=True, slots=True)
class Named:
    """An object, and how the user wrote it."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Cell:
    """The cell that asked: its execution count, its raw text with the magic's line, and the file name of its code."""

    number: int | None
    source: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """One training run as asked for.

    `options` are names and values of TrainConfig (synonyms allowed), `requested` is the unix time at which the cell started, `cells` maps the file
    names of the notebook's code to its cells, `main` is the notebook's `__main__` (None in a script). `notes` are lines that a settings file gave rise to.
    """

    model: Named
    data: Named
    val: Named | None
    options: Mapping[str, object]
    hooks: Mapping[str, object]
    requested: float
    note: str | None = None
    background: bool = False
    cell: Cell | None = None
    main: ModuleType | None = None
    cells: Mapping[str, CellSource] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Bind = Callable[[object], None]
"""Called with the Run as soon as it exists, to bind it to a name of the notebook."""
