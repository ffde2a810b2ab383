"""Curve: a series that stays short however many points it is given.

Used in the kernel by `nbddp.state`; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import copy
import math

CURVE_POINTS = 600


class Curve:
    """A thinned series of an even number of points: when it is full, neighbours are averaged and the stride doubles."""

    def __init__(self, points: int = CURVE_POINTS) -> None:
        self._points, self._stride = points, 1
        self.x: list[float] = []
        self.y: list[float] = []
        self._sum_x = self._sum_y = 0.0
        self._n = self._finite = 0

    def add(self, x: float, y: float) -> None:
        """Add a point; where no value of a stride is finite there is a gap."""
        self._sum_x, self._n = self._sum_x + x, self._n + 1
        if math.isfinite(y):
            self._sum_y, self._finite = self._sum_y + y, self._finite + 1
        if self._n < self._stride:
            return
        self.x.append(self._sum_x / self._n)
        self.y.append(self._sum_y / self._finite if self._finite else math.nan)
        self._sum_x = self._sum_y = 0.0
        self._n = self._finite = 0
        if len(self.x) >= self._points:
            self.x = [(a + b) / 2 for a, b in zip(self.x[::2], self.x[1::2], strict=True)]
            self.y = [_mean(a, b) for a, b in zip(self.y[::2], self.y[1::2], strict=True)]
            self._stride *= 2

    def copy(self) -> Curve:
        """A curve that later points do not reach."""
        other = copy.copy(self)
        other.x, other.y = self.x.copy(), self.y.copy()
        return other


def _mean(a: float, b: float) -> float:
    """The mean of those that are finite."""
    return b if math.isnan(a) else a if math.isnan(b) else (a + b) / 2
