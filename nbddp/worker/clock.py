"""How long each phase of a step takes on this rank.

On the CPU by the monotonic clock; on a GPU by events on the stream, read when they have passed, so that timing never makes the host wait. Either way the phases
of a step add up to the time that it took.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER = range(5)
N_PHASES = 5


CAUGHT_UP = 1.1
"""A GPU that took no longer than this many times what the host took to ask for its work was waiting to be asked."""


class StepTimes(Protocol):
    """The times of one step, in seconds per phase; `read` may be called once the step's work is done, and `starved` after it."""

    def read(self) -> list[float]: ...

    def starved(self) -> bool:
        """Whether the GPU waited for the host, which launches its work, and not the other way round."""
        ...


class _Ready:
    __slots__ = ("_times",)

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def read(self) -> list[float]:
        return self._times

    def starved(self) -> bool:
        return False


NO_TIMES: StepTimes = _Ready([0.0] * N_PHASES)


class CpuClock:
    """`start` begins a step, `lap` ends a phase, `gradients_ready` splits the backward pass, `stop` hands the times over."""

    def __init__(self) -> None:
        self._times = [0.0] * N_PHASES
        self._last = 0.0
        self._ready = self._resumed = 0.0

    def start(self) -> None:
        self._times = [0.0] * N_PHASES
        self._last = time.perf_counter()

    def lap(self, phase: int) -> None:
        now = time.perf_counter()
        self._times[phase] += now - self._last
        self._last = now

    def gradients_ready(self) -> None:
        self._ready = self._resumed = time.perf_counter()

    def lap_ahead(self) -> None:
        """After `gradients_ready`: what was done since then was data for the next step."""
        self._resumed = time.perf_counter()
        self._times[DATA] += self._resumed - self._ready

    def lap_backward(self) -> None:
        """End a backward pass: what came after `gradients_ready`, data left out, was the exposed part of the synchronisation."""
        now = time.perf_counter()
        if not self._ready:
            self._ready = self._resumed = now
        self._times[BACKWARD] += self._ready - self._last
        self._times[SYNC] += now - self._resumed
        self._last, self._ready = now, 0.0

    def stop(self) -> StepTimes:
        return _Ready(self._times)


class _Events:
    """Times by the marks on the stream.

    The GPU starves where it is done with the backward pass when the host has only just asked for the optimizer's step, and forward and backward passes
    took it as long as the host took to ask for them. One of the two alone proves little: a host that runs far ahead is held up, and takes as long as the GPU;
    and where the step waits for the GPU, as for the norm of the gradients, that is done by then.
    """

    __slots__ = ("_asked_s", "_done", "_gradients", "_marks")

    def __init__(self, marks: list[tuple[int, torch.cuda.Event]], gradients: torch.cuda.Event | None, asked_s: float) -> None:
        self._marks, self._gradients, self._asked_s = marks, gradients, asked_s
        self._done = gradients is not None and gradients.query()

    def read(self) -> list[float]:
        times = [0.0] * N_PHASES
        self._marks[-1][1].synchronize()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            times[phase] += before.elapsed_time(after) / 1e3
        return times

    def starved(self) -> bool:
        """The passes begin where the first data has come, which is the second mark."""
        return self._done and self._gradients is not None and self._marks[1][1].elapsed_time(self._gradients) / 1e3 <= CAUGHT_UP * self._asked_s


class CudaClock:
    """The same on a GPU, whose stream is what the times are of: data that the host makes while the GPU still computes takes no time of the step's."""

    def __init__(self) -> None:
        self._passes_began = self._asked_s = 0.0
        self._marks: list[tuple[int, torch.cuda.Event]] = []
        self._gradients: torch.cuda.Event | None = None
        self._splits = False

    def _mark(self, phase: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))
        if len(self._marks) == 2:
            self._passes_began = time.perf_counter()
        if phase == BACKWARD:
            self._gradients, self._asked_s = event, time.perf_counter() - self._passes_began

    def start(self) -> None:
        self._marks, self._gradients = [], None
        self._mark(DATA)

    def lap(self, phase: int) -> None:
        self._mark(phase)

    def gradients_ready(self) -> None:
        self._mark(BACKWARD)
        self._splits = True

    def lap_ahead(self) -> None:
        self._mark(DATA)

    def lap_backward(self) -> None:
        self._mark(SYNC if self._splits else BACKWARD)
        self._splits = False

    def stop(self) -> StepTimes:
        return _Events(self._marks, self._gradients, self._asked_s)


Clock = CpuClock | CudaClock


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
