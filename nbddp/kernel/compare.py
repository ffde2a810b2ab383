"""Runs side by side: their loss curves in one figure, and below it the options that differ, best values and durations.

Runs in the kernel; reads run directories, so that runs of other kernels, live or ended, are compared alike. Imports no torch; front ends find
`_repr_mimebundle_`.
"""

from __future__ import annotations

import base64
from collections import Counter
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.kernel import markup
from nbddp.kernel.chosen import chosen
from nbddp.kernel.compare_figure import LONGEST, Look, comparison_figure, comparison_png, cut
from nbddp.kernel.entry import NOT_TOLD, RunEntry, plain_text, read_entry
from nbddp.kernel.flow_table import Column, flow_table, options_html
from nbddp.kernel.losses import AXES, LOSS, STEP, Losses
from nbddp.kernel.table import MOST_LETTERS, RunTable
from nbddp.kernel.table_html import best_html
from nbddp.kernel.text import clock_text, count_text, short_id, value_text
from nbddp.runroot import run_root
from nbddp.tabular import FONT, text_table
from nbddp.visible import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from nbddp.kernel.losses import Axis

PNG_BYTES = 60_000
"""How large the picture may be, which is in the notebook twice: for front ends that show HTML and for those that show pictures alone."""

RESULTS = {"best": 122, "lowest val_loss": 92, "loss at the end": 92, "steps": 56, "duration": 66}
"""With their widths in px: with one or two options that differ, all of them stand in a line in most notebooks."""
FEW_OPTIONS = 3
"""As many options that differ have columns of their own; of more, those that are not the default share one."""
DEFAULTS = "all at their default"


class Comparison:
    """Runs that were compared, as they were then; displays as a figure and a table.

    Attributes:
        runs: the runs, as a table, in the order in which they were given.
        options: by name the options that differ, with the value of each run; None is the default of options that have no other word for it.
        left_out: ids of the runs that have no loss to draw, or are unreadable, and why.
        axis: what the losses are drawn over: step, epoch or time.
    """

    def __init__(self, runs: Sequence[RunEntry], curves: Sequence[Losses], axis: Axis, left_out: Mapping[str, str]) -> None:
        self.runs, self._curves, self.axis = RunTable(runs), tuple(curves), axis
        self.options = _differing(runs)
        self.left_out = dict(left_out)
        self._labels = _labels([run.id for run in runs], self.options)

    @cached_property
    def figure(self) -> Figure:
        """The loss curves as a matplotlib Figure: to change, and to save with ``figure.savefig``."""
        return comparison_figure(self._curves, self._labels, self.axis)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        rows = [(short_id(run.id), *(one_line(cell, MOST_LETTERS) for cell in cells)) for run, cells in zip(self.runs, self._cells(), strict=True)]
        return "\n".join([text_table(("run", *self._header()), rows, left=2 + len(self.options)), *self._remarks()])

    def _repr_mimebundle_(self, **_kwargs: object) -> dict[str, Any]:
        png = base64.b64encode(comparison_png(self.figure, PNG_BYTES)).decode("ascii")
        return {"text/html": self._html(png), "image/png": png, "text/plain": repr(self)}

    def _html(self, png: str) -> str:
        picture = f'<img alt="{escape(self._description())}" src="data:image/png;base64,{png}" style="width:100%;max-width:840px;height:auto;margin:4px 0">'
        several = len(self.options) > FEW_OPTIONS
        options = [] if several else [Column((name,), 78) for name in self.options]
        results = [Column((name,), width, right=True) for name, width in RESULTS.items()]
        columns = [Column(("run",), 170), Column(("state",), 92), *options, *results]
        if several:
            columns.append(Column(("differs by",), 260, grows=True))
        rows = []
        for index, (run, cells) in enumerate(zip(self.runs, self._cells(), strict=True)):
            name = Look.of(index).swatch() + markup.tag("span", escape(short_id(run.id)), "font-weight:600", title=run.id)
            state = markup.tag("span", markup.badge(run.state), "white-space:nowrap")
            told, others = map(escape, cells[1 : 1 + len(self.options)]), map(escape, cells[2 + len(self.options) :])
            shown = (best_html(run), *others)
            own = [(name, _option_text(values[index])) for name, values in self.options.items() if not _is_default(name, values[index])]
            rows.append((name, state, *shown, options_html(own) or markup.quiet(DEFAULTS)) if several else (name, state, *told, *shown))
        table = flow_table(columns, rows)
        below = "".join(markup.div(markup.quiet(line), "margin-top:3px;font-size:12px;overflow-wrap:anywhere") for line in self._remarks())
        return markup.div(picture + table + below, FONT)

    def _header(self) -> tuple[str, ...]:
        return ("state", *self.options, *RESULTS)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """The cells of each run, after its name."""
        for index, (run, curve) in enumerate(zip(self.runs, self._curves, strict=True)):
            best = "" if run.best is None else f"{run.best[0]} {value_text(run.best[1])}" + (f" (epoch {run.best[2]})" if run.best[2] is not None else "")
            lowest = curve.val_loss[np.isfinite(curve.val_loss)]
            yield (
                run.state,
                *(_option_text(values[index]) for values in self.options.values()),
                best,
                value_text(float(lowest.min())) if len(lowest) else "",
                "" if run.loss is None else value_text(run.loss),
                "" if run.step is None else count_text(run.step),
                "" if run.duration_s is None else clock_text(run.duration_s),
            )

    def _remarks(self) -> list[str]:
        said = [] if self.options else ["the options of these runs are the same"]
        for run, curve in zip(self.runs, self._curves, strict=True):
            if curve.missing is not None:
                said.append(f"{run.id} begins later: the directory of {curve.missing}, from which it goes on, is gone")
            elif run.parent is not None:
                said.append(f"{run.id} goes on from {short_id(run.parent)}, whose steps come first")
        alike: dict[bytes, list[str]] = {}
        for run, curve in zip(self.runs, self._curves, strict=True):
            alike.setdefault(curve.train[[STEP, LOSS]].tobytes(), []).append(short_id(run.id))
        said += [
            f"{', '.join(names[:-1])} and {names[-1]} have the same training losses: one line covers the other" for names in alike.values() if len(names) > 1
        ]
        return said + [f"left out: {run}, {why}" for run, why in self.left_out.items()]

    def _description(self) -> str:
        """The figure in words."""
        parts = []
        for label, curve in zip(self._labels, self._curves, strict=True):
            finite = curve.loss[np.isfinite(curve.loss)]
            parts.append(f"{label}: {value_text(float(finite[0]))} to {value_text(float(finite[-1]))}")
        kinds = "Training and validation loss" if any(len(curve.val_loss) for curve in self._curves) else "Training loss"
        more = f"; and {len(parts) - 10} more" if len(parts) > 10 else ""
        return f"{kinds} of {len(parts)} runs over {self.axis}; training loss of {'; '.join(parts[:10])}{more}"


