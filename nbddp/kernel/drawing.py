"""What all pictures of losses have in common: how they look, how they are smoothed and written as PNG, and that one is drawn at a time.

Runs in the kernel, in whichever thread draws. matplotlib is imported where it is drawn.
"""

from __future__ import annotations

import io
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

GREY = "#808080"
"""Readable on white and on black alike: the background is transparent."""
TEXT: dict[str, Any] = {"color": GREY, "family": "DejaVu Sans"}
LOG_RANGE = 50.0
"""How many times apart losses are that are drawn on a log scale."""
FEW = 20
"""Losses among which none counts as a spike."""
one_at_a_time = threading.Lock()
"""Held while something is drawn: matplotlib's caches are not made for several threads."""


def small_png_of(figure: Figure, dpi: int) -> bytes:
    """Write a figure as PNG in 256 colours, which curves, ticks and letters need no more of: about a third as large as `png_of`, and looking the same."""
    from PIL import Image  # which comes with matplotlib

    whole = Image.open(io.BytesIO(png_of(figure, dpi))).convert("RGBA")
    buffer = io.BytesIO()
    whole.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def png_of(figure: Figure, dpi: int) -> bytes:
    """Write a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, transparent=True, bbox_inches=None, metadata={"Software": None})
    return buffer.getvalue()


def smooth(y: NDArray[np.float64], points: float) -> NDArray[np.float64]:
    """Centred mean with Gaussian weights over about `points` points; a gap stays a gap."""
    reach = math.ceil(2 * points)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (points / 2)) ** 2)
    finite = np.isfinite(y)
    total = np.convolve(np.where(finite, y, 0.0), kernel)[reach:-reach]
    weight = np.convolve(finite.astype(float), kernel)[reach:-reach]
    return np.where(finite, total / np.maximum(weight, 1e-300), np.nan)


def plain(axes: Axes) -> None:
    """Grey ticks and a faint grid, two spines, no ground."""
    axes.patch.set_alpha(0)
    axes.tick_params(axis="both", which="both", colors=GREY, labelsize=8.5, direction="out", length=3, width=0.7)
    axes.grid(visible=True, which="major", color=GREY, alpha=0.25, linewidth=0.6, linestyle="-")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
        spine.set_linewidth(0.7)


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """What stands at ticks: each whole, and with as few digits as tell them apart, also where they are alike in their first ones."""
    values = np.asarray(ticks, dtype=float)
    apart = float(np.abs(np.diff(values)).min()) if len(values) > 1 else 0.0
    shown = [0.0 if abs(tick) < 1e-6 * apart else tick for tick in values.tolist()]  # zero, but for rounding
    texts = []
    for digits in range(4, 18):
        texts = [f"{tick:.{digits}g}" for tick in shown]
        if all(abs(float(text) - tick) <= 0.02 * apart for text, tick in zip(texts, shown, strict=True)):
            break
    return texts


def whole_ticks(axes: Axes) -> int:
    """Let no number at a linear vertical axis stand for a part of its value, as matplotlib's do beside an offset.

    Returns:
        The letters of the longest of them, with the limits as they are; 0 on a logarithmic axis.
    """
    if axes.get_yscale() == "log":
        return 0
    from matplotlib.ticker import Formatter

    class Whole(Formatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_texts(values)

        def __call__(self, value: float, _place: int | None = None) -> str:
            return f"{value:.6g}"

    axes.yaxis.set_major_formatter(Whole())
    low, high = sorted(axes.get_ylim())
    return max(map(len, tick_texts([tick for tick in axes.get_yticks() if low <= tick <= high])), default=0)


def spikeless(finite: NDArray[np.float64]) -> tuple[float, float] | None:
    """What most of the curve spans, where its first losses are many times the rest; None where they are not, or where there are few."""
    if len(finite) <= FEW:
        return None
    low, high = float(finite.min()), float(np.quantile(finite, 0.99))
    return (low, high) if high > low and finite.max() / 3 - low / 3 > high - low else None


def leave_out_first_spikes(axes: Axes, finite: NDArray[np.float64]) -> None:
    """Scale to what most of the curve does."""
    if (most := spikeless(finite)) is not None:
        low, high = most
        margin = 0.06 * (high - low)
        axes.set_ylim(low - margin, high + margin)
