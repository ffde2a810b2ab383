"""How long training pauses for a checkpoint, against a blocking `torch.save` of the same state in the same run: 100 M parameters with Adam's state, 1.2 GB."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import nbddp
from nbddp.events import EventReader

WIDTH = 10_000
EVERY_STEPS, CHECKPOINTS = 24, 3
"""So far apart that a file is written before the next is due."""
_OPTIMIZERS: list[torch.optim.Optimizer] = []


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer hook; runs in the ranks."""
    _OPTIMIZERS.append(torch.optim.Adam(model.parameters(), lr=1e-3))
    return _OPTIMIZERS[0]


class SavingStep:
    """The step hook: half-way between two checkpoints rank 0 first saves the state itself, to a new file, as a hand-written loop would; runs in the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._calls += 1
        if torch.distributed.get_rank() == 0 and self._calls % EVERY_STEPS == EVERY_STEPS // 2:
            path = self._folder / f"{self._calls}.pt"
            began = time.perf_counter()
            torch.save({"model": model.state_dict(), "optimizer": _OPTIMIZERS[0].state_dict()}, path)
            took = time.perf_counter() - began
            path.unlink()
            (self._folder / f"{self._calls}.json").write_text(json.dumps(took))
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


def _pauses(run: Any) -> list[float]:
    """Seconds from the end of a step to the beginning of the next, on rank 0, for each checkpoint between two steps."""
    reader, events = EventReader(Path(run.dir) / "events"), []
    while new := reader.poll():
        events += new
    phases = [event for event in events if event.kind == "phase" and event.rank == 0]
    return [
        after.mono - before.mono for before, after in itertools.pairwise(phases) if before.data["phase"] == "checkpoint" and after.data["phase"] == "training"
    ]


def measure(rounds: int = 3) -> dict[str, float]:
    """Seconds, medians over the rounds: the first pause of a run, those after it, and `torch.save` (which does not wait for the disk).

    Also the medians of the rounds' ratios.
    """
    figures: dict[str, list[float]] = {"first_pause_s": [], "pause_s": [], "torch_save_s": []}
    Path("artefacts").mkdir(exist_ok=True)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=Path("artefacts").resolve()) as folder:
            x = torch.randn(EVERY_STEPS * CHECKPOINTS * 2, WIDTH)
            run = nbddp.train(
                nn.Linear(WIDTH, WIDTH, bias=False),
                TensorDataset(x, x),
                training_step=SavingStep(Path(folder)),
                optimizer=optimizer,
                nproc=2,
                devices="cpu",
                batch_size=2,
                checkpoint_every=f"{EVERY_STEPS} steps",
                load="none",
                run_root=folder,
            )
            first, *later = _pauses(run)
            saves = [float(path.read_text()) for path in Path(folder).glob("*.json")]
        for name, value in zip(figures, (first, statistics.median(later), statistics.median(saves)), strict=True):
            figures[name].append(value)
    ratios = {
        f"{name} / torch.save": statistics.median(pause / save for pause, save in zip(figures[f"{name}_s"], figures["torch_save_s"], strict=True))
        for name in ("first_pause", "pause")
    }
    return {name: statistics.median(values) for name, values in figures.items()} | ratios
