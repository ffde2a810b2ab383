"""The table of runs as HTML: what matters most comes first, and what is long has room.

Runs in the kernel.
"""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel import markup
from nbddp.kernel.entry import plain_text
from nbddp.kernel.flow_table import Column, flow_table, options_html, two_lines
from nbddp.kernel.text import bytes_text, clock_text, count_text, short_id, value_text
from nbddp.visible import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbddp.kernel.entry import RunEntry


MOST_LETTERS = 1_000
"""Of a note, and of the value of an option."""


def _run(row: RunEntry) -> str:
    parts = [] if row.started is None else [time.strftime("%m-%d %H:%M", time.localtime(row.started))]
    parts += [] if row.parent is None else [f"from {short_id(row.parent).rpartition('-')[2]}"]
    return two_lines(markup.tag("span", escape(short_id(row.id)), "font-weight:600", title=row.id), " · ".join(parts))


def _state(row: RunEntry) -> str:
    return two_lines(markup.tag("span", markup.badge(row.state), "white-space:nowrap"), bytes_text(row.size))


def best_html(row: RunEntry) -> str:
    """The best value of a run, and below it of what and when."""
    if row.best is None:
        return ""
    name, value, epoch = row.best
    return two_lines(escape(value_text(value)), one_line(name, MOST_LETTERS) + (f", epoch {epoch}" if epoch is not None else ""))


def _duration(row: RunEntry) -> str:
    first = "" if row.duration_s is None else clock_text(row.duration_s)
    return two_lines(escape(first), "" if row.step is None else f"{count_text(row.step)} step{'s' if row.step != 1 else ''}")


def _loss(row: RunEntry) -> str:
    return two_lines(markup.div(row.curve.image(), "height:20px;line-height:20px") if row.curve else "", "" if row.loss is None else value_text(row.loss))


def _differs(row: RunEntry) -> str:
    return options_html((one_line(name, MOST_LETTERS), one_line(plain_text(value), MOST_LETTERS)) for name, value in row.differs.items())


def _note(row: RunEntry) -> str:
    return escape(one_line(row.remark, MOST_LETTERS))


_COLUMNS: tuple[tuple[Column, Callable[[RunEntry], str]], ...] = (
    (Column(("run", "started"), 132), _run),
    (Column(("state", "size"), 96), _state),
    (Column(("best",), 122, right=True), best_html),
    (Column(("duration", "steps"), 102, right=True), _duration),
    (Column(("loss",), 100), _loss),
    (Column(("differs by",), 210, grows=True), _differs),
)
_WITH_NOTES: tuple[tuple[Column, Callable[[RunEntry], str]], ...] = (
    *_COLUMNS[:-1],
    (Column(("differs by",), 340, grows=True), _differs),
    (Column(("note",), 140, grows=True), _note),
)
"""Where runs have notes the two last columns go to a line of their own together, unless all of them have room."""


def runs_html(rows: Sequence[RunEntry]) -> str:
    """The table."""
    columns = _WITH_NOTES if any(row.remark for row in rows) else _COLUMNS
    return flow_table([column for column, _ in columns], [[shown(row) for _, shown in columns] for row in rows])
