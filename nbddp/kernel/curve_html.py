"""The loss curve of the live view with its text: numbers, names and legend are HTML around the picture, of one size however wide that is.

Runs in the kernel, in the follower's thread; a pure function of a plot. Imports no Jupyter.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel.curve_svg import data_url
from nbddp.kernel.markup import div, tag
from nbddp.tabular import FONT, NUMBERS, QUIET

if TYPE_CHECKING:
    from nbddp.kernel.curve_svg import Plot

HEIGHT_PX = 264
TOP_PX, RIGHT_PX, BOTTOM_PX = 22, 22, 38
"""Room for the legend, for half of the last number below the picture, and for those numbers and what they are."""
LETTER_PX = 6.6
LETTER = 0.0155
"""Width of a letter of a stage's name, as a share of the picture where that is narrow."""
_TEXT = f"{QUIET};position:absolute;white-space:nowrap"


def loss_html(plot: Plot, alt: str) -> str:
    """The picture, as wide as there is room."""
    gutter_px = round(max((len(label) for _, label in plot.down), default=1) * LETTER_PX) + 10
    image = f'<img alt="{escape(alt)}" src="{data_url(plot.svg)}" style="position:absolute;left:0;top:0;width:100%;height:100%;max-width:none;margin:0">'
    parts = [image, *_numbers(plot), *_stages(plot), _lowest(plot)]
    area = div("".join(parts), f"position:absolute;left:{gutter_px}px;right:{RIGHT_PX}px;top:{TOP_PX}px;bottom:{BOTTOM_PX}px")
    style = f"{FONT};font-size:11px;line-height:14px;position:relative;height:{HEIGHT_PX}px;overflow:hidden;{NUMBERS}"
    return div(_legend(plot) + area, style)


def _numbers(plot: Plot) -> list[str]:
    down = [tag("span", label, f"{_TEXT};right:100%;top:{100 * at:.1f}%;transform:translateY(-50%);padding-right:6px") for at, label in plot.down]
    across = [tag("span", label, f"{_TEXT};top:100%;left:{100 * at:.1f}%;transform:translateX(-50%);padding-top:3px") for at, label in plot.across]
    return [*down, *across, tag("span", escape(plot.axis), f"{_TEXT};top:100%;left:0;right:0;text-align:center;padding-top:19px")]


def _stages(plot: Plot) -> list[str]:
    """Names of stages at the top, where they have room."""
    named = zip(plot.stages, plot.widths, strict=True)
    style = f"{_TEXT};top:4px;transform:translateX(-50%)"
    return [tag("span", escape(name), f"{style};left:{100 * at:.1f}%") for (at, name), width in named if width >= LETTER * len(name)]


def _lowest(plot: Plot) -> str:
    """A ring around the lowest value of the validation."""
    if plot.lowest is None:
        return ""
    across, down = plot.lowest
    colour = next(colour for name, colour in plot.lines if name == "val_loss")
    place = f"position:absolute;left:{100 * across:.2f}%;top:{100 * down:.2f}%;transform:translate(-50%,-50%)"
    return tag("span", "", f"{place};width:9px;height:9px;border:1.4px solid {colour};border-radius:50%")


def _legend(plot: Plot) -> str:
    entries = []
    for name, colour in plot.lines:
        line = tag("span", "", f"display:inline-block;width:16px;height:0;border-top:2px solid {colour};vertical-align:middle;margin-right:5px")
        entries.append(tag("span", line + name, "margin-left:16px"))
    return div("".join(entries), f"text-align:right;padding-right:{RIGHT_PX}px")
