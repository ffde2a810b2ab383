"""Sources of notebook cells, which tracebacks and `inspect.getsource` need on the ranks.

Used in the kernel (collected into the bundle) and in the ranks (put into linecache). Standard library only.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class CellSource:
    """A notebook cell: its execution count and its raw lines, numbered as in the code objects compiled from it."""

    cell: int | None
    source: str


def install_sources(cells: Mapping[str, CellSource]) -> None:
    """Put the sources into linecache under the file names of their code objects."""
    for filename, cell in cells.items():
        # Without a modification time, linecache.checkcache() leaves an entry alone: there is no file to compare it with.
        linecache.cache[filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), filename)
