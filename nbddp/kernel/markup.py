"""Pieces of HTML that the live view and the card are made of.

Styles are inline and colours come from JupyterLab's variables with the surrounding text's own as fallback: what is shown survives a front end that
strips style sheets, and fits a light and a dark theme. Everything that comes from outside goes through `escape`. Runs in the kernel.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from nbddp.kernel.text import bytes_text, count_text, rate_text, seconds_text, share_text
from nbddp.state import PHASES
from nbddp.tabular import NUMBERS, QUIET, html_table
from nbddp.window import Block

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbddp.advice import Advice
    from nbddp.state import RankState
    from nbddp.window import Window

MONO = "font-family:var(--jp-code-font-family,monospace);font-size:12px;line-height:1.4"
LINE = "rgba(128,128,128,.28)"
STATE_COLOURS = {"starting": "#646c76", "running": "#2b6bd8", "finished": "#1f7a45", "stopped": "#9a6100", "failed": "#c93325", "unreadable": "#c93325"}
"""White text on them is readable."""
PHASE_COLOURS = {"data": "#e0a526", "forward": "#4285f4", "backward": "#9166d6", "sync": "#e2604f", "optimizer": "#35a27b"}
WARNING, ERROR = "#d08a1d", "#dc4638"
MOST_BARS = 6
SHORT_CODE = 40


def tag(name: str, content: str, style: str = "", **attributes: str) -> str:
    """An element around content that is HTML already."""
    words = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
    return f'<{name}{words} style="{style}">{content}</{name}>' if style else f"<{name}{words}>{content}</{name}>"


def div(content: str, style: str = "", **attributes: str) -> str:
    """A block around content that is HTML already."""
    return tag("div", content, style, **attributes)


def quiet(text: str) -> str:
    """Secondary text, escaped."""
    return tag("span", escape(text), QUIET)


def code(text: str) -> str:
    """Something to write, escaped; a short one stays in one line."""
    whole = ";white-space:nowrap" if len(text) <= SHORT_CODE else ""
    return tag("code", escape(text), f"{MONO};color:inherit;background:{LINE};padding:1px 5px;border-radius:3px{whole}")


def heading(title: str, aside: str = "") -> str:
    """The title of a section, with a quieter remark beside it."""
    return div(tag("b", escape(title)) + (f" &nbsp;{quiet(aside)}" if aside else ""), "margin:10px 0 3px")


def badge(state: str) -> str:
    """A run's state in its colour."""
    colour = STATE_COLOURS.get(state, STATE_COLOURS["starting"])
    return tag(
        "span",
        escape(state),
        f"display:inline-block;padding:1px 9px;border-radius:9px;background-color:{colour};color:#fff;font-weight:600;font-size:12px",
    )


def progress_bar(share: float | None, state: str) -> str:
    """A thin bar; without a known share it is empty."""
    width = 100 * (share or 0.0)
    fill = div("", f"width:{width:.1f}%;height:6px;border-radius:3px;background-color:{STATE_COLOURS.get(state, STATE_COLOURS['starting'])}")
    known = {} if share is None else {"aria-valuenow": f"{width:.0f}"}
    attributes = {"role": "progressbar", "aria-label": "steps done", "aria-valuemin": "0", "aria-valuemax": "100", **known}
    return div(fill, f"height:6px;border-radius:3px;background-color:{LINE};margin:7px 0 4px;overflow:hidden", **attributes)


def tile(label: str, value: str, aside: str = "") -> str:
    """One figure with its name above and a remark below."""
    return div(
        div(escape(label), f"{QUIET};font-size:11px;overflow-wrap:anywhere")
        + div(escape(value), f"font-size:17px;font-weight:600;{NUMBERS};overflow-wrap:anywhere")
        + div(escape(aside) or "&nbsp;", f"{QUIET};font-size:11px;{NUMBERS}"),
        "min-width:0",
    )


def tiles(parts: Iterable[str]) -> str:
    """Figures in columns, as many as fit."""
    return div("".join(parts), "display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:8px 16px;margin:6px 0 4px")


def phase_bar(times_s: Mapping[str, float], *, height: int = 16, whole_s: float | None = None) -> str:
    """A stacked bar of a step's phases, as wide as their share of `whole_s` (default: of their own sum)."""
    whole = whole_s or sum(times_s.values())
    parts = ""
    for phase in PHASES:
        share = 100 * times_s.get(phase, 0.0) / whole if whole > 0 else 0.0
        if share > 0:
            title = f"{phase} {seconds_text(times_s[phase])}"
            parts += tag("div", "", f"flex:0 0 {share:.2f}%;background-color:{PHASE_COLOURS[phase]}", title=title)
    shares = ", ".join(f"{phase} {share_text(times_s.get(phase, 0.0), sum(times_s.values()))}" for phase in PHASES)
    style = f"display:flex;width:100%;height:{height}px;border-radius:3px;overflow:hidden;background-color:{LINE}"
    return div(parts, style, role="img", **{"aria-label": shares})


def phase_legend(times_s: Mapping[str, float]) -> str:
    """What the colours of `phase_bar` are, with times and shares."""
    whole = sum(times_s.values())
    items = []
    for phase in PHASES:
        time_s = times_s.get(phase, 0.0)
        figures = quiet(f"{seconds_text(time_s)} · {share_text(time_s, whole)}")
        items.append(tag("span", f"{_swatch(phase)}{phase} {figures}", "white-space:nowrap;margin-right:16px"))
    return div(" ".join(items), f"{NUMBERS};font-size:12px;margin-top:4px")


