"""The static card of a run: what stays in the notebook when the view is gone, and in the run directory as card.html.

Made in the kernel of a RunState, so that attaching to a finished run shows the same. Imports no Jupyter; front ends find `_repr_mimebundle_`.
"""

from __future__ import annotations

import base64
import itertools
import math
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.advice import advise
from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel import markup
from nbddp.kernel.ancestry import parent_text
from nbddp.kernel.figure import loss_png
from nbddp.kernel.record import duration_s, number, started
from nbddp.kernel.stopping import stacks_path
from nbddp.kernel.tail import rendered
from nbddp.kernel.text import bytes_text, clock_text, count_text, rate_text, seconds_text, share_text, short_id, value_text
from nbddp.rundir import write_atomically
from nbddp.state import PHASES
from nbddp.tabular import FONT, html_table
from nbddp.visible import one_line, visible

if TYPE_CHECKING:
    from nbddp.advice import Advice
    from nbddp.rundir import RunDir
    from nbddp.state import RunState

PNG_BYTES = 60_000
NOTES = 8
MOST_VALUES = 10
NAME_LETTERS = 40
TRACEBACK_LINES = 200
STACKS_LETTERS = 20_000


@dataclass(frozen=True, slots=True)
class Card:
    """A run in three formats; `html` holds the picture itself and needs no other file."""

    html: str = field(repr=False)
    png: bytes | None = field(repr=False)
    text: str

    def mimebundle(self) -> dict[str, Any]:
        """The data of a display."""
        data: dict[str, Any] = {"text/html": self.html, "text/plain": self.text}
        if self.png is not None:
            data["image/png"] = base64.b64encode(self.png).decode("ascii")
        return data

    def _repr_mimebundle_(self, **_kwargs: object) -> dict[str, Any]:
        return self.mimebundle()

    def save(self, path: Path) -> None:
        """Write the card as a page of its own."""
        write_atomically(path, _page(self.html).encode())


def _page(body: str) -> str:
    """A page around the card that follows the reader's light or dark theme."""
    style = ":root{color-scheme:light dark}body{margin:24px auto;padding:0 16px;max-width:720px}"
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>nbddp run</title><style>{style}</style></head>\n<body>{body}</body></html>\n'


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong; the message names rank, cell and line."""

    message: str
    traceback: tuple[str, ...]


def make_card(run_dir: RunDir, state: RunState, *, plan_line: str, holds: str | None, error: str | None) -> Card:
    """Make the card of a run.

    Args:
        run_dir: the run; its place is shown relative to the working directory.
        state: all of its events, folded.
        plan_line: what was planned.
        holds: what the model of the notebook holds now; None where nothing was loaded.
        error: the message of the run's error; None where it has none.
    """
    facts = _facts(run_dir, state)
    failure = _failure(run_dir, state, error)
    png = loss_png(state, limit=PNG_BYTES)
    headline = _headline(run_dir, state)
    return Card(
        html=_html(run_dir, state, headline, plan_line, facts, failure, holds, png),
        png=png,
        text=_text(run_dir, state, headline, plan_line, facts, failure, holds),
    )


def _headline(run_dir: RunDir, state: RunState) -> str:
    """When it began and how long it took."""
    spec, result = run_dir.read_spec() or {}, run_dir.read_result() or {}
    begin, took_s = started(spec), duration_s(spec, number(result.get("time")))
    parts = []
    if begin is not None:
        parts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(begin)))
    if (shown_s := state.elapsed_s if took_s is None else took_s) is not None:
        parts.append(clock_text(shown_s))
    if state.stop_text:
        parts.append(state.stop_text)
    return " · ".join(parts)


def _facts(run_dir: RunDir, state: RunState) -> list[tuple[str, str]]:
    """Name and value of what there is to say about the training."""
    facts = []
    if (parent := parent_text(run_dir.read_spec() or {})) is not None:
        facts.append(("goes on from", parent))
    if state.step:
        total = f" of {count_text(state.total_steps)}" if state.total_steps and state.total_steps != state.step else ""
        epochs = state.plan.get("epochs")
        facts.append(("steps", f"{count_text(state.step)}{total} · epoch {state.epoch}" + (f" of {epochs}" if epochs else "")))
        facts += _values(state)
    if state.samples_per_s:
        facts.append(("throughput", f"{rate_text(state.samples_per_s)} samples/s · {rate_text(state.steps_per_s)} steps/s"))
    if len(state.ranks) > 1 and (slowest := markup.slowest_text(state.steady)):
        facts.append(("slowest", slowest))
    if state.checkpoints:
        facts.append(("checkpoints", ", ".join(_checkpoint(entry) for entry in state.checkpoints)))
    facts.append(("directory", place(run_dir.path)))
    return facts


def _values(state: RunState) -> list[tuple[str, str]]:
    """Last and lowest value of the loss and of what the validation recorded."""
    loss = state.epochs[-1].loss if state.epochs and state.epochs[-1].step == state.step else state.report.epoch_loss
    recorded = state.epochs[-1].values if state.epochs else {}  # what on_epoch_end reported, and the means of the step's own scalars
    values = dict(itertools.islice({"loss": loss, **state.validated, **recorded}.items(), MOST_VALUES))
    facts = []
    for name, value in values.items():
        lowest = state.lowest.get(name)
        known = name in ("loss", "val_loss") and lowest is not None and not lowest.value > value  # the mean of a part of an epoch can be lower
        aside = f" · lowest {value_text(lowest.value)}, epoch {lowest.epoch}" if known and lowest is not None else ""
        facts.append((one_line(name, NAME_LETTERS), f"{value_text(value)}{aside}"))
    if state.nonfinite_steps:
        facts.append(("not finite", f"the loss of {count_text(state.nonfinite_steps)} step{'s' if state.nonfinite_steps > 1 else ''}"))
    return facts


def _checkpoint(entry: dict[str, Any]) -> str:
    words = [f"epoch {entry['epoch']}"] if entry.get("epoch") is not None else []
    if isinstance(value := entry.get("value"), int | float) and math.isfinite(value):
        words.append(value_text(value))
    if entry.get("bytes"):
        words.append(bytes_text(entry["bytes"]))
    return f"{entry['name']} ({', '.join(words)})" if words else str(entry["name"])


def place(path: Path) -> str:
    """A path as the notebook would write it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        return str(path)


