"""What the aggregation of losses and timings costs a step: the loop with it, against the same loop in the same process without."""

from __future__ import annotations

import statistics

from benchmarks.torchrun import torchrun
from benchmarks.workload import RANKS

STEP_S = 5e-3


def measure(pairs: int = 20) -> dict[str, float]:
    """Seconds of a step, with and without, medians over pairs of blocks that follow one another, and the median of what each pair's ratio is beyond 1.

    Steps scatter by more than what is asked for; so there is also the share that the time in the aggregation itself, and the processor's time in it, have of a
    step of 5 ms.
    """
    _, result = torchrun("aggregation.py", str(2 * pairs), nproc=RANKS)
    with_, without = zip(*result["pairs"], strict=True)
    return {
        "with_s": statistics.median(with_),
        "without_s": statistics.median(without),
        "with / without - 1": statistics.median(mine / bare - 1 for mine, bare in result["pairs"]),
        "tick / 5 ms": result["tick_s"] / STEP_S,
        "cpu of tick / 5 ms": result["tick_cpu_s"] / STEP_S,
    }
