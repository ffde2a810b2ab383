"""The view of a run without a front end: a line that is written over on a terminal, a line now and then elsewhere.

Runs in a terminal IPython or in plain Python; imports no Jupyter.
"""

from __future__ import annotations

import math
import shutil
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING

from nbddp.kernel.text import clock_text, count_text, rate_text, share_text, short_id, value_text

if TYPE_CHECKING:
    from typing import TextIO

    from nbddp.kernel.card import Card
    from nbddp.rundir import RunDir
    from nbddp.state import RunState

TTY_PERIOD_S = 0.25
PERIOD_S = 10.0


def progress_line(state: RunState) -> str:
    """The state of a run in one line."""
    parts = [state.state if state.state == state.phase or state.phase == "training" else f"{state.state} ({state.phase})"]
    if state.step:
        epochs = state.plan.get("epochs")
        parts.append(f"epoch {state.epoch}" + (f"/{epochs}" if epochs else ""))
        total = f"/{count_text(state.total_steps)} ({share_text(state.step, state.total_steps)})" if state.total_steps else ""
        parts.append(f"step {count_text(state.step)}{total}")
        parts.append(f"loss {value_text(state.report.loss)} ({value_text(state.report.epoch_loss)})")
    if math.isfinite(validated := state.validated.get("val_loss", math.nan)):
        parts.append(f"val_loss {value_text(validated)}")
    if state.samples_per_s:
        parts.append(f"{rate_text(state.samples_per_s)} samples/s")
    if state.eta_s is not None and not state.done:
        parts.append(f"{clock_text(state.eta_s)} to go")
    return " · ".join(parts)


class TerminalView:
    """Progress on stderr, the card's text on stdout."""

    def __init__(self, run_dir: RunDir, state: RunState, *, plan_line: str, title: str | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._lock = threading.Lock()
        self._finished = False
        self._written = -math.inf
        self._last = ""
        self._stream.write(f"{title or short_id(run_dir.id)}: {plan_line}\n")
        self.update(state)

    def update(self, state: RunState) -> None:
        """Write the state's line if it is time for one."""
        with self._lock:
            now = monotonic()
            if self._finished or now - self._written < (TTY_PERIOD_S if self._tty else PERIOD_S):
                return
            line = progress_line(state)
            if line == self._last:
                return
            self._written, self._last = now, line
            if self._tty:
                self._stream.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
            else:
                self._stream.write(f"{line}\n")
            self._stream.flush()

    def finish(self, card: Card) -> None:
        """Clear the line and print the card once."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            if self._tty:
                self._stream.write("\r\x1b[2K")
            self._stream.flush()
        sys.stdout.write(f"{card.text}\n")
        sys.stdout.flush()
