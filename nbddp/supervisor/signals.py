"""Signals that reach a supervisor: blocked, and waited for by a thread, so that none interrupts the agent, whose handlers raise wherever they hit.

Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import signal
import threading
import time

HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Signals:
    """Make it in the main thread before any other thread is started.

    Attributes:
        received: the first that asked for the end.
        time: when that was (monotonic seconds).
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.time = 0.0
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(HANDLED)
            if number != signal.SIGHUP and self.received is None:  # a closed terminal or login is no reason to end a run
                self.time, self.received = time.monotonic(), int(number)
