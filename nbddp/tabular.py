"""Sequences of rows that display as a table, in a terminal and in a notebook. Imports neither torch nor Jupyter.

Styles are inline, with JupyterLab's colours where they are known: what is shown survives a front end that strips style sheets, and fits both themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Generic, TypeVar, overload

from nbddp.visible import columns

FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px;line-height:1.45;color:var(--jp-ui-font-color1,inherit)"
QUIET = "color:var(--jp-ui-font-color2,inherit)"
NUMBERS = "font-variant-numeric:tabular-nums"

Row = TypeVar("Row")


class Table(Sequence[Row], Generic[Row]):
    """A sequence of entries and how each is shown; the first `LEFT` columns are text, the others numbers."""

    HEADER: tuple[str, ...] = ()
    LEFT = 1
    EMPTY = ""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return type(self)(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def _cells(self, row: Row) -> tuple[str, ...]:
        raise NotImplementedError

    def _html_cells(self, row: Row) -> tuple[str, ...]:
        return tuple(escape(cell) for cell in self._cells(row))

    def __repr__(self) -> str:
        return text_table(self.HEADER, [self._cells(row) for row in self._rows], left=self.LEFT) if self._rows else self.EMPTY

    def _repr_html_(self) -> str:
        if not self._rows:
            return f'<div style="{FONT}"><span style="{QUIET}">{escape(self.EMPTY)}</span></div>'
        return f'<div style="{FONT}">{html_table(self.HEADER, [self._html_cells(row) for row in self._rows], left=self.LEFT)}</div>'


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table in columns of equal width; the first `left` columns are text, the others numbers."""
    lines = [header, *rows]
    widths = [max(map(columns, column)) for column in zip(*lines, strict=True)]
    padded = ([pad(cell, width, right=n >= left) for n, (cell, width) in enumerate(zip(line, widths, strict=True))] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def pad(cell: str, width: int, *, right: bool) -> str:
    """A cell that takes so many columns of a terminal."""
    blank = " " * (width - columns(cell))
    return blank + cell if right else cell + blank


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, wrap: bool = False) -> str:
    """A table of cells that are HTML already; the first `left` columns are text, the others numbers; `wrap` lets the last column break."""
    cell = "padding:2px 14px 2px 0;border:0;background:none"

    def line(cells: Sequence[str], name: str, extra: str = "", last: str = "white-space:nowrap") -> str:
        breaks = ["white-space:nowrap"] * (len(cells) - 1) + [last]
        styles = [";".join(filter(None, (f"text-align:{'left' if index < left else 'right'}", cell, extra, rule))) for index, rule in enumerate(breaks)]
        return '<tr style="background:none">' + "".join(f'<{name} style="{s}">{c}</{name.split()[0]}>' for c, s in zip(cells, styles, strict=True)) + "</tr>"

    head = line([f'<span style="{QUIET}">{escape(name)}</span>' for name in header], 'th scope="col"', "font-weight:400;font-size:11px") if header else ""
    last = "overflow-wrap:anywhere" if wrap else "white-space:nowrap"
    body = "".join(line(row, "td", "vertical-align:top", last) for row in rows)
    style = f"border-collapse:collapse;border:0;margin:0;font-size:12px;{NUMBERS}"
    return f'<div style="overflow-x:auto"><table style="{style}"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
