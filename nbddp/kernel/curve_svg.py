"""The loss curve of the live view: its lines as an SVG, and where the numbers at its axes belong.

It is drawn often: in milliseconds, in some ten kilobytes, and without matplotlib. The SVG holds no text and is stretched to the room that there is, with
lines of the same width everywhere; `nbddp.kernel.curve_html` puts text around it, of one size however wide the picture is.

Runs in the kernel, in the follower's thread. What stays in a notebook is drawn by `nbddp.kernel.figure`, in the same colours.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from nbddp.kernel.drawing import smooth, spikeless, tick_texts
from nbddp.kernel.figure import SMOOTHING, TRAIN, VAL, finite_losses, has_losses, step_text, wants_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from nbddp.curve import Curve
    from nbddp.state import RunState

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 0, 634, 6, 216
GREY = "#7a7a7a"
"""As visible on white as on the ground of a dark theme: the picture is transparent."""
TICKS = 6
FEW_VALUES = 40
"""Of a validation, which are drawn one by one."""
LARGEST = sys.float_info.max
Label = tuple[float, str]
"""Where it is centred, as a share of the picture's width from the left or of its height from the top, and what it says."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn curve.

    Attributes:
        svg: the picture, without text.
        across, down: the numbers at the axes.
        axis: what the horizontal one is.
        stages: their names, where there are several.
        widths: of each stage, as shares of the picture's width.
        lines: name and colour of each line.
        lowest: shares of width and height at which the lowest value of the validation lies.
    """

    svg: str
    across: list[Label]
    down: list[Label]
    axis: str
    stages: list[Label]
    widths: list[float]
    lines: list[tuple[str, str]]
    lowest: tuple[float, float] | None


def data_url(svg: str) -> str:
    """The source of an img element."""
    return f"data:image/svg+xml,{quote(svg, safe=' =/:;,()-.+*!@&?~')}"


def loss_plot(state: RunState, *, log: bool | None = None, smoothing: float = SMOOTHING) -> Plot | None:
    """Draw training and validation loss over steps; the arguments are those of `loss_png`, and None is returned where nothing is to be drawn."""
    if not has_losses(state):
        return None
    finite = finite_losses(state)
    asked = wants_log(state) if log is None else log
    log = asked and bool((finite > 0).any())
    axes = _Axes(state, _span(finite[finite > 0] if log else finite, log=log), log=log)
    stages = _Stages(state, axes)
    places = _places(state.val_curve, axes)
    body = [*stages.shades(), *axes.grid(), *_train(state.train_curve, axes, smoothing), *_validation(state.val_curve, axes, places)]
    lowest = max(places, key=lambda place: place[1], default=None)  # the lowest loss is the farthest down
    frame = f"viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none'"
    return Plot(
        svg=f"<svg xmlns='http://www.w3.org/2000/svg' {frame}><style>path{{vector-effect:non-scaling-stroke;fill:none}}</style>{''.join(body)}</svg>",
        across=axes.across(),
        down=axes.down(),
        axis=step_text(finite, log=asked),
        stages=stages.names(),
        widths=stages.widths(),
        lines=[("loss", TRAIN)] * bool(state.train_curve.y) + [("val_loss", VAL)] * bool(state.val_curve.y),
        lowest=None if lowest is None else (lowest[0] / WIDTH, lowest[1] / HEIGHT),
    )


def _span(finite: NDArray[np.float64], *, log: bool) -> tuple[float, float]:
    """What the axis of the loss spans: the values, without the spikes of the first steps, and a margin."""
    low, high = float(finite.min()), float(finite.max())
    if log:
        low, high = math.log10(low), math.log10(high)
        margin = 0.05 * (high - low) or 0.05
        return low - margin, high + margin
    low, high = spikeless(finite) or (low, high)
    margin = 0.12 * (high / 2 - low / 2) or 0.05 * abs(low) or 1.0
    return max(low - margin, -LARGEST), min(high + margin, LARGEST)


class _Axes:
    """Where values lie in the picture; `span` is that of the loss, of its decimal logarithm where the axis is logarithmic."""

    def __init__(self, state: RunState, span: tuple[float, float], *, log: bool) -> None:
        xs = [*state.train_curve.x, *state.val_curve.x]  # both are drawn to their ends
        begin = min(xs)
        end = max(xs) if max(xs) > begin else begin + 1
        self._x0, self._x1 = (0.0 if begin < 0.1 * end else begin), end
        self._log = log
        self._y0, self._y1 = span

    def x(self, values: Sequence[float] | NDArray[np.float64]) -> np.ndarray:
        return LEFT + (np.asarray(values, dtype=float) - self._x0) * ((RIGHT - LEFT) / (self._x1 - self._x0))

    def y(self, values: Sequence[float] | NDArray[np.float64]) -> np.ndarray:
        """Those of the vertical axis; nan where there is no place."""
        shown = np.asarray(values, dtype=float)
        with np.errstate(all="ignore"):
            if self._log:
                shown = np.log10(np.where(shown > 0, shown, np.nan))
            # Half the range is subtracted and divided by, so that the largest floats do not overflow; what is far outside is clipped by the picture.
            share = (shown / 2 - self._y0 / 2) / (self._y1 / 2 - self._y0 / 2)
        return np.clip(BOTTOM - share * (BOTTOM - TOP), -9999, 9999)

    def grid(self) -> list[str]:
        """Faint lines at the ticks, and the two axes."""
        lines = [f"M{LEFT} {at:.1f}H{RIGHT}" for at in self.y(self._y_ticks())] + [f"M{at:.1f} {TOP}V{BOTTOM}" for at in self.x(self._x_ticks())]
        return [
            f"<path d='{''.join(lines)}' stroke='{GREY}' stroke-opacity='.25' stroke-width='.6'/>",
            f"<path d='M{LEFT + 0.5} {TOP}V{BOTTOM}H{RIGHT}' stroke='{GREY}' stroke-width='1'/>",
        ]

    def across(self) -> list[Label]:
        ticks = self._x_ticks()
        return [(at / WIDTH, _count(tick)) for tick, at in zip(ticks, self.x(ticks).tolist(), strict=True)]

    def down(self) -> list[Label]:
        ticks = self._y_ticks()
        texts = [f"{tick:g}" for tick in ticks] if self._log else tick_texts(ticks)
        return [(at / HEIGHT, text) for text, at in zip(texts, self.y(ticks).tolist(), strict=True)]

    def _x_ticks(self) -> list[float]:
        return [tick for tick in _even(self._x0, self._x1) if tick == int(tick)]

    def _y_ticks(self) -> list[float]:
        if not self._log:
            return _even(self._y0, self._y1)
        first, last = math.floor(self._y0), math.ceil(self._y1)
        every = max(1, math.ceil((last - first) / TICKS))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        ticks = [float(f"{factor}e{power}") for power in range(first, min(last, 307) + 1, every) for factor in factors]
        ticks = [tick for tick in ticks if tick > 0 and self._y0 - 1e-9 <= math.log10(tick) <= self._y1 + 1e-9]
        return ticks if len(ticks) > 1 else [tick for tick in _even(10.0**self._y0, 10.0 ** min(self._y1, 308.0)) if tick > 0]


def _count(number: float) -> str:
    """A number of steps, short enough to stand beside others."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 10 * unit or (abs(number) >= unit and unit > 1e3):
            return f"{number / unit:.6g}{sign}"
    return f"{number:,.10g}"


