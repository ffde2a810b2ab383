"""What a run that goes on from a checkpoint takes over of its options, what may change, and what is left to do.

At the end of an epoch everything may change but the model and the stages that are done. In the middle of an epoch batch size, accumulate, number of ranks,
drop_last, loader workers and all of the optimisation may change too; what sets the order of the samples that are left may not: `seed`, `shuffle`,
`val_split`, whether there is a sampler, and the number of training samples.

Runs in the kernel before anything is written. Imports no Jupyter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp import checkpoint, norm
from nbddp.config import TrainConfig
from nbddp.errors import CheckpointError, ConfigError
from nbddp.kernel.resume import closest_boundary
from nbddp.planning import DEFAULT_LR
from nbddp.stage import stage_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from nbddp.kernel.resume import ResumePoint
    from nbddp.plans import Plan, StagePlan
    from nbddp.stage import Stage

NOT_CARRIED = ("resume", "init", "run_root")
"""Options that are about where one run begins, or lies."""

LENGTHS = ("epochs", "max_steps", "max_time")


@dataclass(frozen=True, slots=True)
class Merged:
    """The options of a resumed run, and how they differ from the checkpoint's, a line per option: ``lr 0.001 -> 0.01``."""

    config: TrainConfig
    changes: tuple[str, ...]


def merge(point: ResumePoint, *, brought: Mapping[str, object], given: TrainConfig) -> Merged:
    """Put the options together: those written in the cell, before those that DataLoaders brought, before the checkpoint's.

    A limit of the length that the checkpoint has reached gives way to another one that the cell gives. A batch size that nobody chose stays the
    checkpoint's, where it divides by the ranks, so that a step means the same on another number of them.

    Raises:
        ConfigError: where the options together break a rule.
        CheckpointError: where those of the checkpoint can't be read.
    """
    stored = _stored(point)
    written: dict[str, object] = {name: getattr(given, name) for name in given.given}
    over = {name: value for name, value in brought.items() if name not in written}
    for one, other in (("batch_size", "per_rank_batch_size"), ("per_rank_batch_size", "batch_size")):
        if written.get(one) is not None:
            over.pop(other, None)
    over |= written
    carried = {name: getattr(stored, name) for name in stored.given if name not in NOT_CARRIED and name not in over}
    _give_way(carried, over)
    ended = [name for name in _reached(point, carried) if any(other in written for other in LENGTHS)]
    for name in ended:
        del carried[name]
    if (batch := _batch(point, {**carried, **over})) is not None:
        carried["batch_size"] = batch
    try:
        config = TrainConfig(**{**carried, **over})
    except ConfigError as error:
        message = f"{error} (with the options of run {point.tail}, which hold where the cell gives no others)"
        raise ConfigError(message) from None
    return Merged(config, tuple(_differences(stored, config, batch=batch, brought=set(brought) - set(written), ended=ended)))


def check_norm(point: ResumePoint, model: nn.Module, swaps: Mapping[str, str], config: TrainConfig) -> None:
    """Whether the checkpoint's weights fit the model with the normalization layers that this run has.

    Raises:
        CheckpointError: where they do not.
    """
    with norm.swapped(model, swaps):
        fits = not checkpoint.misfits(model, checkpoint.state_of(checkpoint.read(point.path), point.path))
    if not fits:
        before = " and ".join(dict.fromkeys((point.facts.get("norm") or {}).values())) or "BatchNorm"
        remedy = f"leave --norm out to go on with them, or start from its weights, --init {point.path}"
        message = f"norm={config.norm}: the layers of the checkpoint are {before}: {remedy}"
        raise CheckpointError(message)


def _stored(point: ResumePoint) -> TrainConfig:
    try:
        return TrainConfig(**point.facts["config"])
    except ConfigError as error:
        version = (point.facts.get("versions") or {}).get("nbddp")
        message = f"the options in {point.path}, which nbddp {version} wrote, can't be read: {error}"
        raise CheckpointError(message) from None


