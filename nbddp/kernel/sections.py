"""The text of the live view, as HTML: what the run is and how far, its figures, where its time goes.

Runs in the kernel; pure functions of a state. Imports no Jupyter.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel import markup
from nbddp.kernel.text import clock_text, count_text, rate_text, seconds_text, value_text
from nbddp.tabular import FONT, NUMBERS, html_table
from nbddp.window import OWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbddp.advice import Advice
    from nbddp.state import RankState, Report, RunState

NOTES = 3
MOST_ROWS = 16


def head(state: RunState, *, title: str, run: str, plan_line: str, elapsed_s: float) -> str:
    """Name and state, plan, progress, and what the ranks told last."""
    name = markup.tag("b", escape(title), "margin:0 8px")
    clock = markup.tag("span", markup.quiet(clock_text(elapsed_s)), f"margin-left:auto;padding-left:8px;{NUMBERS}")
    top = markup.div(f"{markup.badge(state.state)}{name}{markup.quiet(run)}{clock}", "display:flex;align-items:baseline;flex-wrap:wrap")
    plan = markup.div(markup.quiet(plan_line), "margin-top:3px;overflow-wrap:anywhere")
    notes = "".join(markup.message(str(message.get("level", "info")), str(message.get("text", ""))) for message in list(state.messages)[-NOTES:])
    if state.stop_text and not state.done:
        notes += markup.note(f"stopping: {state.stop_text}", markup.WARNING)
    progress = markup.progress_bar(state.progress, state.state)
    return markup.div(top + plan + progress + markup.div(markup.quiet(progress_text(state)), NUMBERS) + notes, FONT)


def progress_text(state: RunState) -> str:
    """How far the run is, and how long it will take."""
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


def figures(state: RunState) -> str:
    """Loss, validation loss, throughput and learning rate; the times of the log line."""
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
    rows = [("data", report.data_s, report.mean_data_s), ("network", report.network_s, report.mean_network_s)]
    if several:
        rows.append(("aggregation (waiting)", report.aggregation_s, report.mean_aggregation_s))
    cells = [(escape(name), seconds_text(now), seconds_text(mean)) for name, now, mean in rows]
    return html_table(("time of a step", "now", "epoch mean"), cells)


def timings(state: RunState, advice: Sequence[Advice]) -> str:
    """Where each step's time goes, now and in the recent past; the ranks; what could be faster."""
    parts = []
    if advice:
        parts += [markup.heading("Advice"), markup.advice(advice)]
    recent = state.recent_phases_s
    if any(recent.values()):
        bars = markup.window_bars(state.window) if state.window.blocks else markup.phase_bar(recent)
        parts += [markup.heading(f"Where a step's {seconds_text(sum(recent.values()))} go", markup.slowest_text(state)), bars, markup.phase_legend(recent)]
    if state.ranks:
        shown = sorted(state.ranks.values(), key=_own_s, reverse=True)[:MOST_ROWS]
        aside = f"the {MOST_ROWS} of {len(state.ranks)} that work longest for a step" if len(state.ranks) > MOST_ROWS else ""
        parts += [markup.heading("Ranks", aside), markup.rank_table(sorted(shown, key=lambda row: row.rank), markup.slowest_rank(state))]
    return markup.div("".join(parts), FONT) if parts else ""


def _own_s(row: RankState) -> float:
    return sum(row.times_s.get(phase, 0.0) for phase in OWN)
