"""A table as HTML whose rows wrap where it is narrow, all of them at the same columns: nothing is cut off, and there is no width that needs scrolling.

It is a table to whoever reads it aloud, or where styles are stripped. Styles are inline, and colours are JupyterLab's where there are any. Runs in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel import markup
from nbddp.tabular import NUMBERS, QUIET

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOGETHER = 32
"""Letters of an option and its value that stay on one line."""


@dataclass(frozen=True, slots=True)
class Column:
    """What stands below each other.

    Attributes:
        names: what the column shows; a second name is that of the smaller line below.
        width: in px, of all rows alike.
        grows: it takes what room is left in its line.
        right: numbers, which end below each other.
    """

    names: tuple[str, ...]
    width: int
    grows: bool = False
    right: bool = False

    def style(self) -> str:
        grow = f"flex:1 1 {self.width}px;min-width:0" if self.grows else f"flex:0 0 {self.width}px"
        return f"display:block;box-sizing:border-box;{grow};max-width:100%;text-align:{'right' if self.right else 'left'}"


def flow_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already. The names in its head bear `data-order`."""
    heads = ["".join(_heading(index, name) for index, name in enumerate(column.names)) for column in columns]
    head = _row("th", columns, heads, "padding:0 14px 2px 0;font-weight:400;font-size:11px")
    body = "".join(_row("td", columns, row, "padding:4px 14px 4px 0") for row in rows)
    table = "display:block;width:100%;border:0;margin:0;font-size:12px;table-layout:auto"
    parts = (markup.tag(name, rows, "display:block", role="rowgroup") for name, rows in (("thead", head), ("tbody", body)))
    return markup.tag("table", "".join(parts), table, role="table")


def two_lines(first: str, second: str) -> str:
    """A line, HTML already, and a smaller one below, which is text."""
    return first + (markup.div(escape(second), f"{QUIET};font-size:11px") if second else "")


def options_html(options: Iterable[tuple[str, str]]) -> str:
    """Options and their values: each pair stays together, unless it is long."""
    return " ".join(
        markup.tag(
            "span",
            f"{markup.quiet(f'{name}=')}{escape(value)}",
            "margin-right:9px;" + ("white-space:nowrap" if len(name) + len(value) < TOGETHER else "overflow-wrap:anywhere"),
        )
        for name, value in options
    )


def _row(element: str, columns: Sequence[Column], cells: Sequence[str], style: str) -> str:
    role = {"scope": "col", "role": "columnheader"} if element == "th" else {"role": "cell"}
    plain = f"border:0;background:none;vertical-align:top;white-space:normal;overflow-wrap:anywhere;line-height:1.4;{NUMBERS}"
    shown = (markup.tag(element, cell, f"{column.style()};{plain};{style}", **role) for column, cell in zip(columns, cells, strict=True))
    line = f"display:flex;flex-wrap:wrap;align-items:flex-start;padding:0;background:none;border:0;border-bottom:1px solid {markup.LINE}"
    return markup.tag("tr", "".join(shown), line, role="row")


def _heading(index: int, name: str) -> str:
    return ("" if index == 0 else markup.quiet(" · ")) + markup.tag("span", escape(name), QUIET, **{"data-order": name})
