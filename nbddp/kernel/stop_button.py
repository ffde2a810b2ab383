"""The button that takes the steps of the order of stopping, one with each press.

Runs in the kernel: made in the thread that asked; a press arrives in a subshell's thread, or in the main one.
"""

from __future__ import annotations

import threading
from html import escape
from time import monotonic
from typing import TYPE_CHECKING

import ipywidgets

from nbddp.kernel import markup
from nbddp.kernel.kit import HIDDEN, hide
from nbddp.kernel.stopping import LABELS, MEANINGS
from nbddp.kernel.subshell import has_subshell, hear
from nbddp.tabular import FONT

if TYPE_CHECKING:
    from nbddp.kernel.kit import Kit
    from nbddp.kernel.stopping import Stopping

REST_S = 0.3
"""The second click of a double click is no press."""
PATIENCE_S = 3.0
"""How long the front end may take to open a subshell, before the view says what to do without."""
STACKS_LIMIT = 24_000
INSTEAD = "to stop, use the interrupt (■ in the toolbar): this front end does not deliver clicks while a cell runs"


class StopButton:
    """A button whose label says what its next press does, and what the last one did below it.

    Args:
        stopping: the order that it goes by.
        blocking: whether a cell waits for the run; then clicks arrive through a subshell only, and without one the text says what to use instead.
    """

    def __init__(self, kit: Kit, stopping: Stopping, *, blocking: bool) -> None:
        self._stopping, self._blocking = stopping, blocking
        self._opened = monotonic()
        self._lock = threading.Lock()
        self._resting = self._deaf = False
        self._stage = stopping.stage
        self.button = kit.make(ipywidgets.Button, "nb-stop", description=LABELS[self._stage], tooltip=MEANINGS[self._stage])
        hear(self.button)
        self.button.on_click(self._pressed)
        self.said = kit.html("nb-said", HIDDEN)
        stopping.add_listener(self._show)

    def update(self) -> None:
        """Follow what was asked elsewhere; say what to use instead where clicks do not arrive."""
        if self._stage != self._stopping.stage:
            self._show()
        if self._blocking and monotonic() - self._opened > PATIENCE_S and self._stage == 0:
            deaf = not has_subshell()
            if deaf != self._deaf:
                self._deaf = deaf
                hide(self.button, hidden=deaf)
                self._say(markup.quiet(INSTEAD) if deaf else "")

    def _pressed(self, _button: object) -> None:
        with self._lock:
            if self._resting:
                return
            self._resting = True
        self.button.disabled = True
        # The stacks take up to two seconds, for which neither the main thread nor the subshell is to wait.
        threading.Thread(target=self._advance, name="stop", daemon=True).start()
        timer = threading.Timer(REST_S, self._rested)
        timer.daemon = True
        timer.start()

    def _advance(self) -> None:
        try:
            self._stopping.advance()
        except OSError as error:  # the request can't be written; the next step needs no disk
            self._say(markup.note(f"asking for it failed: {error.strerror}; press again to terminate", markup.ERROR))

    def _rested(self) -> None:
        self._resting = False
        self.button.disabled = self._stage >= len(LABELS) - 1

    def _show(self) -> None:
        stage = self._stage = self._stopping.stage
        self.button.description, self.button.tooltip = LABELS[stage], MEANINGS[stage]
        text = markup.note(self._stopping.said(stage, "press again"), markup.WARNING)
        stacks = self._stopping.stacks
        if stacks:
            shown = stacks if len(stacks) <= STACKS_LIMIT else f"{stacks[:STACKS_LIMIT]}\n…"
            text += markup.tag("pre", escape(shown), "max-height:260px;overflow-y:auto")
        self._say(text)

    def _say(self, html: str) -> None:
        self.said.value = markup.div(html, FONT) if html else ""
        hide(self.said, hidden=not html)
