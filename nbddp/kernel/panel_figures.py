"""The figures of a configuration panel: what the options come to, and what they would on other numbers of ranks.

A figure that depends on a wrong option says so, the others stay. Looks are in the style sheet of the panel. Runs in the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.text import bytes_text, count_text
from nbddp.norm import BECOMES
from nbddp.rng import preserved

if TYPE_CHECKING:
    from nbddp.kernel.prepare import Outline, Prepared
    from nbddp.planning import Machine
    from nbddp.plans import Plan, StagePlan

_SIZE = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b)")
MOST_CORES = 8
"""Up to how many ranks on the CPU are tried out."""

RANKS = ("nproc", "devices", "backend")
BATCH = ("batch_size", "per_rank_batch_size", "accumulate")
STEPS = (*BATCH, "val_split", "drop_last")
LENGTH = ("epochs", "max_steps")
RATE = ("lr", "optimizer", "lr_scale", "base_batch_size")
LOADER = ("num_workers", "prefetch_factor")
"""On which options the figures depend."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the options come to on a number of ranks: a plan, or why there is none."""

    nproc: int
    plan: Plan | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, a remark on it, and the options that each of the two depends on."""

    name: str
    value: str
    aside: str = ""
    of: tuple[str, ...] = ()
    aside_of: tuple[str, ...] = ()


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
    """Size of the first sample in memory; None where it can't be had. What it draws at random is as if it had not been drawn."""
    try:
        with preserved(torch.device("cpu")):
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


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number and what it counts: ``1 rank``, ``2 ranks``, ``2 batches``."""
    return f"{count_text(number)} {noun if number == 1 else nouns or f'{noun}s'}"


def loader_text(plan: Plan, config: TrainConfig, sample: int | None) -> tuple[str, str]:
    """Memory of the batches that loader workers hold ready on all ranks, and how it comes about."""
    if not plan.workers_per_rank:
        return "0 B", "no loader workers"
    parts = (counted(plan.nproc, "rank"), counted(plan.workers_per_rank, "worker"), counted(config.prefetch_factor, "batch", "batches"))
    how = " x ".join(parts)
    if sample is None:
        return "–", f"{how} of unknown size"
    batch = max(stage.micro_batch_size for stage in plan.stages) * sample
    return bytes_text(plan.nproc * plan.workers_per_rank * config.prefetch_factor * batch), f"{how} x {bytes_text(batch)}"


def norm_text(layers: Mapping[str, bool], swaps: Mapping[str, str]) -> tuple[str, str]:
    """Number of BatchNorm layers, and what becomes of them; `layers` are their names, and whether each is synchronised already."""
    if not layers:
        return "0", "nothing to swap"
    verbs = ["stay synchronised" if synced else f"become {BECOMES[swaps[name]]}" if name in swaps else "stay" for name, synced in layers.items()]
    parts = [_agreeing(verbs.count(verb), verb) for verb in dict.fromkeys(verbs)]
    return count_text(len(layers)), ", ".join(parts)


def _agreeing(count: int, verb: str) -> str:
    word, _, rest = verb.partition(" ")
    return f"{count_text(count)} {word}{'s' if count == 1 else ''} {rest}".rstrip()


def tiles(prepared: Prepared, layers: Mapping[str, bool], sample: int | None, wrong: Collection[str] = ()) -> str:
    """The figures of a plan.

    Args:
        prepared: the plan, of the options but those that are wrong.
        layers: the BatchNorm layers, as for `norm_text`.
        sample: size of a sample in bytes, where it is known.
        wrong: options that the plan is without.
    """
    plan = prepared.plan
    whole = [
        Figure("samples", count_text(plan.n_train), f"{count_text(plan.n_val)} to validate on", ("val_split",), ("val_split", "val")),
        Figure("loader memory", *loader_text(plan, prepared.config, sample), of=(*RANKS, *BATCH, *LOADER), aside_of=(*RANKS, *BATCH, *LOADER)),
        Figure("BatchNorm layers", *norm_text(layers, prepared.swaps), aside_of=(*RANKS, "norm")),
    ]
    if len(plan.stages) == 1:
        return _grid([*_stage(plan.stages[0], prepared), *whole], wrong)
    stages = [f"<b>Stage {escape(str(stage.name))}</b>{_grid(_stage(stage, prepared), wrong)}" for stage in plan.stages]
    return "".join([*stages, "<b>The run</b>", _grid(whole, wrong)])


def _stage(stage: StagePlan, prepared: Prepared) -> list[Figure]:
    plan = prepared.plan
    batch = f"of {count_text(stage.batch_size)} global"
    batch += f", {counted(stage.accumulate, 'micro-batch', 'micro-batches')} of {count_text(stage.micro_batch_size)}" if stage.accumulate > 1 else ""
    total = "no end by steps" if stage.total_steps is None else f"{counted(stage.total_steps, 'step')} in all"
    dropped = f", {counted(stage.dropped, 'sample')} dropped" if stage.dropped else ""
    rate = ("by the hook", "") if stage.lr is None else (f"{stage.lr:g}", stage.scaled_lr.strip(" ()"))
    of_rate = (*RATE, *((*RANKS, *BATCH) if prepared.config.lr_scale is not None else ()))
    return [
        Figure("ranks", count_text(plan.nproc), plan.device_name, RANKS, RANKS),
        Figure("per-rank batch", count_text(stage.per_rank_batch_size), batch, (*RANKS, *BATCH), (*RANKS, *BATCH)),
        Figure("steps per epoch", count_text(stage.steps_per_epoch), total + dropped, (*RANKS, *STEPS), (*RANKS, *STEPS, *LENGTH)),
        Figure("effective lr", *rate, of=of_rate, aside_of=of_rate),
    ]


def _grid(figures: Sequence[Figure], wrong: Collection[str]) -> str:
    return f'<div class="nb-tiles">{"".join(_tile(figure, wrong) for figure in figures)}</div>'


def _tile(figure: Figure, wrong: Collection[str]) -> str:
    bad, beside = _first(figure.of, wrong), _first(figure.aside_of, wrong)
    value, aside = ("–" if bad else figure.value), (f"{bad or beside} is wrong" if bad or beside else figure.aside)
    aside = _SIZE.sub("\u00a0", aside)
    return f"<div><span>{escape(figure.name)}</span><b>{escape(value)}</b><span>{escape(aside)}</span></div>"


def _first(of: Sequence[str], wrong: Collection[str]) -> str:
    return next((name for name in of if name in wrong), "")


def table(rows: Sequence[Ranks], nproc: int | None, wrong: Collection[str] = ()) -> str:
    """What the options come to on each number of ranks; `nproc` is the one that they ask for, `wrong` are options that they are without."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("ranks", "per-rank batch", "steps/epoch", "effective lr", ""))
    body = "".join(_row(row, nproc, wrong) for row in rows)
    return f'<b>On other numbers of ranks</b><table class="nb-ranks"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _row(row: Ranks, nproc: int | None, wrong: Collection[str]) -> str:
    these = row.nproc == nproc
    if row.plan is None:
        values, verdict = ["–"] * 3, row.why_not
    else:
        stage = row.plan.stages[0]
        shown = {BATCH: count_text(stage.per_rank_batch_size), STEPS: count_text(stage.steps_per_epoch)}
        shown[RATE] = "by the hook" if stage.lr is None else f"{stage.lr:g}"
        bad = {of: _first(of, wrong) for of in shown}
        values = ["–" if bad[of] else text for of, text in shown.items()]
        verdict = f"{said} is wrong" if (said := next(filter(None, bad.values()), "")) else "these options" if these else "valid"
    cells = "".join(f"<td>{escape(text)}</td>" for text in (*values, verdict))
    return f"<tr{' class=nb-these' if these else ''}><th scope=row>{row.nproc}</th>{cells}</tr>"
