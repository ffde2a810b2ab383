"""The kernel's main thread, and the cell that a panel stands in.

What widgets report arrives in the thread of a subshell, where the front end has one, also while a cell keeps the main thread busy; what is printed or
displayed there belongs to no cell. Runs in the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import ipywidgets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from IPython.core.interactiveshell import InteractiveShell

PATIENCE_S = 0.4
"""How long the main thread may take to answer, before it is said that a cell keeps it busy."""


class MainLoop:
    """The event loop of a kernel's main thread."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._cell: Any = None
        self._page: Any = None

    def remember_cell(self) -> None:
        """Remember the cell that is running, and the page that shows it."""
        self._cell = self._shell.get_parent()
        self._page = _page()

    @property
    def place(self) -> tuple[str, str]:
        """The remembered cell, empty where the front end does not say which it is, and its execution."""
        parent = self._cell or {}
        return str((parent.get("metadata") or {}).get("cellId") or ""), str((parent.get("header") or {}).get("msg_id") or "")

    @property
    def page_is_there(self) -> bool:
        """Whether no other page has asked for the widgets since: one that was loaded later does not show what appears below the remembered cell."""
        return _page() is self._page

    def call(self, function: Callable[[], None], waiting: Callable[[], None] | None = None, *, after_s: float = 0.0) -> None:
        """Call a function in the main thread, now or after some time, as soon as no cell runs.

        `waiting` is called where that takes long, from the thread that asks.
        """
        if threading.current_thread() is threading.main_thread() and not after_s:
            function()
            return
        begun = threading.Event()

        def begin() -> None:
            begun.set()
            function()

        loop = self._shell.kernel.io_loop
        loop.add_callback(loop.call_later, after_s, begin)
        if waiting is not None and threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(RuntimeError):  # a thread without a loop, which asks for nothing more
                asyncio.get_running_loop().call_later(after_s + PATIENCE_S, lambda: None if begun.is_set() else waiting())

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


def _page() -> object:
    """The channel by which a page asked for all widgets last: each page opens one of its own."""
    return getattr(ipywidgets.Widget, "_control_comm", None)
