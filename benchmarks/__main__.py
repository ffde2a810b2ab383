"""Measure everything (or what is named: start, steps, handover, precision, aggregation, checkpoints, view) and print ratios: `python -m benchmarks [NAMES]`."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks import aggregation, checkpoints, handover, precision, start, steps, view


def _start() -> list[tuple[str, float, str]]:
    figures = start.measure()
    print(json.dumps(figures))
    return [
        ("second cell / torchrun, to the first optimizer step", figures["second_cell_s"] / figures["torchrun_s"], "at most 0.125, aim 0.083"),
        ("first cell right after %load_ext / torchrun", figures["first_cell_s"] / figures["torchrun_s"], "at most 1"),
    ]


def _steps() -> list[tuple[str, float, str]]:
    figures = steps.measure()
    print(json.dumps(figures))
    return [
        ("steps/s / hand-written loop with DataLoader", figures["nbddp / dataloader_loop"], "at least 1.1, aim 1.2"),
        ("steps/s / hand-written loop over pre-batched tensors", figures["nbddp / prebatched_loop"], "at least 0.95, aim 0.99"),
    ]


def _handover() -> list[tuple[str, float, str]]:
    figures = handover.measure()
    print(json.dumps(figures))
    return [
        ("hand-over of 1 GiB / torch.save of the same tensors", figures["handover_s"] / figures["torch_save_s"], "at most 1.5"),
        ("GiB of PSS beyond the kernel's own, 1 GiB of data", figures["pss_bytes"] / 2**30, "at most 1.5"),
    ]


def _precision() -> list[tuple[str, float, str]]:
    figures = precision.measure()
    print(json.dumps(figures))
    return [(f"steps/s, {name}", value, "reported") for name, value in figures.items() if name.endswith("/ fp32")]


def _aggregation() -> list[tuple[str, float, str]]:
    figures = aggregation.measure()
    print(json.dumps(figures))
    return [
        ("aggregation / step of 5 ms: loop with / without it - 1", figures["with / without - 1"], "at most 0.01"),
        ("the same: time in it / 5 ms", figures["tick / 5 ms"], "at most 0.01"),
        ("the same: processor's time in it / 5 ms", figures["cpu of tick / 5 ms"], "at most 0.01"),
    ]


def _checkpoints() -> list[tuple[str, float, str]]:
    figures = checkpoints.measure()
    print(json.dumps(figures))
    return [
        ("pause for a checkpoint of 1.2 GB / blocking torch.save", figures["pause / torch.save"], "at most 0.2"),
        ("the same, the first of a run", figures["first_pause / torch.save"], "at most 0.2"),
    ]


def _view() -> list[tuple[str, float, str]]:
    figures = view.measure()
    print(json.dumps(figures))
    return [
        ("view, 8 ranks at 500 steps/s: trait updates in a second", figures["updates_per_s"], "at most 4"),
        ("the same: kB to the browser in a second / 60", figures["bytes_per_s"] / 60_000, "at most 1"),
        ("the same: longest wait of the main thread / 50 ms", figures["longest_gap_s"] / 0.05, "at most 1"),
        ("the same without a view", figures["longest_gap_without_s"] / 0.05, "reported"),
        ("view, 2 ranks at 200 steps/s: kernel's share of a core", figures["cpu"], "at most 0.1"),
        ("what a run of a million steps keeps in the kernel / 50 MB", figures["held_bytes"] / 50e6, "at most 1"),
    ]


MEASURES = {
    "start": _start,
    "steps": _steps,
    "handover": _handover,
    "precision": _precision,
    "aggregation": _aggregation,
    "checkpoints": _checkpoints,
    "view": _view,
}


def main(names: list[str]) -> int:
    """Measure what is named and print a table."""
    unknown = set(names) - set(MEASURES)
    if unknown:
        print(f"{', '.join(sorted(unknown))}: not a benchmark; there are {', '.join(MEASURES)}", file=sys.stderr)
        return 2
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    rows = [row for name in (names or MEASURES) for row in MEASURES[name]()]
    for what, value, goal in rows:
        print(f"{what:58s} {value:6.3f}   {goal}")
    folder = Path("artefacts")
    folder.mkdir(exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps({what: value for what, value, _ in rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
