"""The live view in a notebook, made of widgets whose traits are set.

Runs in the kernel: made in the thread that asked, updated by the follower's. Nothing is printed, which would land in the latest cell, and no Output
widget is entered, which loses what a thread writes. At the end the static card takes the display's place and the widgets are closed, so that a saved
notebook shows no model that is gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import display, update_display

from nbddp.kernel import sections
from nbddp.kernel.curve_panel import CurvePanel
from nbddp.kernel.kit import HIDDEN, Kit
from nbddp.kernel.log_tabs import LogTabs
from nbddp.kernel.outlet import Outlet
from nbddp.kernel.stop_button import StopButton
from nbddp.kernel.stylesheet import stylesheet
from nbddp.kernel.subshell import has_subshell
from nbddp.kernel.text import short_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbddp.advice import Advice
    from nbddp.config import TrainConfig
    from nbddp.kernel.card import Card
    from nbddp.kernel.stopping import Stopping
    from nbddp.rundir import RunDir
    from nbddp.state import RunState


class WidgetView:
    """Widgets that show a run, until `finish`; the arguments are those of `nbddp.kernel.view.open_view`."""

    def __init__(
        self,
        run_dir: RunDir,
        state: RunState,
        *,
        plan_line: str,
        title: str | None = None,
        controls: Stopping | None = None,
        config: TrainConfig | None = None,
        blocking: bool = False,
    ) -> None:
        self._title, self._id, self._plan_line = title or short_id(run_dir.id), run_dir.id, plan_line
        self._config = config
        self._lock = threading.Lock()
        self._finished = False
        self._opened = time.monotonic()
        kit = Kit()
        self._stop = None if controls is None else StopButton(kit, controls, blocking=blocking)
        self._curve = CurvePanel(kit, self._hurry)
        self._logs = LogTabs(kit, run_dir, len(state.ranks) or _ranks(run_dir))
        head, figures, timings = kit.html("nb-half"), kit.html("nb-half"), kit.html("nb-full")
        texts = [_Text(head, self._head, 1.0), _Text(figures, sections.figures, 1.0), _Text(timings, self._timings, 2.0)]
        for text in texts:
            text.begin(state)
        self._outlet = Outlet([*texts, self._logs, self._curve])
        top = kit.box([head, *([] if self._stop is None else [self._stop.button])], "nb-row")
        middle = kit.box([self._curve.box, figures], "nb-row")
        rows = [kit.html(HIDDEN, value=stylesheet()), top, *([] if self._stop is None else [self._stop.said]), middle, timings, self._logs.tab]
        self._box = kit.box(rows, "nbddp-view")
        self._display_id = secrets.token_hex(8)
        bundle = self._box._repr_mimebundle_()
        data = {**bundle, "text/plain": f"{self._title}: {plan_line}", "text/html": f"<b>{escape(self._title)}</b> {escape(plan_line)}"}
        display(data, raw=True, display_id=self._display_id)

    def update(self, state: RunState) -> None:
        """Set the traits that are due and changed."""
        with self._lock:
            if self._finished:
                return
            if self._stop is not None:
                self._stop.update()
            self._outlet.send(state)

    def finish(self, card: Card) -> None:
        """Show the card in the same place and close the widgets."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            update_display(card.mimebundle(), raw=True, display_id=self._display_id)
            self._close(card)

    def _close(self, card: Card) -> None:
        """Close the widgets; what executes notebooks keeps their last values, which are emptied for that.

        A page of a front end with subshells may have been reloaded while the cell blocked: such a page finds what the view was only now, by the id of the
        outermost widget, which is left there for it and holds the card.
        """
        gone = dict.fromkeys(_below(self._box))
        if has_subshell():
            for kept in (self._box, self._box.layout):
                del gone[kept]
            self._box.children = [ipywidgets.HTML(card.html)]
        for widget in gone:
            if isinstance(widget, ipywidgets.HTML) and widget.value:
                widget.value = ""
        for widget in gone:
            widget.close()

    def _hurry(self, part: CurvePanel) -> None:
        self._outlet.hurry(part)

    def _head(self, state: RunState) -> str:
        elapsed_s = state.elapsed_s or time.monotonic() - self._opened
        return sections.head(state, title=self._title, run=self._id, plan_line=self._plan_line, elapsed_s=elapsed_s)

    def _timings(self, state: RunState) -> str:
        return sections.timings(state, self._advice(state))

    def _advice(self, state: RunState) -> list[Advice]:
        if self._config is None:
            return []
        from nbddp.advice import advise

        return advise(state, self._config)


class _Text:
    """A part of the view that is one piece of HTML."""

    def __init__(self, html: ipywidgets.HTML, content: Callable[[RunState], str], period_s: float) -> None:
        self._html, self._content, self.period_s = html, content, period_s

    def begin(self, state: RunState) -> None:
        self._html.value = self._content(state)

    def render(self, state: RunState) -> str | None:
        content = self._content(state)
        return None if content == self._html.value else content

    def show(self, content: str) -> None:
        self._html.value = content


def _ranks(run_dir: RunDir) -> int:
    """How many ranks the run is planned with."""
    spec = run_dir.read_spec() or {}
    return int((spec.get("plan") or {}).get("nproc") or (spec.get("config") or {}).get("nproc") or 1)


def _below(widget: Any) -> Iterator[ipywidgets.Widget]:
    """A widget and everything that it is made of."""
    yield widget
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if part is not None:
            yield part
    for child in getattr(widget, "children", ()):
        yield from _below(child)
