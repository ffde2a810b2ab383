"""The loss curve of the live view as an SVG.

It is drawn often: in milliseconds, in some ten kilobytes, and without matplotlib, whose import and whose many objects make Python's garbage collector
stop the kernel's main thread for a tenth of a second.

Runs in the kernel, in the follower's thread. What stays in a notebook is drawn by `nbddp.kernel.figure`, in the same colours.
"""

from __future__ import annotations

import math
import sys
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from nbddp.kernel.drawing import smooth, spikeless
from nbddp.kernel.figure import SMOOTHING, TRAIN, VAL, finite_losses, has_losses, wants_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from nbddp.curve import Curve
    from nbddp.state import RunState

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 632, 10, 216
GREY = "#7a7a7a"
"""As readable on white as on the ground of a dark theme: the picture is transparent."""
LETTER = 6.0
"""Width of a letter."""
TICKS = 6
LARGEST = sys.float_info.max


def data_url(svg: str) -> str:
    """The source of an img element."""
    return f"data:image/svg+xml,{quote(svg, safe=' =/:;,()-.+*!@&?~')}"


def loss_svg(state: RunState, *, log: bool | None = None, smoothing: float = SMOOTHING) -> str | None:
    """Draw training and validation loss over steps; the arguments are those of `loss_png`, and None is returned where nothing is to be drawn."""
    if not has_losses(state):
        return None
    finite = finite_losses(state)
    log = (wants_log(state) if log is None else log) and bool((finite > 0).any())
    axes = _Axes(state, _span(finite[finite > 0] if log else finite, log=log), log=log)
    label = "step (losses that are not positive are left out)" if log and finite.min() <= 0 else "step"
    body = [*_stages(state, axes), *axes.grid(), *_train(state.train_curve, axes, smoothing), *_validation(state.val_curve, axes)]
    legend = _legend(state)
    clip = f"<clipPath id='c'><rect x='{LEFT}' y='{TOP - 4}' width='{RIGHT - LEFT + 6}' height='{BOTTOM - TOP + 6}'/></clipPath>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' font-family='sans-serif' font-size='11'>"
        f"{clip}<g clip-path='url(#c)'>{''.join(body)}</g>{axes.labels(label)}{legend}</svg>"
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
        xs = [*state.train_curve.x, *state.val_curve.x]
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
        lines = [f"M{LEFT} {at:.1f}H{RIGHT}" for at in self.y(self._y_ticks())] + [f"M{at:.1f} {TOP}V{BOTTOM}" for at in self.x(self._x_ticks())]
        return [f"<path d='{''.join(lines)}' stroke='{GREY}' stroke-opacity='.25' stroke-width='.6' fill='none'/>"]

    def labels(self, label: str) -> str:
        """Numbers at the ticks, the two axes, and the name of the horizontal one."""
        y_ticks, x_ticks = self._y_ticks(), self._x_ticks()
        parts = [f"<text x='{LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>{tick:.4g}</text>" for tick, at in zip(y_ticks, self.y(y_ticks), strict=True)]
        parts += [f"<text x='{at:.1f}' y='{BOTTOM + 14}' text-anchor='middle'>{tick:,.10g}</text>" for tick, at in zip(x_ticks, self.x(x_ticks), strict=True)]
        parts.append(f"<text x='{(LEFT + RIGHT) / 2}' y='{HEIGHT - 4}' text-anchor='middle'>{label}</text>")
        spines = f"<path d='M{LEFT} {TOP}V{BOTTOM}H{RIGHT}' stroke='{GREY}' stroke-width='.8' fill='none'/>"
        return f"{spines}<g fill='{GREY}'>{''.join(parts)}</g>"

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


def _even(low: float, high: float) -> list[float]:
    """Round numbers at even distances from low to high."""
    rough = (high / 2 - low / 2) / TICKS * 2
    if not math.isfinite(rough) or rough < 5e-300:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.9999)
    first = math.ceil(low / distance - 1e-9)
    ticks = [number * distance for number in range(first, first + 3 * TICKS)]
    return [tick for tick in ticks if math.isfinite(tick) and tick <= high + 1e-9 * distance]


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
    return f"<path d='{''.join(parts)}' stroke='{colour}' fill='none' stroke-linejoin='round' stroke-linecap='round' {style}/>"


def _train(curve: Curve, axes: _Axes, smoothing: float) -> list[str]:
    x, y = axes.x(curve.x), np.asarray(curve.y, dtype=float)
    if len(y) * smoothing < 2:
        return [_path(x, axes.y(y), TRAIN, "stroke-width='1.6'")]
    mean = smooth(y, len(y) * smoothing)
    return [_path(x, axes.y(y), TRAIN, "stroke-width='.8' stroke-opacity='.35'"), _path(x, axes.y(mean), TRAIN, "stroke-width='1.8'")]


def _validation(curve: Curve, axes: _Axes) -> list[str]:
    if not curve.y:
        return []
    x, y = axes.x(curve.x), axes.y(curve.y)
    parts = [_path(x, y, VAL, "stroke-width='1.8'")]
    places = [(across, down) for across, down in zip(x.tolist(), y.tolist(), strict=True) if not math.isnan(down)]
    if len(y) <= 40:
        parts += [f"<circle cx='{across:.1f}' cy='{down:.1f}' r='2.6' fill='{VAL}'/>" for across, down in places]
    if places:
        across, down = max(places, key=lambda place: place[1])  # the lowest loss is the farthest down
        parts.append(f"<circle cx='{across:.1f}' cy='{down:.1f}' r='5.5' fill='none' stroke='{VAL}' stroke-width='1.4'/>")
    return parts


def _stages(state: RunState, axes: _Axes) -> list[str]:
    """Every other stage lies on a shaded ground; each is named at its top, where the name has room."""
    if len(state.stages) < 2:
        return []
    begins = axes.x([stage.step for stage in state.stages])
    ends = [float(stage.step) for stage in state.stages[1:]] + [float(max(state.step, state.stages[-1].step))]
    parts = []
    for number, (stage, begin, end) in enumerate(zip(state.stages, begins, axes.x(ends), strict=True)):
        if end > begin and number % 2:
            parts.append(f"<rect x='{begin:.1f}' y='{TOP}' width='{end - begin:.1f}' height='{BOTTOM - TOP}' fill='{GREY}' fill-opacity='.12'/>")
        if end - begin >= LETTER * len(stage.name):
            parts.append(f"<text x='{(begin + end) / 2:.1f}' y='{TOP + 11}' text-anchor='middle' fill='{GREY}'>{escape(stage.name)}</text>")
    return parts


def _legend(state: RunState) -> str:
    entries = [("loss", TRAIN)] * bool(state.train_curve.y) + [("val_loss", VAL)] * bool(state.val_curve.y)
    top = TOP + (11 if len(state.stages) < 2 else 26)  # below the names of the stages
    parts = []
    for number, (name, colour) in enumerate(entries):
        at = top + 15 * number
        parts.append(f"<path d='M{RIGHT - 72} {at - 4}h16' stroke='{colour}' stroke-width='2'/><text x='{RIGHT - 50}' y='{at}' fill='{colour}'>{name}</text>")
    return "".join(parts)