def _even(low: float, high: float) -> list[float]:
    """Round numbers at even distances from low to high."""
    rough = (high / 2 - low / 2) / TICKS * 2
    if not math.isfinite(rough) or rough < 5e-300:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.9999)
    first = math.ceil(low / distance - 1e-9)
    ticks = [number * distance for number in range(first, first + 3 * TICKS)]
    return [tick for tick in ticks if math.isfinite(tick) and low - 1e-9 * distance <= tick <= high + 1e-9 * distance]


def _path(x: np.ndarray, y: np.ndarray, colour: str, style: str) -> str:
    """A line through points, interrupted where one has no place."""
    parts, joined = [], False
    for at, (across, down) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        if math.isnan(down):
            joined = False
            continue
        alone = not joined and (at + 1 == len(y) or math.isnan(y[at + 1]))
        parts.append(f"{'L' if joined else 'M'}{across:.1f} {down:.1f}" + ("h.1" if alone else ""))
        joined = True
    return f"<path d='{''.join(parts)}' stroke='{colour}' stroke-linejoin='round' stroke-linecap='round' {style}/>"


def _train(curve: Curve, axes: _Axes, smoothing: float) -> list[str]:
    x, y = axes.x(curve.x), np.asarray(curve.y, dtype=float)
    if len(y) * smoothing < 2:
        return [_path(x, axes.y(y), TRAIN, "stroke-width='1.6'")]
    mean = smooth(y, len(y) * smoothing)
    return [_path(x, axes.y(y), TRAIN, "stroke-width='.8' stroke-opacity='.35'"), _path(x, axes.y(mean), TRAIN, "stroke-width='1.8'")]


def _places(curve: Curve, axes: _Axes) -> list[tuple[float, float]]:
    """Where the values of a curve lie that have a place."""
    return [(across, down) for across, down in zip(axes.x(curve.x).tolist(), axes.y(curve.y).tolist(), strict=True) if not math.isnan(down)]


def _validation(curve: Curve, axes: _Axes, places: list[tuple[float, float]]) -> list[str]:
    """A line; of few values each is a dot, which a stretched picture keeps round as the cap of a line of no length."""
    if not curve.y:
        return []
    parts = [_path(axes.x(curve.x), axes.y(curve.y), VAL, "stroke-width='1.8'")]
    if len(curve.y) <= FEW_VALUES:
        dots = "".join(f"M{across:.1f} {down:.1f}h.01" for across, down in places)
        parts.append(f"<path d='{dots}' stroke='{VAL}' stroke-linecap='round' stroke-width='5'/>")
    return parts


class _Stages:
    """Where the stages of a run lie, if it has several."""

    def __init__(self, state: RunState, axes: _Axes) -> None:
        self._stages = state.stages if len(state.stages) > 1 else []
        ends = [float(stage.step) for stage in self._stages[1:]] + [float(max(state.step, state.stages[-1].step))] if self._stages else []
        self._begins = axes.x([stage.step for stage in self._stages]).tolist()
        self._ends = axes.x(ends).tolist()

    def shades(self) -> list[str]:
        """Every other stage lies on a shaded ground."""
        spans = list(zip(self._begins, self._ends, strict=True))[1::2]
        style = f"height='{BOTTOM - TOP}' fill='{GREY}' fill-opacity='.12'"
        return [f"<rect x='{begin:.1f}' y='{TOP}' width='{end - begin:.1f}' {style}/>" for begin, end in spans if end > begin]

    def names(self) -> list[Label]:
        """Each at its middle."""
        return [((begin + end) / 2 / WIDTH, stage.name) for stage, begin, end in zip(self._stages, self._begins, self._ends, strict=True)]

    def widths(self) -> list[float]:
        return [(end - begin) / WIDTH for begin, end in zip(self._begins, self._ends, strict=True)]
