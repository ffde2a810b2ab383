"""What bf16 and compile bring on two CPU ranks, and which nesting of compile and DDP is quicker: each way against fp32 without compile, in turns."""

from __future__ import annotations

import statistics

from benchmarks.torchrun import torchrun
from benchmarks.workload import RANKS

SIZES = {"mlp": (9, 60), "wide": (9, 15), "cnn": (9, 12)}
"""Rounds, and steps of each way in a round."""


def measure() -> dict[str, float]:
    """Per model and way: medians over rounds of how many times as many steps it does in a second as fp32, and the seconds of its first steps."""
    figures: dict[str, float] = {}
    for model, (rounds, steps) in SIZES.items():
        _, result = torchrun("precision.py", model, str(rounds), str(steps), nproc=RANKS)
        times: dict[str, list[float]] = result["step_ms"]
        figures[f"{model}: fp32, ms"] = statistics.median(times["fp32"])
        for way in times:
            if way != "fp32":
                figures[f"{model}: {way} / fp32"] = statistics.median(full / own for full, own in zip(times["fp32"], times[way], strict=True))
            if "compiled" in way:
                figures[f"{model}: {way}, first steps, s"] = result["first_s"][way]
    return figures
