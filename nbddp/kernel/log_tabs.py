"""What the ranks print, in the live view: a tab of what rank 0 prints beside the log lines, and one for the whole log of each rank.

Runs in the kernel: made in the thread that asked, read in the follower's, switched by the browser in any. Only the log that is shown is read and sent.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import ipywidgets

from nbddp.kernel.subshell import hear
from nbddp.kernel.tail import Tail

if TYPE_CHECKING:
    from nbddp.kernel.kit import Kit
    from nbddp.rundir import RunDir
    from nbddp.state import RunState

PRINTED_LINES, LOG_LINES = 40, 200
LIMIT = 12_000
"""Characters of HTML: of a log that is written all the time, a second's share of what the view may send."""


class LogTabs:
    """Tabs of which one is followed."""

    period_s = 1.0

    def __init__(self, kit: Kit, run_dir: RunDir, nproc: int) -> None:
        self._kit, self._run_dir = kit, run_dir
        self._lock = threading.RLock()  # the tabs may select one while they grow
        self._pages: list[ipywidgets.HTML] = []
        self._nproc = 0
        self.tab = kit.make(ipywidgets.Tab, "nb-logs")
        self._grow(nproc)
        self._selected = 0
        self._tail = self._open(0)
        hear(self.tab)
        self.tab.observe(self._switch, "selected_index")

    def render(self, state: RunState) -> str | None:
        """The end of the log that is shown; None where nothing was printed."""
        with self._lock:
            if (known := max(state.ranks, default=-1) + 1) > self._nproc:
                self._grow(known)
            content = self._content()
            return None if content == self._pages[self._selected].value else content

    def show(self, content: str) -> None:
        """Put it on its page, unless another was opened meanwhile."""
        with self._lock:
            self._pages[self._selected].value = content

    def _grow(self, nproc: int) -> None:
        titles = ["printed", *(f"rank {rank}" for rank in range(nproc))]
        self._pages += [self._kit.html("nb-log") for _ in titles[len(self._pages) :]]
        self._nproc = nproc
        with self.tab.hold_sync():
            self.tab.children = self._pages
            self.tab.titles = titles

    def _open(self, index: int) -> Tail:
        if index == 0:
            return Tail(self._run_dir.log(0), PRINTED_LINES)
        return Tail(self._run_dir.log(index - 1), LOG_LINES, omit=())

    def _content(self) -> str:
        text = self._tail.html(LIMIT)
        return f"<pre>{text}</pre>" if text else "<pre>nothing yet</pre>"

    def _switch(self, _change: object) -> None:
        """Show the log that was chosen, from its end; the one that was shown is let go."""
        with self._lock:
            chosen = self.tab.selected_index or 0
            if chosen == self._selected:
                return
            self._pages[self._selected].value = ""
            self._selected, self._tail = chosen, self._open(chosen)
            self._pages[chosen].value = self._content()
