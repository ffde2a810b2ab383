"""Kit: the widgets of one view, which share their layout and their style.

Each would have a model of its own for either, which the browser keeps and an executed notebook stores. What they look like is in the style sheet of the
view instead, by class. Runs in the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
from ipywidgets.widgets.widget_string import HTMLStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = "nb-hidden"


class Kit:
    """Makes widgets; the names are classes of the style sheet."""

    def __init__(self) -> None:
        self._layout = ipywidgets.Layout()
        self._html_style = HTMLStyle()

    def html(self, *names: str, value: str = "") -> ipywidgets.HTML:
        return ipywidgets.HTML(value, layout=self._layout, style=self._html_style, _dom_classes=names)

    def box(self, children: Sequence[ipywidgets.Widget], *names: str) -> ipywidgets.Box:
        return ipywidgets.Box(children, layout=self._layout, _dom_classes=names)

    def make(self, kind: type[Any], *names: str, **traits: object) -> Any:
        """A control."""
        return kind(layout=self._layout, _dom_classes=names, **traits)


def hide(widget: ipywidgets.DOMWidget, *, hidden: bool) -> None:
    """Take a widget out of sight, or bring it back."""
    if hidden != (HIDDEN in widget._dom_classes):
        (widget.add_class if hidden else widget.remove_class)(HIDDEN)
