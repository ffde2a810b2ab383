"""The text of the live view, as HTML: what the run is and how far, its figures, where its time goes.

Runs in the kernel; pure functions of a state. Imports no Jupyter.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel import markup
from nbddp.kernel.text import clock_text, count_text, rate_text, seconds_text, value_text
from nbddp.tabular import FONT, NUMBERS
from nbddp.window import OWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbddp.advice import Advice
    from nbddp.state import RunState
    from nbddp.window import Block

NOTES = 3
MOST_ROWS = 16
MOST_VALUES = 6


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
    if state.progress is not None and state.newest_step:
        parts.append(f"{math.floor(100 * state.progress)} %")
    if state.phase not in ("training", state.state):
        parts.append(state.phase)
    if state.newest_step:
        epochs = state.plan.get("epochs")
        parts.append(f"epoch {state.newest_epoch}" + (f" of {epochs}" if epochs else ""))
        parts.append(f"step {count_text(state.newest_step)}" + (f" of {count_text(state.total_steps)}" if state.total_steps else ""))
        if state.eta_s is not None:
            parts.append(f"{clock_text(state.eta_s)} to go")
    return " · ".join(parts) or "starting the ranks"


def figures(state: RunState) -> str:
    """Loss, validation loss, throughput and learning rate, and what else was recorded."""
    if not state.step:
        return ""
    report = state.report
    shown = [markup.tile("loss", value_text(report.loss), f"epoch mean {value_text(report.epoch_loss)}")]
    recorded = {**state.validated, **(state.epochs[-1].values if state.epochs else {})}
    for name, value in sorted(recorded.items(), key=lambda item: item[0] != "val_loss")[:MOST_VALUES]:
        lowest = state.lowest.get("val_loss") if name == "val_loss" else None
        shown.append(markup.tile(name, value_text(value), f"lowest {value_text(lowest.value)}, epoch {lowest.epoch}" if lowest else ""))
    if state.samples_per_s:
        shown.append(markup.tile("samples/s", rate_text(state.samples_per_s), f"{rate_text(state.steps_per_s)} steps/s"))
    if math.isfinite(state.lr):
        shown.append(markup.tile("lr", f"{state.lr:.3g}"))
    return markup.div(markup.tiles(shown), FONT)


def advice(said: Sequence[Advice]) -> str:
    """What could be faster."""
    return markup.div(markup.heading("Advice") + markup.advice(said), FONT) if said else ""


def timings(state: RunState) -> str:
    """Where each step's time goes, now and in the recent past; the ranks."""
    parts = []
    recent = state.window.recent
    if recent.times_s:
        parts += [_where(state, recent)]
    if state.ranks:
        shown = sorted(state.ranks.values(), key=lambda row: recent.rank_s(row.rank, *OWN), reverse=True)[:MOST_ROWS]
        aside = f"the {MOST_ROWS} of {len(state.ranks)} that work longest for a step" if len(state.ranks) > MOST_ROWS else ""
        parts += [markup.heading("Ranks", aside), markup.rank_table(sorted(shown, key=lambda row: row.rank), recent)]
    return markup.div("".join(parts), FONT) if parts else ""


def _where(state: RunState, recent: Block) -> str:
    """The phases of the recent steps: heading, bars and table are of the same steps, the warm-up left out."""
    total = state.window.total
    columns = {f"last {count_text(recent.steps)} steps": recent.times_s}
    if total.steps > recent.steps:
        columns[f"all {count_text(total.steps)}" + (" of this stage" if len(state.stages) > 1 else "")] = total.times_s
    slowest = markup.slowest_text(recent) if len(recent.ranks_s) > 1 else ""
    bars = markup.div(markup.window_bars(state.window), "flex:1 1 420px;min-width:0")
    table = markup.div(markup.phase_table(columns), "flex:0 1 auto;min-width:0")
    both = markup.div(bars + table, "display:flex;flex-wrap:wrap;gap:6px 28px;align-items:flex-start")
    return markup.heading(f"Where a step's {seconds_text(recent.step_s)} go", slowest) + both
