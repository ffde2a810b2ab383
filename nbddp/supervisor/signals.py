"""What reaches a supervisor from outside: the order, the end of its kernel, and signals. Threads of the supervisor; imports neither torch nor Jupyter.

Signals are blocked and waited for by a thread, so that none of them interrupts the agent, whose own handlers raise exceptions wherever they hit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from nbddp.launch.order import Order

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.process import ProcessId

HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_IDLE_POLL_S = 0.2


class Signals:
    """Make it in the main thread before any other thread; `idle_exit` ends a supervisor that has no order and will get none, or could not carry it out."""

    def __init__(self, kernel: ProcessId, fork_server: ProcessId, idle_exit: Callable[[], None]) -> None:
        self.received: int | None = None
        self.kernel_closed = threading.Event()
        self.order: Order | None = None
        self._ordered = threading.Event()
        self._needed, self._idle_exit = (kernel, fork_server), idle_exit
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        for name, work in (("signals", self._wait_for_signals), ("order", self._read), ("idle", self._watch_idle)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def wait_for_order(self) -> Order:
        """Return the order once it has come."""
        self._ordered.wait()
        if self.order is None:
            message = "woken up without an order"
            raise AssertionError(message)
        return self.order

    def _wait_for_signals(self) -> None:
        while True:
            number = signal.sigwait(HANDLED)
            if self.order is None:
                self._idle_exit()
            if number != signal.SIGHUP:  # a closed terminal or login is no reason to end a run
                self.received = self.received or int(number)

    def _read(self) -> None:
        """The order's line, and then the end of the file, which means that the kernel has ended."""
        chunks: list[bytes] = []
        while self.order is None:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                self._idle_exit()
            chunks.append(chunk)
            if chunk.endswith(b"\n"):
                try:
                    self.order = Order.from_line(b"".join(chunks))
                except ValueError:
                    traceback.print_exc()
                    sys.stderr.flush()
                    self._idle_exit()
        self._ordered.set()
        while os.read(0, 1 << 16):
            pass
        self.kernel_closed.set()

    def _watch_idle(self) -> None:
        """A forked child of the kernel may hold the pipe open for longer than the kernel lives."""
        while not self._ordered.wait(_IDLE_POLL_S):
            if not all(process.alive() for process in self._needed):
                self._idle_exit()