def _give_way(carried: dict[str, Any], over: Mapping[str, object]) -> None:
    """Drop carried options that one of the cell's replaces under another name."""
    if over.get("batch_size") is not None or over.get("per_rank_batch_size") is not None:
        carried.pop("batch_size", None)
        carried.pop("per_rank_batch_size", None)
    if isinstance(devices := over.get("devices"), tuple) and carried.get("nproc") != len(devices):
        carried.pop("nproc", None)
    if over.get("nproc") is not None and isinstance(devices := carried.get("devices"), tuple) and len(devices) != over["nproc"]:
        del carried["devices"]


def _reached(point: ResumePoint, carried: Mapping[str, Any]) -> list[str]:
    """The limits of a run without stages that its checkpoint has reached."""
    if int(point.facts["stage"]) > 0:
        return []
    at = {"epochs": point.facts["epochs_done"], "max_steps": point.facts["step"], "max_time": point.facts["elapsed_s"]}
    return [name for name in LENGTHS if carried.get(name) is not None and at[name] >= carried[name]]


def _batch(point: ResumePoint, options: Mapping[str, Any]) -> int | None:
    """The global batch of a run that had the default."""
    if point.run is None or options.get("batch_size") is not None or options.get("per_rank_batch_size") is not None:
        return None
    plan = (point.run.read_spec() or {}).get("plan") or {}
    stages = plan.get("stages") or [{}]
    batch, devices = stages[0].get("batch_size"), options.get("devices")
    nproc = options.get("nproc") or (len(devices) if isinstance(devices, tuple) else plan.get("nproc"))
    if len(stages) > 1 or not batch or not nproc or batch % (nproc * options.get("accumulate", 1)):
        return None
    return int(batch)


def _differences(stored: TrainConfig, config: TrainConfig, *, batch: int | None, brought: set[str], ended: Sequence[str]) -> list[str]:
    lines = []
    for name in TrainConfig.model_fields:
        if name in NOT_CARRIED or (name == "batch_size" and batch is not None):
            continue
        before, after = _shown(name, stored), _shown(name, config)
        if name in ended:
            lines.append(f"{name} {before} -> {after if name == 'epochs' and 'epochs' in config.given else 'none'} (reached)")
        elif before != after:
            lines.append(f"{name} {before} -> {after}" + (" (of the DataLoader)" if name in brought else ""))
    return lines


def _shown(name: str, config: TrainConfig) -> str:
    value = getattr(config, name)
    if name == "lr" and value is None:
        value = DEFAULT_LR[config.optimizer]
    if value is None:
        return "default" if name.endswith(("batch_size", "nproc", "weight_decay", "momentum")) else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check(point: ResumePoint, config: TrainConfig, plan: Plan, *, stages: Sequence[Stage] = (), sampler: object = None) -> list[str]:
    """Check that the run can go on as planned; return what there is to say about it, a line each.

    Args:
        point: where it goes on from.
        config: the options as merged.
        plan: made of them.
        stages: as given in the cell.
        sampler: as given in the cell or brought by a DataLoader.

    Raises:
        ConfigError: where the stages are others, the order of an epoch under way would change, or nothing is left to do.
    """
    notes = [*point.notes, *_check_stages(point, plan, stages)]
    stage = plan.stages[int(point.facts["stage"])]
    own = stages[stage.index].config(config) if stages else config
    _check_order(point, own, plan, sampler)
    before = point.facts["sampler"]["seed"]
    if config.val_split is not None and before != config.seed:
        notes.append(f"seed {before} -> {config.seed} draws another val_split: samples that were validated on are trained on now, and the other way round")
    if (problem := _nothing_left(point, own, config, plan, stage)) is not None:
        message = f"run {point.tail} has nothing left to do: {problem}"
        raise ConfigError(message)
    return notes


