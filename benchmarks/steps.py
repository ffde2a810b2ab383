"""Steady steps per second with everything on, against hand-written loops."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.kernel import kernel
from benchmarks.start import SETUP
from benchmarks.torchrun import torchrun
from benchmarks.workload import RANKS

EPOCHS = 8


def measure(rounds: int = 7) -> dict[str, float]:
    """Steps per second, medians over rounds in which each loop ran once, and the medians of the rounds' ratios; the first epoch of each is left out."""
    figures: dict[str, list[float]] = {"dataloader_loop": [], "prebatched_loop": [], "nbddp": []}
    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder)) as running:
        running.run("%load_ext nbddp")
        running.run(SETUP)
        for _ in range(rounds):
            for name, mode in (("dataloader_loop", "loader"), ("prebatched_loop", "batched")):
                _, result = torchrun("loop.py", mode, str(EPOCHS), nproc=RANKS)
                figures[name].append(statistics.median(result["steps_per_s"][1:]))
            running.run(f"%%ddp_train net train_set -n {RANKS} --devices cpu --epochs {EPOCHS} --batch-size 256 --lr 1e-3\nloss = nn.CrossEntropyLoss()")
            rates = running.value("(run.history['step'].size / run.epochs['epoch'].size / run.epochs['duration_s']).tolist()")
            figures["nbddp"].append(statistics.median(rates[1:]))  # type: ignore[index]
    ratios = {
        f"nbddp / {name}": statistics.median(ours / peer for ours, peer in zip(figures["nbddp"], figures[name], strict=True))
        for name in ("dataloader_loop", "prebatched_loop")
    }
    return {name: statistics.median(values) for name, values in figures.items()} | ratios
