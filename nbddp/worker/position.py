"""Where a rank is right now, told by a thread of its own so that it is told while the rank computes or waits."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nbddp.events import EventWriter

PERIOD_S = 1.0
_PAGE = 4096


class Position:
    """Written by the loop, read by the heartbeat. `ticks` grows with every micro-batch and validation batch."""

    __slots__ = ("epoch", "phase", "step", "ticks")

    def __init__(self) -> None:
        self.phase, self.epoch, self.step, self.ticks = "starting", 0, 0, 0


def memory(device: torch.device) -> int:
    """Bytes in use: allocated on the GPU, resident and not shared on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, ValueError, IndexError):
        resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
        return (int(resident) - int(shared)) * _PAGE
    return 0


class Heartbeat:
    """Writes a `heartbeat` event every second until it is stopped."""

    def __init__(self, events: EventWriter, position: Position, device: torch.device) -> None:
        self._events, self._position, self._device = events, position, device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="nbddp-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(PERIOD_S):
            at = self._position
            self._events.emit("heartbeat", step=at.step, phase=at.phase, position=[at.epoch, at.step, at.ticks], memory=memory(self._device))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