def _check_stages(point: ResumePoint, plan: Plan, stages: Sequence[Stage]) -> list[str]:
    index = int(point.facts["stage"])
    name = str(point.facts["stage_name"] or index)
    names = [stage_name(stage, number) for number, stage in enumerate(stages)]
    called = f"stage {name}" if name == str(index) else f"stage {name}, number {index + 1} of its run"
    if index >= len(plan.stages):
        have = f"stages has {len(stages)}" if stages else "the cell has no stages"
        message = f"the checkpoint is in {called}, and {have}: give the stages of run {point.tail}; those that are done stay in their places"
        raise ConfigError(message)
    if stages and name in names and names.index(name) != index:
        message = f"the checkpoint is in {called}, and {name} is number {names.index(name) + 1} now: those that are done stay in their places"
        raise ConfigError(message)
    return [f"stage {name} -> {names[index]}"] if stages and names[index] != name else []


def _check_order(point: ResumePoint, config: TrainConfig, plan: Plan, sampler: object) -> None:
    """In the middle of an epoch: what sets the order of the samples that are left."""
    if not point.within_epoch:
        return
    facts, stored = point.facts, point.facts["config"]
    position, now = facts["sampler"], "none" if sampler is None else "given"
    had = "sampler" in ((point.run.read_spec() or {}).get("hooks") or []) if point.run is not None else sampler is not None
    before = "given" if position.get("sampler", had) else "none"
    changes = [
        ("seed", position["seed"], config.seed, "--seed {}"),
        ("val_split", stored.get("val_split"), config.val_split, "--val-split {}"),
        ("sampler", before, now, "the sampler as it was"),
        ("shuffle", position.get("shuffle", stored.get("shuffle", True)), config.shuffle, "--shuffle {}"),
        ("number of training samples", position["n"], plan.n_train, "the same data"),
    ]
    for name, old, new, remedy in changes:
        if old != new and not (name == "shuffle" and sampler is not None):
            boundary = closest_boundary(point)
            other = f"--init {point.tail} for a new run from its weights" if boundary is None else f"--resume {boundary}, which is of the end of an epoch"
            message = (
                f"{name} {_plain(old)} -> {_plain(new)} in the middle of epoch {facts['epoch']} ({position['samples']} of {position['n']} samples are done): "
                f"the order of those that are left would be another; {remedy.format(_plain(old))}, or {other}"
            )
            raise ConfigError(message)


def _plain(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _nothing_left(point: ResumePoint, own: TrainConfig, config: TrainConfig, plan: Plan, stage: StagePlan) -> str | None:
    """Why a run would end before its first step, with what changes that."""
    facts, several = point.facts, len(plan.stages) > 1
    if plan.max_steps is not None and facts["step"] >= plan.max_steps:
        return f"{facts['step']} of {plan.max_steps} steps done: --max-steps {facts['step'] + plan.max_steps}"
    if config.max_time is not None and facts["elapsed_s"] >= config.max_time:
        return f"{facts['elapsed_s']:.0f} of {config.max_time:g} s are over: --max-time {facts['elapsed_s'] + config.max_time:.0f}"
    if stage.index < len(plan.stages) - 1:
        return None
    place = f", in stage {stage.name}, the last" if several else ""
    if stage.epochs is not None and facts["stage_epochs_done"] >= stage.epochs:
        more = facts["stage_epochs_done"] + stage.epochs
        return f"{facts['stage_epochs_done']} of {stage.epochs} epochs done{place}: {f'epochs={more} in it' if several else f'--epochs {more}'}"
    if stage.max_steps is not None and facts["stage_step"] >= stage.max_steps:
        more = facts["stage_step"] + stage.max_steps
        return f"{facts['stage_step']} of {stage.max_steps} steps done{place}: max_steps={more} in it"
    without_gain = (facts.get("early_stop") or {}).get("without_gain", 0)
    best = facts.get("best") or {}
    if own.patience is not None and without_gain >= own.patience and (best.get("name"), best.get("mode")) == (stage.monitor, own.mode):
        more = without_gain + own.patience
        return (
            f"{stage.monitor} was not better {without_gain} times in a row, and patience is {own.patience}{place}: "
            f"{f'patience={more} in it' if several else f'--patience {more}'}"
        )
    return None
