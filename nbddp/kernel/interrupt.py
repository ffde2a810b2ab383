"""Interrupts of the cell that starts a run: before the launch they end the cell; then the first asks for a stop, the second terminates, the third kills.

Runs in the kernel's main thread. A handler counts: catching KeyboardInterrupt in a loop would lose the second of two quick ones.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

POLL_S = 0.05


class _StoppedBeforeStart(KeyboardInterrupt):
    """An interrupt while nothing was started yet, shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


_StoppedBeforeStart.__name__ = KeyboardInterrupt.__name__  # front ends know an interrupted cell by this name


class Interrupts:
    """What SIGINT does while it is taken over: it raises KeyboardInterrupt until `hold`, and is counted afterwards."""

    def __init__(self) -> None:
        self.count = 0
        self._held = self._raised = False
        self._handled = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[Interrupts]:
        """Take SIGINT over; outside the main thread, where Python allows no handlers, nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handler(_number: int, _frame: FrameType | None) -> None:
            if self._held:
                self.count += 1
            else:
                self._raise()

        before = signal.signal(signal.SIGINT, handler)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: a handler that is not Python's

    def _raise(self) -> NoReturn:
        self._raised = True
        message = "stopped before the run was started; nothing is left of it"
        raise _StoppedBeforeStart(message)

    def hold(self) -> None:
        """From here on, count.

        Raises:
            KeyboardInterrupt: where the user's own code swallowed the one that was raised in it.
        """
        self._held = True
        if self._raised:
            self._raise()

    def clear_away(self, leftovers: Callable[[], None]) -> None:
        """Remove what was begun, which no further interrupt leaves half done."""
        self._held = True
        leftovers()

    def handle(self, on_interrupt: Callable[[int], None]) -> None:
        """Call `on_interrupt(n)` for each interrupt, the n-th, that was counted since the last call."""
        while self._handled < self.count:
            self._handled += 1
            on_interrupt(self._handled)

    def wait(self, done: threading.Event, on_interrupt: Callable[[int], None]) -> None:
        """Wait for an event, and handle what is counted meanwhile."""
        while not done.wait(POLL_S):
            self.handle(on_interrupt)