def phase_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """What the colours of `phase_bar` are, with the mean times of some sets of steps, each with its name, and of the first also the shares."""
    first = next(iter(columns.values()))
    whole = sum(first.values())
    rows = []
    for phase in PHASES:
        times = [escape(seconds_text(times_s.get(phase, 0.0))) for times_s in columns.values()]
        rows.append((f"{_swatch(phase)}{phase}", times[0], escape(share_text(first.get(phase, 0.0), whole)), *times[1:]))
    sums = [tag("b", escape(seconds_text(sum(times_s.values())))) for times_s in columns.values()]
    rows.append((tag("b", "a step"), sums[0], "", *sums[1:]))
    names = list(columns)
    return html_table(("phase", names[0], "share", *names[1:]), rows)


def _swatch(phase: str) -> str:
    style = f"display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background-color:{PHASE_COLOURS[phase]}"
    return tag("span", "", style)


def slowest_text(steps: Block) -> str:
    """Which rank is the slowest most often, and how long the fastest waits for the slowest; empty where no rank is."""
    if not steps.slowest:
        return ""
    rank = max(steps.slowest, key=lambda known: (steps.slowest[known], -known))
    share = share_text(steps.slowest[rank], steps.steps)
    return f"rank {rank} is the slowest in {share} of the steps; the fastest waits {seconds_text(steps.wait_s / steps.steps)} for it"


def window_bars(window: Window) -> str:
    """A bar for each of the recent stretches of steps, the newest last, on one scale; beside it how long a step took and which rank was the slowest."""
    blocks = window.blocks or ((window.recent,) if window.recent.seconds else ())
    size = math.ceil(len(blocks) / MOST_BARS)
    stretches = [sum(blocks[max(0, end - size) : end], Block()) for end in range(len(blocks), 0, -size)][::-1] if blocks else []
    longest = max((stretch.step_s for stretch in stretches), default=0.0)
    rows = []
    for number, stretch in enumerate(stretches, 1):
        label = f"{'last ' if number == len(stretches) else ''}{count_text(stretch.steps)} step{'s' if stretch.steps != 1 else ''}"
        cells = [
            tag("span", quiet(label), "flex:0 0 96px;text-align:right;white-space:nowrap"),
            div(phase_bar(stretch.times_s, height=13, whole_s=longest), "flex:1 1 120px;min-width:60px"),
            tag("span", escape(seconds_text(stretch.step_s)), "flex:0 0 54px;text-align:right;white-space:nowrap"),
        ]
        if (slowest := stretch.slowest_rank) is not None:
            share = share_text(stretch.slowest[slowest], stretch.steps)
            cells.append(tag("span", quiet(f"rank {slowest} slowest, {share}"), "flex:0 0 136px;margin-left:auto;white-space:nowrap"))
        rows.append(div("".join(cells), f"display:flex;flex-wrap:wrap;align-items:center;gap:0 8px;font-size:12px;margin:2px 0;{NUMBERS}"))
    return div("".join(rows))


def advice(parts: Iterable[Advice]) -> str:
    """What could be faster, each with the option to write."""
    rows = []
    for part in parts:
        option = "" if part.option is None else f" {code(part.option)}"
        rows.append(div(escape(part.text) + option, f"border-left:3px solid {WARNING};padding:1px 0 1px 9px;margin:5px 0;overflow-wrap:anywhere"))
    return "".join(rows)


def rank_table(ranks: Iterable[RankState], recent: Block) -> str:
    """One row per rank: device, what it does, its step, throughput, memory, and where its own time of the recent steps went; the slowest is marked."""
    rows, slowest = list(ranks), recent.slowest_rank
    times_s = {row.rank: {phase: recent.rank_s(row.rank, phase) for phase in PHASES} if row.rank in recent.ranks_s else row.times_s for row in rows}
    longest = max((sum(times.values()) for times in times_s.values()), default=0.0)
    cells = [
        (
            f"{row.rank}" + (f" {tag('b', 'slowest', 'font-size:11px')}" if row.rank == slowest else ""),
            escape(row.device) or "–",
            escape(row.phase),
            div(phase_bar(times_s[row.rank], height=9, whole_s=longest), "width:120px;margin-top:5px") if times_s[row.rank] else "",
            count_text(row.step),
            rate_text(row.samples_per_s) if row.samples_per_s else "–",
            bytes_text(row.memory) if row.memory else "–",
        )
        for row in rows
    ]
    inner = html_table(("rank", "device", "phase", "time of a step", "step", "samples/s", "memory"), cells, left=4)
    return div(inner, "max-height:236px;overflow-y:auto")


def preformatted(lines: Iterable[str], *, colour: str = "", height: int = 0) -> str:
    """Lines of text in a box, escaped; long ones wrap."""
    border = f"border-left:3px solid {colour or LINE}"
    limit = f";max-height:{height}px;overflow-y:auto" if height else ""
    style = f"{MONO};margin:2px 0;padding:2px 0 2px 9px;{border};white-space:pre-wrap;overflow-wrap:anywhere;background:none;color:inherit{limit}"
    return tag("pre", escape("\n".join(lines)), style)


def note(text: str, colour: str) -> str:
    """A line with a coloured edge: a warning or an error, escaped."""
    return div(escape(text), f"border-left:3px solid {colour};padding:1px 0 1px 9px;margin:5px 0;white-space:pre-wrap;overflow-wrap:anywhere")


def message(level: str, text: str) -> str:
    """What a rank tells the user, in the colour of its level."""
    return note(text, {"warning": WARNING, "error": ERROR}.get(level, LINE))
