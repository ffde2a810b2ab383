"""The loss curve of the live view, and the controls of how it is drawn.

Runs in the kernel: made in the thread that asked, drawn in the follower's, set by the browser in any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from nbddp.kernel.curve_html import loss_html
from nbddp.kernel.curve_svg import loss_plot
from nbddp.kernel.figure import SMOOTHING, has_losses, wants_log
from nbddp.kernel.kit import HIDDEN, hide
from nbddp.kernel.subshell import hear
from nbddp.kernel.text import count_text, value_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.kernel.kit import Kit
    from nbddp.state import RunState

SHORT = 250
"""Points, of which one more is a visible part of the curve."""
SMOOTHINGS = [("off", 0.0), ("light", SMOOTHING / 2), ("medium", SMOOTHING), ("strong", 4 * SMOOTHING)]


class CurvePanel:
    """A picture that is drawn anew when there is something new: every second while it is short, and every two seconds when that is not to be seen any more.

    A control draws nothing itself: it lets the picture be the next that is sent. The logarithmic axis follows the losses until the user decides.
    """

    def __init__(self, kit: Kit, changed: Callable[[CurvePanel], None]) -> None:
        self._changed = changed
        self._log: bool | None = None
        self._suggested = False
        self._points = 0
        self._drawn: tuple[object, ...] | None = None
        self._rendered: tuple[object, ...] | None = None
        self._picture = kit.html("nb-picture")
        self._log_box = kit.make(ipywidgets.Checkbox, "nb-fit", description="log scale", indent=False, tooltip="Logarithmic axis of the loss")
        tooltip = "Width of the mean that is drawn over the training loss"
        self._smoothing = kit.make(ipywidgets.Dropdown, "nb-fit", options=SMOOTHINGS, value=SMOOTHING, description="smoothing", tooltip=tooltip)
        self._smoothing.style.description_width = "initial"
        for control in (self._log_box, self._smoothing):
            hear(control)
        self._log_box.observe(self._choose_log, "value")
        self._smoothing.observe(self._choose_smoothing, "value")
        self.box = kit.box([self._picture, kit.box([self._log_box, self._smoothing], "nb-row")], "nb-curve", HIDDEN)

    @property
    def period_s(self) -> float:
        return 1.0 if self._points < SHORT else 2.0

    def render(self, state: RunState) -> str | None:
        """The picture as an element; None where the last one says it all."""
        self._points = len(state.train_curve.x)
        key = (len(state.train_curve.x) + len(state.val_curve.x), len(state.stages), self._log, self._smoothing.value)
        if key == self._drawn or not has_losses(state):
            return None
        self._suggest(wants_log(state))
        plot = loss_plot(state, log=self._suggested if self._log is None else self._log, smoothing=self._smoothing.value)
        if plot is None:
            return None
        self._rendered = key
        return loss_html(plot, _described(state))

    def show(self, content: str) -> None:
        """Put the picture in its place."""
        self._drawn = self._rendered
        self._picture.value = content
        hide(self.box, hidden=False)

    def _suggest(self, log: bool) -> None:
        """Let the box follow the losses while the user has not decided."""
        if log != self._suggested:
            self._suggested = log
            if self._log is None:
                self._log_box.value = log

    def _choose_log(self, change: dict[str, Any]) -> None:
        self._log = None if change["new"] == self._suggested else bool(change["new"])
        self._changed(self)

    def _choose_smoothing(self, _change: object) -> None:
        self._changed(self)


def _described(state: RunState) -> str:
    text = f"loss over steps: {value_text(state.report.loss)} at step {count_text(state.step)}"
    return text + (f", val_loss {value_text(state.validated['val_loss'])}" if "val_loss" in state.validated else "")
