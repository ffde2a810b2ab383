"""The loss curve as a PNG, through matplotlib's object API and the Agg canvas.

Runs in the kernel, in whichever thread draws, so that it must not keep the main thread waiting. matplotlib is imported at the first drawing, which comes
after the launch; pyplot, which would touch the user's figures and backend, never is.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from nbddp.kernel import collection
from nbddp.kernel.drawing import GREY, LOG_RANGE, TEXT, leave_out_first_spikes, one_at_a_time, plain, png_of, smooth, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from nbddp.curve import Curve
    from nbddp.state import RunState

TRAIN, VAL = "#4285f4", "#f28b30"
SIZE_IN = (6.4, 2.5)
DPI = 150
SMOOTHING = 1 / 30
"""Default width of the mean that is drawn over the training loss, as a share of the curve."""
LEFT, RIGHT = 0.085, 0.98
TICK_ROOM, TICK_LETTER = 0.025, 0.0122
"""Width of a letter of a number at the vertical axis and of what stands between numbers and axis, as shares of the figure."""
LETTER = 0.0115
"""Width of a letter of a stage's name, as a share of the axis."""


def has_losses(state: RunState) -> bool:
    """Whether there is something to draw."""
    return bool(np.isfinite(state.train_curve.y).sum() >= 2 or np.isfinite(state.val_curve.y).sum() >= 2)


def wants_log(state: RunState) -> bool:
    """Whether the losses are all positive and range so far that a logarithmic axis shows them better."""
    finite = finite_losses(state)
    return bool(len(finite) and finite.min() > 0 and finite.max() > LOG_RANGE * finite.min())


def loss_png(state: RunState, *, limit: int | None = None, log: bool | None = None, smoothing: float = SMOOTHING) -> bytes | None:
    """Draw training and validation loss over steps.

    Args:
        state: whose curves to draw.
        limit: largest size in bytes; the resolution is lowered until the picture fits.
        log: whether the axis of the loss is logarithmic; default: where that shows more. Values that are not positive are left out then.
        smoothing: width of the mean that is drawn over the training loss, as a share of the curve; 0 draws the curve alone.

    Returns:
        A transparent PNG; None while no two losses are finite.
    """
    if not has_losses(state):
        return None
    dpi = DPI
    while True:
        png = _draw(state, dpi, log, smoothing)
        if limit is None or len(png) <= limit or dpi <= 40:
            return png
        dpi = int(dpi * 0.8)


def loss_figure(state: RunState, *, dpi: int = DPI, log: bool | None = None, smoothing: float = SMOOTHING) -> Figure:
    """Return the same picture as a matplotlib Figure, which a notebook displays; it does not belong to pyplot."""
    _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class LossFigure(Figure):
        def _repr_png_(self) -> bytes:
            return png_of(self, int(self.dpi))

    figure = LossFigure(figsize=SIZE_IN, dpi=dpi, layout=None)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_axes((LEFT, 0.17, RIGHT - LEFT, 0.79))
    plain(axes)
    _stages(axes, state)
    _train(axes, state.train_curve, smoothing)
    _validation(axes, state.val_curve)
    _style(axes, state, wants_log(state) if log is None else log)
    left = max(LEFT, TICK_ROOM + TICK_LETTER * whole_ticks(axes))
    axes.set_position((left, 0.17, RIGHT - left, 0.79))
    return figure


def _draw(state: RunState, dpi: int, log: bool | None, smoothing: float) -> bytes:
    with one_at_a_time, collection.paused():
        return png_of(loss_figure(state, dpi=dpi, log=log, smoothing=smoothing), dpi)


def _import_matplotlib() -> None:
    """Import it without the full garbage collection that its many objects would bring about."""
    if "matplotlib.backends.backend_agg" not in sys.modules:
        with collection.paused():
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401 - used by name where it is drawn

            collection.settle()


def finite_losses(state: RunState) -> NDArray[np.float64]:
    """The values of both curves that are finite."""
    return np.asarray([value for curve in (state.train_curve, state.val_curve) for value in curve.y if math.isfinite(value)])


def step_text(finite: NDArray[np.float64], *, log: bool) -> str:
    """What the horizontal axis is; with a logarithmic one for the loss, also what that can't show."""
    if not log or finite.min() > 0:
        return "step"
    return "step (losses that are not positive are left out)" if finite.max() > 0 else "step (no loss is positive: a linear scale)"


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


def _train(axes: Axes, curve: Curve, smoothing: float) -> None:
    x, y = np.asarray(curve.x), np.asarray(curve.y)
    if len(y) * smoothing < 2:
        axes.plot(x, y, color=TRAIN, linewidth=1.6, linestyle="-", marker="", label="loss")
        return
    axes.plot(x, y, color=TRAIN, linewidth=0.8, linestyle="-", marker="", alpha=0.35)
    axes.plot(x, smooth(y, len(y) * smoothing), color=TRAIN, linewidth=1.7, linestyle="-", marker="", label="loss")


def _validation(axes: Axes, curve: Curve) -> None:
    if not curve.y:
        return
    x, y = np.asarray(curve.x), np.asarray(curve.y)
    marker = "o" if len(y) <= 40 else ""
    axes.plot(x, y, color=VAL, linewidth=1.7, linestyle="-", marker=marker, markersize=4, label="val_loss")
    if np.isfinite(y).any():
        best = int(np.nanargmin(np.where(np.isfinite(y), y, np.nan)))
        axes.plot(x[best : best + 1], y[best : best + 1], color=VAL, linestyle="", marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.3)


def _style(axes: Axes, state: RunState, log: bool) -> None:
    finite = finite_losses(state)
    if log and (finite > 0).any():
        axes.set_yscale("log", nonpositive="mask")
    else:
        leave_out_first_spikes(axes, finite)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.10g}")
    axes.set_xlim(0 if state.train_curve.x and state.train_curve.x[0] < 0.1 * state.train_curve.x[-1] else None)
    axes.set_xlabel(step_text(finite, log=log), labelpad=2, fontsize=8.5, **TEXT)
    if axes.get_legend_handles_labels()[0]:
        top = 1.0 if len(state.stages) < 2 else 0.92  # below the names of the stages
        axes.legend(loc="upper right", bbox_to_anchor=(1.0, top), frameon=False, fontsize=9, labelcolor="linecolor", handlelength=1.2, borderaxespad=0.1)
