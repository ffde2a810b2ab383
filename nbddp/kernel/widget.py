"""The live view in a notebook, made of widgets whose traits are set.

Runs in the kernel: made in the thread that asked, updated by the follower's. Nothing is printed, which would land in the latest cell, and no Output
widget is entered, which loses what a thread writes. At the end the static card takes the display's place and the widgets are closed, so that a saved
notebook shows no model that is gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import display, update_display

from nbddp.kernel import markup, sections
from nbddp.kernel.curve_panel import CurvePanel
from nbddp.kernel.kit import HIDDEN, Kit
from nbddp.kernel.log_tabs import LogTabs
from nbddp.kernel.outlet import Outlet
from nbddp.kernel.restoring import Restoring
from nbddp.kernel.stop_button import StopButton
from nbddp.kernel.stylesheet import stylesheet
from nbddp.kernel.subshell import has_subshell
from nbddp.kernel.text import short_id
from nbddp.tabular import FONT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbddp.advice import Advice
    from nbddp.config import TrainConfig
    from nbddp.kernel.card import Card
    from nbddp.kernel.stopping import Stopping
    from nbddp.rundir import RunDir
    from nbddp.state import RunState


MOST_LEFT = 20
LONG = 40_000
"""Characters of text, of which one each second is too much."""


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
        text = _Text(kit.html("nb-text"), self._text)
        text.begin(state)
        self._outlet = Outlet([text, self._logs, self._curve])
        stop = [] if self._stop is None else [self._stop.button, self._stop.said]
        grid = kit.box([kit.html(HIDDEN, value=stylesheet()), text.html, *stop, self._curve.box, self._logs.tab], "nb-grid")
        self._box = kit.box([grid], "nbddp-view")
        self._display_id = secrets.token_hex(8)
        bundle = self._box._repr_mimebundle_()
        data = {**bundle, **_instead(self._title, self._id, plan_line)}
        self._restoring = Restoring() if blocking else None
        if self._restoring is not None:
            self._restoring.begin()
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
            if self._restoring is not None:
                self._restoring.end()
            update_display(card.mimebundle(), raw=True, display_id=self._display_id)
            self._close(card)

    def _close(self, card: Card) -> None:
        """Close the widgets; what executes notebooks keeps their last values, which are emptied for that.

        A page that was opened after the view was knows no display to put the card in. It finds what the view was by the id of the outermost widget, which
        is left there for it and holds the card.
        """
        gone = dict.fromkeys(_below(self._box))
        if has_subshell():
            for kept in (self._box, self._box.layout):
                del gone[kept]
            self._box.children = [ipywidgets.HTML(_kept(self._id) + card.html)]
            _leave(self._box)
        for widget in gone:
            if isinstance(widget, ipywidgets.HTML) and widget.value:
                widget.value = ""
        for widget in gone:
            widget.close()

    def _hurry(self, part: CurvePanel) -> None:
        self._outlet.hurry(part)

    def _text(self, state: RunState) -> str:
        """All text is one trait, so that whatever stands side by side is of the same moment; the style sheet puts its sections in their places."""
        elapsed_s = state.elapsed_s or time.monotonic() - self._opened
        parts = {
            "nb-head": sections.head(state, title=self._title, run=self._id, plan_line=self._plan_line, elapsed_s=elapsed_s),
            "nb-figures": sections.figures(state) + sections.advice(self._advice(state)),
            "nb-timings": sections.timings(state),
        }
        return "".join(f'<div class="{name}">{content}</div>' for name, content in parts.items() if content)

    def _advice(self, state: RunState) -> list[Advice]:
        if self._config is None:
            return []
        from nbddp.advice import advise

        return advise(state, self._config)


_left: deque[ipywidgets.Box] = deque()
"""What views have left for pages that are opened later."""


def _leave(box: ipywidgets.Box) -> None:
    """Leave a box until there are many of them."""
    _left.append(box)
    while len(_left) > MOST_LEFT:
        for widget in list(_below(_left.popleft())):
            widget.close()


def _kept(run: str) -> str:
    """What a page is told that shows the card in place of a view that it did not open."""
    before = markup.quiet("This page was opened after the run had begun, and what it saves here is not the card.")
    text = f"{before} {markup.code(f'%ddp_attach {short_id(run)}')} {markup.quiet('in a cell keeps it.')}"
    return markup.div(text, f"{FONT};margin-bottom:8px;max-width:680px")


def _instead(title: str, run: str, plan_line: str) -> dict[str, str]:
    """What is shown of a view that was saved, by those that show no widgets."""
    attach = f"%ddp_attach {short_id(run)}"
    html = f"{markup.tag('b', escape(title))} {escape(plan_line)}<br>{markup.quiet(f'saved while the run went on; {attach} shows how it ended')}"
    return {"text/plain": f"{title}: {plan_line}\n{attach} shows how it ended", "text/html": markup.div(html, FONT)}


class _Text:
    """A part of the view that is one piece of HTML."""

    def __init__(self, html: ipywidgets.HTML, content: Callable[[RunState], str]) -> None:
        self.html, self._content = html, content

    @property
    def period_s(self) -> float:
        """The text about many ranks comes less often, so that the other parts have room."""
        return 1.0 if len(self.html.value) < LONG else 2.0

    def begin(self, state: RunState) -> None:
        self.html.value = self._content(state)

    def render(self, state: RunState) -> str | None:
        content = self._content(state)
        return None if content == self.html.value else content

    def show(self, content: str) -> None:
        self.html.value = content


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
