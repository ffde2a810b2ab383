"""Interrupts while a cell waits for its run: the first asks for an orderly stop, the second terminates, the third kills.

Runs in the kernel's main thread. A handler counts: catching KeyboardInterrupt in a loop would lose the second of two quick ones.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

POLL_S = 0.05


class Interrupts:
    """Counts SIGINT while it is installed."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[Interrupts]:
        """Take SIGINT over; outside the main thread, where Python allows no handlers, nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handler(_number: int, _frame: FrameType | None) -> None:
            self.count += 1

        before = signal.signal(signal.SIGINT, handler)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


def wait(done: threading.Event, on_interrupt: Callable[[int], None]) -> None:
    """Wait for an event; call `on_interrupt(n)` for the n-th interrupt meanwhile."""
    with Interrupts().counted() as interrupts:
        handled = 0
        while not done.wait(POLL_S):
            while handled < interrupts.count:
                handled += 1
                on_interrupt(handled)
