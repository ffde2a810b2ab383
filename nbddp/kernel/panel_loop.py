"""The kernel's main thread, and the cell that a panel stands in.

What widgets report may arrive in a thread of a subshell, and what is printed or displayed then belongs to no cell. Runs in the kernel.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from IPython.core.interactiveshell import InteractiveShell


class MainLoop:
    """The event loop of a kernel's main thread."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._cell: Any = None

    def remember_cell(self) -> None:
        """Remember the cell that is running."""
        self._cell = self._shell.get_parent()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the main thread: now, or as soon as no cell runs."""
        if threading.current_thread() is threading.main_thread():
            function()
        else:
            self._shell.kernel.io_loop.add_callback(function)

    def call_later(self, after_s: float, function: Callable[[], None]) -> None:
        """Call a function in the main thread after some time, when no cell runs."""
        loop = self._shell.kernel.io_loop
        loop.add_callback(loop.call_later, after_s, function)

    @contextlib.contextmanager
    def in_cell(self) -> Iterator[None]:
        """Have what is printed and displayed meanwhile appear below the remembered cell."""
        before = self._shell.get_parent()
        self._shell.set_parent(self._cell)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # what is written goes to the parent of the moment in which it is sent
            self._shell.set_parent(before)
