"""The loss curves of several runs in one picture: training on the left, validation on the right.

Runs in the kernel. matplotlib through its object API and the Agg canvas, imported where it is drawn; pyplot never is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.kernel.drawing import GREY, LOG_RANGE, TEXT, leave_out_first_spikes, one_at_a_time, plain, png_of, small_png_of, smooth, whole_ticks
from nbddp.kernel.losses import AXES, TIME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nbddp.kernel.losses import Axis, Floats, Losses

COLOURS = ("#4285f4", "#f28b30", "#2e9d5b", "#dc4638", "#9166d6", "#1aa3a8", "#e06fae", "#9c8412", "#7d8590", "#a8653a")
"""Readable on white and on black alike."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.3), (6, 1.5, 1, 1.5), (2, 3), (3, 1, 1, 1, 1, 1))
"""With the colours, which a reader may not tell apart, 60 lines of a look of their own."""
WIDTH_IN, HEIGHT_IN, LINE_IN = 8.4, 2.9, 0.165
DPI = 150
LETTER_IN = 0.072
TICK_IN, SHORT = 0.078, 5
"""Width of a letter of a number at the vertical axis, and letters that it has room for anyway."""
LONGEST = 64
"""Letters of a label."""
FAINT = 6
"""Up to this many runs the losses as they were stand behind the smoothed ones."""
_UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"))


@dataclass(frozen=True, slots=True)
class Look:
    """How the lines of a run look."""

    colour: str
    dashes: tuple[float, ...]

    @classmethod
    def of(cls, index: int) -> Look:
        """The look of a run by its place."""
        return cls(COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)])

    def line(self, width: float = 1.5) -> dict[str, Any]:
        """What matplotlib calls it."""
        return {"color": self.colour, "linewidth": width, "linestyle": "-", "dashes": self.dashes or (None, None)}

    def swatch(self) -> str:
        """A piece of the line as an img element, to be put beside a name."""
        dashes = f" stroke-dasharray='{' '.join(f'{2 * part:g}' for part in self.dashes)}'" if self.dashes else ""
        line = f"<path d='M0 6H28' stroke='{self.colour}' stroke-width='3'{dashes}/>"
        svg = f"<svg xmlns='http://www.w3.org/2000/svg' width='28' height='12'>{line}</svg>".replace("<", "%3C").replace(">", "%3E").replace("#", "%23")
        style = "display:inline-block;margin:0 8px 0 0;vertical-align:middle;max-width:none"
        return f'<img alt="" width="28" height="12" style="{style}" src="data:image/svg+xml,{svg}">'


