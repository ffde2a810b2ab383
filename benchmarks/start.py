"""From the start of the cell to the end of the first optimizer step, against the same model as a script under torchrun."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.kernel import Kernel, kernel
from benchmarks.torchrun import torchrun
from benchmarks.workload import RANKS

SETUP = """import torch
from torch import nn
from benchmarks.workload import make_data, make_model
net, train_set = make_model(), make_data()"""
CELL = f"""%%ddp_train net train_set -n {RANKS} --devices cpu --epochs 1 --batch-size 256 --lr 1e-3
loss = nn.CrossEntropyLoss()"""


def _cell(running: Kernel) -> float:
    running.run(CELL)
    return float(running.value("run.timeline['first_step'] - run.timeline['requested']"))  # type: ignore[arg-type]


def measure(rounds: int = 5) -> dict[str, float]:
    """Seconds, medians over the rounds: script, first and second cell of a session, cells one right after the other."""
    scripts, first, second = [], [], []
    for _ in range(rounds):
        started, result = torchrun("loop.py", "first", nproc=RANKS)
        scripts.append(result["first_step"] - started)
        with tempfile.TemporaryDirectory() as folder, kernel(Path(folder)) as running:
            running.run("%load_ext nbddp")
            running.run(SETUP)
            first.append(_cell(running))
            second.append(_cell(running))
    return {"torchrun_s": statistics.median(scripts), "first_cell_s": statistics.median(first), "second_cell_s": statistics.median(second)}
