"""The loss curve as a PNG, through matplotlib's object API and the Agg canvas.

Runs in the kernel, in whichever thread draws. matplotlib is imported at the first drawing, which comes after the launch; pyplot, which would touch the
user's figures and backend, never is.
"""

from __future__ import annotations

import io
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from nbddp.curve import Curve
    from nbddp.state import RunState

TRAIN, VAL = "#4285f4", "#f28b30"
GREY = "#808080"
"""Readable on white and on black alike: the background is transparent."""
SIZE_IN = (6.4, 2.5)
DPI = 150
LOG_RANGE = 50.0
LETTER = 0.0115
"""Width of a letter of a stage's name, as a share of the axis."""
_drawing = threading.Lock()


def loss_png(state: RunState, *, limit: int | None = None) -> bytes | None:
    """Draw training and validation loss over steps.

    Args:
        state: whose curves to draw.
        limit: largest size in bytes; the resolution is lowered until the picture fits.

    Returns:
        A transparent PNG; None while no two losses are finite.
    """
    if np.isfinite(state.train_curve.y).sum() < 2 and np.isfinite(state.val_curve.y).sum() < 2:
        return None
    dpi = DPI
    while True:
        png = _draw(state, dpi)
        if limit is None or len(png) <= limit or dpi <= 40:
            return png
        dpi = int(dpi * 0.8)


def loss_figure(state: RunState, *, dpi: int = DPI) -> Figure:
    """Return the same picture as a matplotlib Figure, which a notebook displays; it does not belong to pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class LossFigure(Figure):
        def _repr_png_(self) -> bytes:
            return _png(self, int(self.dpi))

    figure = LossFigure(figsize=SIZE_IN, dpi=dpi, layout=None)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0.085, 0.17, 0.895, 0.79))
    axes.patch.set_alpha(0)
    _stages(axes, state)
    _train(axes, state.train_curve)
    _validation(axes, state.val_curve)
    _style(axes, state)
    return figure


def _draw(state: RunState, dpi: int) -> bytes:
    with _drawing:  # matplotlib's caches are not made for several threads
        return _png(loss_figure(state, dpi=dpi), dpi)


def _png(figure: Figure, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, transparent=True, bbox_inches=None, metadata={"Software": None})
    return buffer.getvalue()


def _stages(axes: Axes, state: RunState) -> None:
    """Every other stage lies on a shaded ground; each is named at its top, where the name has room."""
    if len(state.stages) < 2:
        return
    begin, end = state.stages[0].step, max([state.step, *(stage.step for stage in state.stages)])
    ends = [stage.step for stage in state.stages[1:]] + [end]
    for number, (stage, stop) in enumerate(zip(state.stages, ends, strict=True)):
        if stop <= stage.step:
            continue
        if number % 2:
            axes.axvspan(stage.step, stop, color=GREY, alpha=0.12, linewidth=0)
        if (stop - stage.step) / (end - begin) >= LETTER * len(stage.name):
            middle = (stage.step + stop) / 2
            axes.text(middle, 0.985, stage.name, transform=axes.get_xaxis_transform(), ha="center", va="top", color=GREY, fontsize=8.5, clip_on=True)


def _train(axes: Axes, curve: Curve) -> None:
    x, y = np.asarray(curve.x), np.asarray(curve.y)
    if len(y) < 60:
        axes.plot(x, y, color=TRAIN, linewidth=1.6, linestyle="-", marker="", label="loss")
        return
    axes.plot(x, y, color=TRAIN, linewidth=0.8, linestyle="-", marker="", alpha=0.35)
    axes.plot(x, _smooth(y, len(y) / 30), color=TRAIN, linewidth=1.7, linestyle="-", marker="", label="loss")


def _validation(axes: Axes, curve: Curve) -> None:
    if not curve.y:
        return
    x, y = np.asarray(curve.x), np.asarray(curve.y)
    marker = "o" if len(y) <= 40 else ""
    axes.plot(x, y, color=VAL, linewidth=1.7, linestyle="-", marker=marker, markersize=4, label="val_loss")
    if np.isfinite(y).any():
        best = int(np.nanargmin(np.where(np.isfinite(y), y, np.nan)))
        axes.plot(x[best : best + 1], y[best : best + 1], color=VAL, linestyle="", marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.3)


def _smooth(y: NDArray[np.float64], points: float) -> NDArray[np.float64]:
    """Centred mean with Gaussian weights over about `points` points; a gap stays a gap."""
    reach = math.ceil(2 * points)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (points / 2)) ** 2)
    finite = np.isfinite(y)
    total = np.convolve(np.where(finite, y, 0.0), kernel)[reach:-reach]
    weight = np.convolve(finite.astype(float), kernel)[reach:-reach]
    return np.where(finite, total / np.maximum(weight, 1e-300), np.nan)


def _style(axes: Axes, state: RunState) -> None:
    finite = np.asarray([value for curve in (state.train_curve, state.val_curve) for value in curve.y if math.isfinite(value)])
    if len(finite) and finite.min() > 0 and finite.max() > LOG_RANGE * finite.min():
        axes.set_yscale("log")
    elif len(finite) > 20:
        _leave_out_first_spikes(axes, finite)
    axes.set_xlim(0 if state.train_curve.x and state.train_curve.x[0] < 0.1 * state.train_curve.x[-1] else None)
    text: dict[str, Any] = {"color": GREY, "fontsize": 8.5, "family": "DejaVu Sans"}
    axes.set_xlabel("step", labelpad=2, **text)
    axes.tick_params(axis="both", which="both", colors=GREY, labelsize=8.5, direction="out", length=3, width=0.7)
    axes.grid(visible=True, which="major", color=GREY, alpha=0.25, linewidth=0.6, linestyle="-")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
        spine.set_linewidth(0.7)
    if axes.get_legend_handles_labels()[0]:
        top = 1.0 if len(state.stages) < 2 else 0.92  # below the names of the stages
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, top), frameon=False, fontsize=9, labelcolor="linecolor", handlelength=1.2, borderaxespad=0.1)


def _leave_out_first_spikes(axes: Axes, finite: NDArray[np.float64]) -> None:
    """Scale to what most of the curve does: the first losses of a run can be many times the rest."""
    low, high = float(finite.min()), float(np.quantile(finite, 0.99))
    if high > low and finite.max() - low > 3 * (high - low):
        margin = 0.06 * (high - low)
        axes.set_ylim(low - margin, high + margin)
