"""The last lines that a rank printed, as a terminal would show them.

Runs in the kernel, in the follower's thread; reads only what was appended. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from nbddp.kernel.ansi import Screen

if TYPE_CHECKING:
    from pathlib import Path

OURS = ("Train Epoch:", "Validation Epoch:", "Process group initialised:")
"""How the lines begin that the ranks write by themselves."""
CHUNK = 1 << 16
LONGEST = 400


def rendered(line: str) -> str:
    """One line as a terminal leaves it: no escapes, what a carriage return or a backspace overwrote is gone, tabs are spaces."""
    screen = Screen(1, width=max(80, 8 * len(line)))
    screen.feed(line)
    return "".join(screen.lines())


class Tail:
    """Follow a log file and keep its last lines.

    However much is printed, a look at it reads at most 64 KiB: what lies before them is skipped.

    Args:
        path: the file; it may not be there yet.
        lines: how many to keep.
        omit: complete lines that begin with one of these are left out; default: those that the user's code did not print.
    """

    def __init__(self, path: Path, lines: int = 10, *, omit: tuple[str, ...] = OURS) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._screen = Screen(lines, width=LONGEST, omit=omit)

    def lines(self) -> list[str]:
        """The last lines now, without colours; the one that is being written is among them."""
        self._read()
        return self._screen.lines()

    def html(self, limit: int) -> str:
        """The last lines now, in colour, as many as fit into `limit` characters of HTML."""
        self._read()
        return self._screen.html(limit)

    def _read(self) -> None:
        try:
            size = self._path.stat().st_size
            if size <= self._offset:
                return
            start = max(self._offset, size - CHUNK)
            with self._path.open("rb") as file:
                file.seek(start)
                data = file.read(size - start)
        except OSError:  # not there yet, or pruned
            return
        if start > self._offset:  # begin with a whole line, if there is one
            self._screen.forget_line()
            self._decoder.reset()
            data = data[data.find(b"\n") + 1 :] or data
        self._offset = size
        self._screen.feed(self._decoder.decode(data))