def _failure(run_dir: RunDir, state: RunState, error: str | None) -> _Failure | None:
    """The failure that ended the run: the verdict in the result, else the first that a rank reported."""
    if error is None and state.state != "failed":
        return None
    result = run_dir.read_result() or {}
    record = result.get("error") or next(iter(state.failures), {})
    message = error or record.get("message") or "no reason is recorded"
    lines = [rendered(line) for line in str(record.get("traceback") or "").strip().splitlines()]
    return _Failure(message, tuple(lines[-TRACEBACK_LINES:]))


def _advice(run_dir: RunDir, state: RunState) -> list[Advice]:
    """What could be faster next time."""
    try:
        return advise(state, TrainConfig(**(run_dir.read_spec() or {}).get("config", {})))
    except ConfigError:  # options of another version
        return []


def _stacks(run_dir: RunDir) -> str:
    """Where the ranks were when the run was terminated; empty where it was not."""
    try:
        path = stacks_path(run_dir)
        return visible(path.read_text(encoding="utf-8", errors="replace")[:STACKS_LETTERS]) if path.is_file() else ""
    except OSError:
        return ""


def _notes(state: RunState) -> list[tuple[str, str]]:
    """Level and text of the last messages."""
    return [(str(message.get("level", "info")), str(message.get("text", ""))) for message in state.messages][-NOTES:]


def _html(
    run_dir: RunDir,
    state: RunState,
    headline: str,
    plan_line: str,
    facts: list[tuple[str, str]],
    failure: _Failure | None,
    holds: str | None,
    png: bytes | None,
) -> str:
    name = markup.tag("b", escape(short_id(run_dir.id)), "margin:0 8px")
    parts = [
        markup.div(f"{markup.badge(state.state)} {name} {markup.quiet(headline)}"),
        markup.div(markup.quiet(plan_line), "margin-top:3px;overflow-wrap:anywhere"),
    ]
    if failure is not None:
        parts.append(markup.note(failure.message, markup.ERROR))
        if failure.traceback:
            trace = markup.preformatted(failure.traceback, colour=markup.ERROR, height=420)
            parts.append(markup.tag("details", f"<summary>traceback of the rank</summary>{trace}", "margin:4px 0"))
    if png is not None:
        source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
        parts.append(f'<img alt="loss over steps" src="{source}" style="width:100%;max-width:640px;height:auto;margin:8px 0 2px">')
    phases = state.steady.times_s
    if any(phases.values()):
        parts += [markup.heading(f"Where a step's {seconds_text(sum(phases.values()))} go"), markup.phase_bar(phases), markup.phase_legend(phases)]
    parts.append(markup.div(html_table((), [(markup.quiet(key), escape(value)) for key, value in facts], left=2, wrap=True), "margin-top:8px"))
    parts += [markup.message(level, text) for level, text in _notes(state)]
    if said := _advice(run_dir, state):
        parts += [markup.heading("Advice"), markup.advice(said)]
    if stacks := _stacks(run_dir):
        trace = markup.preformatted(stacks.splitlines(), height=420)
        parts.append(markup.tag("details", f"<summary>where the ranks were when they were terminated</summary>{trace}", "margin:4px 0"))
    if holds:
        parts.append(markup.div(escape(holds), "margin-top:8px;font-weight:600"))
    return markup.div("".join(parts), f"{FONT};max-width:680px")


def _text(
    run_dir: RunDir,
    state: RunState,
    headline: str,
    plan_line: str,
    facts: list[tuple[str, str]],
    failure: _Failure | None,
    holds: str | None,
) -> str:
    lines = [f"{short_id(run_dir.id)}: {state.state} · {headline}" if headline else f"{short_id(run_dir.id)}: {state.state}", plan_line]
    phases = state.steady.times_s
    if whole := sum(phases.values()):
        shares = ", ".join(f"{phase} {share_text(phases[phase], whole)}" for phase in PHASES)
        facts = [*facts[:-1], ("a step", f"{seconds_text(whole)}: {shares}"), facts[-1]]
    width = max(len(name) for name, _ in facts)
    lines += [f"  {name:<{width}}  {value}" for name, value in facts]
    lines += [f"  {level}: {text}" for level, text in _notes(state)]
    lines += [f"  advice: {part.text}" + (f" ({part.option})" if part.option else "") for part in _advice(run_dir, state)]
    if failure is not None:
        lines.append(failure.message)
    if holds:
        lines.append(holds)
    return "\n".join(lines)
