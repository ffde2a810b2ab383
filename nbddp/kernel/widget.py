"""The live view in a notebook, made of widgets whose traits are set.

Runs in the kernel: made in the thread that asked, updated by the follower's. Nothing is printed, which would land in the latest cell, and no Output
widget is entered, which loses what a thread writes. At the end the static card takes the display's place and the widgets are closed, so that a saved
notebook shows no model that is gone.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from html import escape
from typing import TYPE_CHECKING

import ipywidgets
from IPython.display import display, update_display

from nbddp.kernel import markup
from nbddp.kernel.figure import loss_png
from nbddp.kernel.tail import Tail
from nbddp.kernel.text import clock_text, count_text, rate_text, seconds_text, short_id, value_text
from nbddp.tabular import FONT, NUMBERS, html_table

if TYPE_CHECKING:
    from nbddp.kernel.card import Card
    from nbddp.rundir import RunDir
    from nbddp.state import Report, RunState

REDRAW_S = 2.0
DRAWING_SHARE = 1 / 50
"""Of one core: the ranks need the others, and this one."""


class WidgetView:
    """Widgets that show a run, until `finish`."""

    def __init__(self, run_dir: RunDir, state: RunState, *, plan_line: str, title: str | None = None) -> None:
        self._title, self._id, self._plan_line = title or short_id(run_dir.id), run_dir.id, plan_line
        self._tail = Tail(run_dir.log(0))
        self._lock = threading.Lock()
        self._finished = False
        self._opened = time.monotonic()
        self._next_drawing = -math.inf
        self._drawn_points = 0
        full = ipywidgets.Layout(width="100%", margin="0")
        self._head = ipywidgets.HTML(layout=full)
        self._curve = ipywidgets.Image(format="png", layout=ipywidgets.Layout(flex="1 1 400px", min_width="0", max_width="640px", display="none"))
        self._figures = ipywidgets.HTML(layout=ipywidgets.Layout(flex="1 1 300px", min_width="0", margin="0"))
        self._body = ipywidgets.HTML(layout=full)
        self._middle = ipywidgets.HBox(
            [self._curve, self._figures],
            layout=ipywidgets.Layout(flex_flow="row wrap", align_items="flex-start", width="100%", grid_gap="0 20px", overflow="hidden"),
        )
        rows = [self._head, self._middle, self._body]
        self._box = ipywidgets.VBox(rows, layout=ipywidgets.Layout(width="100%", max_width="1080px", padding="2px 0", overflow="hidden"))
        self.update(state)
        self._display_id = secrets.token_hex(8)
        bundle = self._box._repr_mimebundle_()
        data = {**bundle, "text/plain": f"{self._title}: {plan_line}", "text/html": f"<b>{escape(self._title)}</b> {escape(plan_line)}"}
        display(data, raw=True, display_id=self._display_id)

    def update(self, state: RunState) -> None:
        """Set the traits; ipywidgets sends those that changed."""
        with self._lock:
            if self._finished:
                return
            self._head.value = _head(state, self._title, self._id, self._plan_line, state.elapsed_s or time.monotonic() - self._opened)
            self._figures.value = _figures(state)
            self._body.value = _body(state, self._tail.lines())
            self._draw(state)

    def _draw(self, state: RunState) -> None:
        """Redraw the curve every two seconds at most, and less often where drawing is slow: the cores are for the ranks."""
        points, now = len(state.train_curve.x) + len(state.val_curve.x), time.monotonic()
        if points == self._drawn_points or now < self._next_drawing:
            return
        png = loss_png(state)
        if png is None:
            return
        drawn = time.monotonic()
        first, self._drawn_points = self._drawn_points == 0, points
        # The first drawing imports matplotlib, which says nothing about the next one.
        self._next_drawing = drawn + (REDRAW_S if first else max(REDRAW_S, (drawn - now) / DRAWING_SHARE))
        self._curve.value = png
        self._curve.layout.display = None

    def finish(self, card: Card) -> None:
        """Show the card in the same place and close the widgets."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            update_display(card.mimebundle(), raw=True, display_id=self._display_id)
            for widget in (self._head, self._figures, self._body):
                widget.value = ""  # what executes notebooks keeps the last state of closed widgets
            self._curve.value = b""
            for widget in (self._box, self._middle, self._head, self._curve, self._figures, self._body):
                for part in (widget, widget.layout, getattr(widget, "style", None)):
                    if part is not None:
                        part.close()


