"""The last lines that a rank printed, as a terminal would show them.

Runs in the kernel, in the follower's thread; reads only what was appended. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# ECMA-48: control sequences (colours, cursor), operating-system commands (titles, links), and the two-byte escapes.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]")
CONTROLS = re.compile(r"[\x00-\x07\x0b-\x1f\x7f-\x9f]")
BACKSPACE = re.compile(r"[^\x08]\x08")
LOG_LINE = "Train Epoch:"
CHUNK = 1 << 16
LONGEST = 400


def rendered(line: str) -> str:
    """One line as a terminal leaves it: no escapes, what a carriage return or a backspace overwrote is gone, tabs are spaces."""
    line = ESCAPES.sub("", line)
    if "\r" in line or "\b" in line:
        line = _overwritten(line)
    return CONTROLS.sub("", line.expandtabs(8)).rstrip()


def _overwritten(line: str) -> str:
    shown = ""
    for part in line.split("\r"):
        while (erased := BACKSPACE.sub("", part)) != part:
            part = erased
        part = part.lstrip("\b")
        shown = part + shown[len(part) :]
    return shown


class Tail:
    """Follow a log file and keep its last lines; the log lines that are drawn as a curve are left out.

    However much is printed, a call of `lines` reads at most 64 KiB: what lies before them is skipped.
    """

    def __init__(self, path: Path, lines: int = 10) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=lines)

    def lines(self) -> list[str]:
        """The last lines now; the one that is being written is among them."""
        self._read()
        lines = list(self._lines)
        current = self._shown(self._partial)
        if current:
            lines.append(current)
        return lines[-(self._lines.maxlen or 0) :]

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
            self._partial = b""
            data = data[data.find(b"\n") + 1 :] or data
        self._offset = size
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-CHUNK:]
        for raw in whole:
            if (line := self._shown(raw)) is not None:
                self._lines.append(line)

    @staticmethod
    def _shown(raw: bytes) -> str | None:
        line = rendered(raw.decode("utf-8", errors="replace"))
        if line.startswith(LOG_LINE):
            return None
        return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
