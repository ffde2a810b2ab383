"""How long each phase of a step takes on this rank.

On the CPU by the monotonic clock; on a GPU by events on the stream, read when they have passed, so that timing never makes the host wait.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER = range(5)
N_PHASES = 5


class StepTimes(Protocol):
    """The times of one step, in seconds per phase; `read` may be called once the step's work is done."""

    def read(self) -> list[float]: ...


class _Ready:
    __slots__ = ("_times",)

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def read(self) -> list[float]:
        return self._times


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
    __slots__ = ("_data", "_marks")

    def __init__(self, data: float, marks: list[tuple[int, torch.cuda.Event]]) -> None:
        self._data, self._marks = data, marks

    def read(self) -> list[float]:
        times = [0.0] * N_PHASES
        times[DATA] = self._data
        self._marks[-1][1].synchronize()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if phase != DATA:
                times[phase] += before.elapsed_time(after) / 1e3
        return times


class CudaClock:
    """The same on a GPU. The data phase is the host's time, since nothing of it is on the stream; the others are the stream's."""

    def __init__(self) -> None:
        self._data = 0.0
        self._host = 0.0
        self._marks: list[tuple[int, torch.cuda.Event]] = []

    def _mark(self, phase: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def start(self) -> None:
        self._data, self._marks = 0.0, []
        self._host = time.perf_counter()

    def lap(self, phase: int) -> None:
        now = time.perf_counter()
        if phase == DATA:
            self._data += now - self._host
        self._host = now
        self._mark(phase)

    def gradients_ready(self) -> None:
        self._host = time.perf_counter()
        self._mark(BACKWARD)

    def lap_ahead(self) -> None:
        self._data += time.perf_counter() - self._host

    def lap_backward(self) -> None:
        self._host = time.perf_counter()
        split = bool(self._marks) and self._marks[-1][0] == BACKWARD
        self._mark(SYNC if split else BACKWARD)

    def stop(self) -> StepTimes:
        return _Events(self._data, self._marks)


Clock = CpuClock | CudaClock


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
