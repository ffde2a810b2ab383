"""The notebook's cells as IPython knows them: which one is running, which file name its code has, what its text is.

Runs in the kernel and in terminal IPython; imports neither torch nor ipykernel.
"""

from __future__ import annotations

import linecache
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp.kernel.request import Cell

if TYPE_CHECKING:
    from types import FrameType

    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell


def unix_lines(text: str) -> str:
    """The text with the line ends that Python's own tokenizer counts."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the body of a cell magic stands: `offset` lines of `cell` come before its first line, the magic's own included."""

    cell: Cell
    offset: int


class RunningCells:
    """Follows which cells are being executed; a cell may run another, as %%capture does.

    Register `started` and `ended` for IPython's pre_run_cell and post_run_cell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._running: list[tuple[str, float]] = []

    def started(self, info: ExecutionInfo) -> None:
        self._running.append((unix_lines(str(info.raw_cell)), time.time()))

    def ended(self, result: ExecutionResult) -> None:
        if self._running:
            self._running.pop()

    def requested(self) -> float:
        """Unix time at which the outermost running cell was started."""
        running = self._running[-max(1, len(self._filenames())) :]
        return running[0][1] if running else time.time()

    def origin(self, magic: str, line: str, body: str | None) -> Origin:
        """The cell that a magic runs in, and where its body stands there.

        Raises nothing: a magic that was called from a program, with a body that stands in no cell, gets a cell of its own text.
        """
        filenames = self._filenames()
        sources = [source for source, _ in self._running[-len(filenames) :]] if filenames else []
        if len(sources) < len(filenames):  # the extension was loaded by the cell that is running
            sources = [self._history(self._number(filename)) for filename in filenames]
        for filename, source in zip(filenames, sources, strict=True):
            if body is None:
                return Origin(Cell(self._number(filename), source, filename), 0)
            offset = _offset(source, magic, body)
            if offset:
                return Origin(Cell(self._number(filename), source, filename), offset)
        source = f"%%{magic} {line}\n{unix_lines(body)}" if body is not None else f"%{magic} {line}"
        number = self._number(filenames[0]) if filenames else None
        filename = self._shell.compile.cache(source, number or 0, raw_code=source)
        return Origin(Cell(number, source, filename), 0 if body is None else 1)

    def _filenames(self) -> list[str]:
        """File names of the cells on this thread's stack, the outermost first."""
        names: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "<module>" and code.co_filename in self._shell.compile._filename_map:
                names.append(code.co_filename)
            frame = frame.f_back
        return names[::-1]

    def _number(self, filename: str) -> int | None:
        number = self._shell.compile._filename_map.get(filename)
        return None if number is None else int(number)

    def _history(self, number: int | None) -> str:
        history = getattr(self._shell.history_manager, "input_hist_raw", [])
        return unix_lines(history[number]) if number is not None and number < len(history) else ""


def _offset(source: str, magic: str, body: str) -> int:
    """Number of lines before the body, which ends the cell; 0 where the cell doesn't hold it."""
    lines = source.rstrip("\n").split("\n")
    text = unix_lines(body).rstrip("\n")
    offset = len(lines) - (len(text.split("\n")) if text else 0)
    head = lines[offset - 1] if 0 < offset <= len(lines) else ""
    return offset if re.match(rf"\s*%%{magic}\b", head) else 0


class CellSources(Mapping[str, Any]):
    """What the bundle takes along so that tracebacks on the ranks show cells: file name of code to `make(number, source)`.

    Reads IPython's own tables when it is asked, so that it costs nothing however many cells there are.
    """

    def __init__(self, shell: InteractiveShell, make: Callable[[int | None, str], Any]) -> None:
        self._numbers: Mapping[str, int] = shell.compile._filename_map
        self._make = make

    def __getitem__(self, filename: str) -> Any:
        number = self._numbers[filename]
        if filename not in linecache.cache:
            raise KeyError(filename)
        return self._make(number, "".join(linecache.getlines(filename)))

    def __iter__(self) -> Iterator[str]:
        return (filename for filename in list(self._numbers) if filename in linecache.cache)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def running_cell(shell: InteractiveShell) -> Cell | None:
    """The cell that is running, for a caller that is no magic; None outside a cell."""
    running = RunningCells(shell)
    return running.origin("", "", None).cell if running._filenames() else None
