"""Losses of runs that were never made, for tests of what draws them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nbddp.state import RunState

if TYPE_CHECKING:
    from collections.abc import Sequence

ODD = [
    [1.0] * 100,
    [0.0] * 100,
    [-1.0, -2.0, -3.0] * 30,
    [1e30, 1e-30] * 50,
    [math.nan, 1.0] * 100,
    [1.0] * 40 + [math.nan] * 200,
]
"""Losses without a range, without a logarithm, with all of it, and with gaps."""


def state_of(train: Sequence[float], val: Sequence[float] = (), *, every: int = 1) -> RunState:
    """A run with these losses; `every` is how many steps lie between two of the training."""
    state = RunState()
    for step, loss in enumerate(train):
        state.train_curve.add(float(step * every), loss)
    for index, loss in enumerate(val):
        state.val_curve.add(100.0 * index, loss)
    return state
