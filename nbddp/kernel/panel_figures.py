"""The figures of a configuration panel: what the options come to, and what they would on other numbers of ranks.

Runs in the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from nbddp import norm
from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel import markup
from nbddp.kernel.text import bytes_text, count_text
from nbddp.tabular import FONT, html_table

if TYPE_CHECKING:
    from torch import nn

    from nbddp.kernel.prepare import Outline, Prepared
    from nbddp.planning import Machine
    from nbddp.plans import Plan, StagePlan

MOST_CORES = 8
"""Up to how many ranks on the CPU are tried out."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the options come to on a number of ranks: a plan, or why there is none."""

    nproc: int
    plan: Plan | None = None
    why_not: str = ""


def what_if(outlined: Outline, machine: Machine) -> list[Ranks]:
    """The same options on 1 to N ranks: as many as there are GPUs, or some of the cores where the ranks are on the CPU; and on those that they ask for."""
    config = outlined.config
    on_gpus = config.devices != "cpu" and bool(machine.gpus)
    most = len(machine.gpus) if on_gpus else min(MOST_CORES, machine.cores)
    given = {name: getattr(config, name) for name in config.given if name not in ("nproc", "devices")}
    rows = []
    for nproc in sorted({*range(1, most + 1), config.nproc or 1}):
        try:
            changed = TrainConfig(**given, nproc=nproc, devices="auto" if on_gpus else "cpu")
            rows.append(Ranks(nproc, outlined.plan(machine, changed)))
        except ConfigError as error:
            rows.append(Ranks(nproc, why_not=str(error)))
    return rows


def sample_bytes(dataset: Any) -> int | None:
    """Size of the first sample in memory; None where it can't be had."""
    try:
        return _bytes(dataset[0])
    except Exception:  # noqa: BLE001 - the user's dataset may raise anything, and what is wrong with it is not said here
        return None


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else len(value) if isinstance(value, str | bytes) else 8


def loader_text(plan: Plan, config: TrainConfig, sample: int | None) -> tuple[str, str]:
    """Memory of the batches that loader workers hold ready on all ranks, and how it comes about."""
    if not plan.workers_per_rank:
        return "0 B", "no loader workers"
    how = f"{plan.nproc} ranks x {plan.workers_per_rank} workers x {config.prefetch_factor} batches"
    if sample is None:
        return "–", f"{how} of unknown size"
    batch = max(stage.micro_batch_size for stage in plan.stages) * sample
    return bytes_text(plan.nproc * plan.workers_per_rank * config.prefetch_factor * batch), f"{how} x {bytes_text(batch)}"


def norm_text(model: nn.Module, swaps: Mapping[str, str]) -> tuple[str, str]:
    """Number of BatchNorm layers, and what becomes of them."""
    layers = norm.batch_norm_layers(model)
    if not layers:
        return "0", "nothing to swap"
    kinds = ["" if norm.is_synchronized(layer) else swaps.get(name, "") for name, layer in layers.items()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    parts = [_agreeing(count, f"become {norm.BECOMES[kind]}" if kind else "stay") for kind, count in counts.items()]
    return str(len(layers)), ", ".join(parts)


def _agreeing(count: int, verb: str) -> str:
    word, _, rest = verb.partition(" ")
    return f"{count} {word}{'s' if count == 1 else ''} {rest}".rstrip()


def tiles(prepared: Prepared, sample: int | None) -> str:
    """The figures of a plan; `sample` is the size of a sample in bytes, where it is known."""
    plan = prepared.plan
    whole = [
        ("samples", count_text(plan.n_train), f"{count_text(plan.n_val)} to validate on"),
        ("loader memory", *loader_text(plan, prepared.config, sample)),
        ("BatchNorm layers", *norm_text(prepared.model, prepared.swaps)),
    ]
    stages = "".join(_stage(stage, plan, named=len(plan.stages) > 1) for stage in plan.stages)
    return markup.div(stages + markup.tiles(markup.tile(*tile) for tile in whole), FONT)


def table(rows: Sequence[Ranks], nproc: int | None) -> str:
    """What the options come to on each number of ranks; `nproc` is the one that they ask for."""
    head = ("ranks", "per-rank batch", "steps/epoch", "effective lr", "")
    return markup.div(markup.heading("On other numbers of ranks") + html_table(head, [_row(row, nproc) for row in rows], left=0, wrap=True), FONT)


def _stage(stage: StagePlan, plan: Plan, *, named: bool) -> str:
    batch = f"of {stage.batch_size} global" + (f", {stage.accumulate} micro-batches of {stage.micro_batch_size}" if stage.accumulate > 1 else "")
    total = "no end by steps" if stage.total_steps is None else f"{count_text(stage.total_steps)} steps in all"
    dropped = f", {stage.dropped} dropped" if stage.dropped else ""
    lr = ("by the hook", "") if stage.lr is None else (f"{stage.lr:g}", stage.scaled_lr.strip(" ()"))
    shown = [
        ("ranks", str(plan.nproc), plan.device_name),
        ("per-rank batch", count_text(stage.per_rank_batch_size), batch),
        ("steps per epoch", count_text(stage.steps_per_epoch), total + dropped),
        ("effective lr", *lr),
    ]
    head = markup.heading(f"Stage {stage.name}") if named else ""
    return head + markup.tiles(markup.tile(*tile) for tile in shown)


def _row(row: Ranks, nproc: int | None) -> tuple[str, ...]:
    number = f"<b>{row.nproc}</b>" if row.nproc == nproc else str(row.nproc)
    if row.plan is None:
        return (number, "–", "–", "–", markup.div(escape(row.why_not), "text-align:left"))
    stage = row.plan.stages[0]
    rate = "by the hook" if stage.lr is None else f"{stage.lr:g}"
    verdict = markup.div("these options" if row.nproc == nproc else "valid", "text-align:left")
    return (number, count_text(stage.per_rank_batch_size), count_text(stage.steps_per_epoch), rate, verdict)