def cut(label: str) -> str:
    """A label that has room in the legend."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def comparison_png(figure: Figure, limit: int) -> bytes:
    """Draw a figure as PNG, in the highest resolution at which it has no more than `limit` bytes."""
    with one_at_a_time:
        dpi = DPI
        while True:
            png = small_png_of(figure, dpi)
            if len(png) <= limit or dpi <= 60:
                return png
            dpi = int(dpi * 0.8)


def comparison_figure(curves: Sequence[Losses], labels: Sequence[str], axis: Axis) -> Figure:
    """Return a matplotlib Figure, which a notebook displays; it does not belong to pyplot.

    Args:
        curves: the losses of each run, as many points as are to be drawn.
        labels: what each is called in the legend.
        axis: what the losses are drawn over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class ComparisonFigure(Figure):
        def _repr_png_(self) -> bytes:
            with one_at_a_time:
                return png_of(self, int(self.dpi))

    columns = max(1, min(len(labels), 5, int((WIDTH_IN - 0.5) / (LETTER_IN * max(map(len, labels)) + 0.6))))
    below = LINE_IN * math.ceil(len(labels) / columns) + 0.5
    height = HEIGHT_IN + below
    figure = ComparisonFigure(figsize=(WIDTH_IN, height), dpi=DPI, layout=None)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0)
    panels = 2 if any(len(curve.val_loss) for curve in curves) else 1
    with one_at_a_time:
        space = {"left": 0.075, "right": 0.985, "top": 1 - 0.28 / height, "bottom": below / height, "wspace": 0.12}
        axes = figure.subplots(1, panels, sharex=True, squeeze=False, gridspec_kw=space)[0]
        row = AXES.index(axis)
        scale, unit = _unit(curves) if axis == "time" else (1.0, "")
        for panel, title in zip(axes, ("loss", "val_loss"), strict=False):
            _panel(panel, title, f"{axis} in {unit}" if unit else axis)
        for index, curve in enumerate(curves):
            _train(axes[0], curve.train[row] / scale, curve.loss, Look.of(index), faint=len(curves) <= FAINT)
            if panels == 2:
                _validation(axes[1], curve.val[row] / scale, curve.val_loss, Look.of(index))
        _scale(axes[0], (curve.loss for curve in curves))
        if panels == 2:
            _scale(axes[1], (curve.val_loss for curve in curves))
        longest = max(whole_ticks(panel) for panel in axes)
        if longest > SHORT:
            room = (longest - SHORT) * TICK_IN / WIDTH_IN
            figure.subplots_adjust(left=space["left"] + room, wspace=space["wspace"] + 2.4 * room)
        _legend(figure, [Look.of(index) for index in range(len(labels))], labels, columns, height)
    return figure


def _unit(curves: Sequence[Losses]) -> tuple[float, str]:
    """Seconds, minutes or hours, by the longest run."""
    longest = max(float(curve.train[TIME, -1]) for curve in curves)
    return next(unit for unit in reversed(_UNITS) if longest >= 2 * unit[0] or unit[1] == "s")


def _train(axes: Axes, x: Floats, y: Floats, look: Look, *, faint: bool) -> None:
    """The training loss, smoothed where there is much of it; `faint`: with the losses as they were behind it."""
    if len(y) < 60:
        axes.plot(x, y, marker="o" if len(y) == 1 else "", **look.line())
        return
    if faint:
        axes.plot(x, y, linewidth=0.7, alpha=0.3, color=look.colour, linestyle="-", marker="")
    axes.plot(x, smooth(y, len(y) / 30), marker="", **look.line())


def _validation(axes: Axes, x: Floats, y: Floats, look: Look) -> None:
    """The validation loss, with a ring around the lowest."""
    axes.plot(x, y, marker="o" if len(y) <= 25 else "", markersize=3, **look.line())
    if np.isfinite(y).any():
        best = int(np.nanargmin(np.where(np.isfinite(y), y, np.nan)))
        axes.plot(x[best : best + 1], y[best : best + 1], color=look.colour, linestyle="", marker="o", markersize=8, markerfacecolor="none")


def _panel(axes: Axes, title: str, below: str) -> None:
    plain(axes)
    axes.set_title(title, loc="left", pad=4, fontweight="bold", fontsize=9, **TEXT)
    axes.set_xlabel(below, labelpad=2, fontsize=9, **TEXT)


def _scale(axes: Axes, losses: Iterable[Floats]) -> None:
    """A log scale where the losses are many times apart; else room for what most of them are."""
    values = np.concatenate(list(losses))
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    if finite.min() > 0 and finite.max() > LOG_RANGE * finite.min():
        axes.set_yscale("log")
    elif len(finite) > 20:
        leave_out_first_spikes(axes, finite)


def _legend(figure: Figure, looks: Sequence[Look], labels: Sequence[str], columns: int, height: float) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker="", **look.line(2)) for look in looks]
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.06, 0.02 / height),
        ncols=columns,
        frameon=False,
        prop={"family": "DejaVu Sans", "size": 8.5},
        labelcolor=GREY,
        handlelength=2.4,
        columnspacing=1.6,
        labelspacing=0.35,
        borderaxespad=0.0,
    )