def _head(state: RunState, title: str, run: str, plan_line: str, elapsed_s: float) -> str:
    name = markup.tag("b", escape(title), "margin:0 8px")
    clock = markup.tag("span", markup.quiet(clock_text(elapsed_s)), f"margin-left:auto;{NUMBERS}")
    top = markup.div(f"{markup.badge(state.state)}{name}{markup.quiet(run)}{clock}", "display:flex;align-items:baseline;flex-wrap:wrap")
    plan = markup.div(markup.quiet(plan_line), "margin-top:3px;overflow-wrap:anywhere")
    notes = "".join(markup.message(str(message.get("level", "info")), str(message.get("text", ""))) for message in list(state.messages)[-3:])
    if state.stop_text and not state.done:
        notes += markup.note(f"stopping: {state.stop_text}", markup.WARNING)
    progress = markup.progress_bar(state.progress, state.state)
    return markup.div(top + plan + progress + markup.div(markup.quiet(_progress_text(state)), NUMBERS) + notes, FONT)


def _progress_text(state: RunState) -> str:
    parts = []
    if state.progress is not None and state.step:
        parts.append(f"{math.floor(100 * state.progress)} %")
    if state.phase not in ("training", state.state):
        parts.append(state.phase)
    if state.step:
        epochs = state.plan.get("epochs")
        parts.append(f"epoch {state.epoch}" + (f" of {epochs}" if epochs else ""))
        parts.append(f"step {count_text(state.step)}" + (f" of {count_text(state.total_steps)}" if state.total_steps else ""))
        if state.eta_s is not None:
            parts.append(f"{clock_text(state.eta_s)} to go")
    return " · ".join(parts) or "starting the ranks"


def _figures(state: RunState) -> str:
    if not state.step:
        return ""
    report = state.report
    shown = [markup.tile("loss", value_text(report.loss), f"epoch mean {value_text(report.epoch_loss)}")]
    if "val_loss" in state.validated:
        lowest = state.lowest.get("val_loss")
        aside = f"lowest {value_text(lowest.value)}, epoch {lowest.epoch}" if lowest else ""
        shown.append(markup.tile("val_loss", value_text(state.validated["val_loss"]), aside))
    if state.samples_per_s:
        shown.append(markup.tile("samples/s", rate_text(state.samples_per_s), f"{rate_text(state.steps_per_s)} steps/s"))
    if math.isfinite(state.lr):
        shown.append(markup.tile("lr", f"{state.lr:.3g}"))
    return markup.div(markup.tiles(shown) + _times(report, several=len(state.ranks) > 1), FONT)


def _times(report: Report, *, several: bool) -> str:
    """The times of the log line."""
    rows = [("data", report.data_s, report.mean_data_s), ("network", report.network_s, report.mean_network_s)]
    if several:
        rows.append(("aggregation (waiting)", report.aggregation_s, report.mean_aggregation_s))
    cells = [(escape(name), seconds_text(now), seconds_text(mean)) for name, now, mean in rows]
    return html_table(("time of a step", "now", "epoch mean"), cells)


def _body(state: RunState, printed: list[str]) -> str:
    parts = []
    if any(state.recent_phases_s.values()):
        whole = sum(state.recent_phases_s.values())
        parts += [
            markup.heading(f"Where a step's {seconds_text(whole)} go", markup.slowest_text(state)),
            markup.phase_bar(state.recent_phases_s),
            markup.phase_legend(state.recent_phases_s),
        ]
    if state.ranks:
        parts += [markup.heading("Ranks"), markup.rank_table(state.ranks[rank] for rank in sorted(state.ranks))]
    if printed:
        parts += [markup.heading("Rank 0 prints"), markup.preformatted(printed)]
    return markup.div("".join(parts), FONT)