def compare(*runs: object, x: Axis = "step", root: str | Path | None = None) -> Comparison:
    """Compare two or more runs, also while they go on: their loss curves in one figure, and what differs between them in a table.

    Args:
        runs: runs, their ids (or a part of one) or directories, tables of runs such as ``nbddp.runs()[:5]``, or lists of these.
        x: what the losses are drawn over: ``"step"``, ``"epoch"`` or ``"time"`` since the request. The runs that one goes on from come first.
        root: where ids are looked for; default: this kernel's folder of runs.

    Returns:
        a `Comparison`, which a notebook displays; runs without a loss, and those of a table that are unreadable, are left out of it, and named.

    Raises:
        ConfigError: for what names no run, or one that is unreadable, and where fewer than two different runs have a loss.
    """
    if x not in AXES:
        message = f"x={x!r}: must be {', '.join(AXES[:-1])} or {AXES[-1]}.{suggest(str(x), AXES)}"
        raise ConfigError(message)
    where = run_root(root)
    found = chosen(runs, where, by="nbddp.compare")
    if len(found) < 2:
        given = f"only {next(iter(found.values())).id}" if found else "no run"
        message = f"nbddp.compare takes two different runs or more, and was given {given}: name runs, ids or directories, or give it nbddp.runs()"
        raise ConfigError(message)
    named = chosen([item for item in runs if not isinstance(item, RunTable)], where, by="nbddp.compare")
    for run in named.values():
        run.opened_spec()
    entries, curves, left_out = [], [], {}
    for run in found.values():
        entry = read_entry(run)
        if entry.damage is not None or not run.path.is_dir():  # one of a table
            left_out[run.id] = f"unreadable: {entry.damage}" if entry.damage is not None else "whose directory is gone"
            continue
        curve = Losses.of(run)
        if np.isfinite(curve.loss).any():
            entries.append(entry)
            curves.append(curve.thinned())  # of fifty long runs there would else be gigabytes
        else:
            left_out[run.id] = _why(entry, curve)
    if len(entries) < 2:
        message = f"of {len(found)} runs {len(entries) or 'none'} has a loss to compare: {'; '.join(f'{run}, {why}' for run, why in left_out.items())}"
        raise ConfigError(message)
    return Comparison(entries, curves, x, left_out)


def _why(entry: RunEntry, curve: Losses) -> str:
    """Why a run can't be drawn."""
    if len(curve.loss):
        return "with no loss that is finite"
    return {"starting": "which is starting", "running": "which has no step yet"}.get(entry.state, f"{entry.state} before its first step")


def _differing(runs: Sequence[RunEntry]) -> dict[str, tuple[Any, ...]]:
    """The options that are not the same in all runs, in the order in which they are defined; names of a later version come last."""
    names = dict.fromkeys([*TrainConfig.model_fields, *(name for run in runs for name in run.differs)])
    found = {}
    for name in names:
        if name in NOT_TOLD:
            continue
        default = TrainConfig.model_fields[name].default if name in TrainConfig.model_fields else None
        values = tuple(run.differs.get(name, default) for run in runs)
        if len({plain_text(value) for value in values}) > 1:
            found[name] = values
    return found


def _option_text(value: object) -> str:
    return "default" if value is None else plain_text(value)


def _labels(ids: Sequence[str], options: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """What each run is called in the figure: the options that differ, and its name where they do not tell it from the others.

    Those come first that differ most. Where all of them have no room, those that are the default are left out, and then the end is cut off.
    """
    most_first = sorted(options.items(), key=lambda item: -len({plain_text(value) for value in item[1]}))
    every = [_told(most_first, index) for index in range(len(ids))]
    if max(map(len, every)) > LONGEST:
        every = [_told([(name, values) for name, values in most_first if not _is_default(name, values[index])], index) for index in range(len(ids))]
        every = [text or DEFAULTS for text in every]
    told = [cut(text) for text in every]
    often = Counter(told)
    return [short_id(run) if not text else cut(f"{short_id(run)}: {text}") if often[text] > 1 else text for run, text in zip(ids, told, strict=True)]


def _told(options: Sequence[tuple[str, tuple[Any, ...]]], index: int) -> str:
    return ", ".join(f"{name}={_option_text(values[index])}" for name, values in options)


def _is_default(name: str, value: object) -> bool:
    return value is None or (name in TrainConfig.model_fields and plain_text(value) == plain_text(TrainConfig.model_fields[name].default))
