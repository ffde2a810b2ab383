"""The arithmetic of a run: what the options mean for this many ranks, samples and cores.

Pure functions of their arguments, used by the kernel; what comes of them is a `Plan`. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbddp.errors import ConfigError, suggest
from nbddp.plans import Plan, StagePlan
from nbddp.remarks import advice, besides, not_reached, overridden, trains, without_effect
from nbddp.stage import stage_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbddp.config import TrainConfig
    from nbddp.stage import Stage

DEFAULT_RANK_BATCH = 32
DEFAULT_LR = {"adam": 1e-3, "adamw": 1e-3, "sgd": 1e-3, "adagrad": 1e-2, "rmsprop": 1e-2, "lbfgs": 1.0}
"""torch.optim's own defaults."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this host offers: visible GPUs, the cores that this process may use, the threads per process that OMP_NUM_THREADS asks for, native bf16."""

    gpus: tuple[str, ...]
    cores: int
    threads: int | None = None
    bf16: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained, as far as the arithmetic needs to know.

    Attributes:
        has_optimizer: a hook makes it.
        float64: the model's parameters are float64.
        recorded: names of all values that the run will record, where they are known before it starts.
    """

    has_optimizer: bool = False
    float64: bool = False
    recorded: tuple[str, ...] | None = None


def nearest_multiples(value: int, unit: int) -> str:
    """The valid values around `value`, for an error message."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def _devices(config: TrainConfig, machine: Machine) -> tuple[int, Literal["cpu", "cuda"], tuple[int, ...], str]:
    """Number of ranks, kind of device, indices and name.

    Raises:
        ConfigError: for more ranks than GPUs and for GPUs that are not there; there is no silent fallback to the CPU.
    """
    visible = len(machine.gpus)
    if isinstance(config.devices, tuple):
        missing = [str(index) for index in config.devices if index >= visible]
        if missing:
            have = f"the visible GPUs are 0..{visible - 1}" if visible else "this machine has no visible GPU"
            message = f"devices={','.join(map(str, config.devices))}: {have}; use --devices cpu for ranks on the CPU"
            raise ConfigError(message)
        indices = config.devices
        if config.nproc is not None and config.nproc != len(indices):
            message = f"nproc={config.nproc} with {len(indices)} devices: one rank per device; leave -n out"
            raise ConfigError(message)
        return len(indices), "cuda", indices, machine.gpus[indices[0]]
    if config.devices == "cpu" or not visible:
        if config.backend == "nccl":
            message = "backend=nccl needs GPUs, and the ranks are on the CPU: leave --backend out, or gloo"
            raise ConfigError(message)
        return config.nproc or 1, "cpu", (), "CPU"
    nproc = config.nproc or visible
    if nproc > visible:
        message = f"nproc={nproc} is more than the {visible} visible GPU{'s' if visible > 1 else ''}: -n {visible}, or --devices cpu for ranks on the CPU"
        raise ConfigError(message)
    return nproc, "cuda", tuple(range(nproc)), machine.gpus[0]


def _batch(config: TrainConfig, nproc: int) -> int:
    """The global batch; it divides by ranks x micro-batches."""
    parts = nproc * config.accumulate
    if config.per_rank_batch_size is not None:
        if config.per_rank_batch_size % config.accumulate:
            near = nearest_multiples(config.per_rank_batch_size, config.accumulate)
            message = f"per_rank_batch_size={config.per_rank_batch_size} does not divide into {config.accumulate} micro-batches: use {near}"
            raise ConfigError(message)
        return config.per_rank_batch_size * nproc
    if config.batch_size is None:
        return DEFAULT_RANK_BATCH * parts
    if config.batch_size % parts:
        over = f"{nproc} ranks" + (f" x {config.accumulate} micro-batches = {parts}" if config.accumulate > 1 else "")
        message = f"batch_size={config.batch_size} is the global batch and must divide by {over}: use {nearest_multiples(config.batch_size, parts)}"
        raise ConfigError(message)
    return config.batch_size


def _val_batch(config: TrainConfig, nproc: int, batch: int) -> tuple[int, str | None]:
    if config.val_batch_size is None:
        rounded = max(nproc, batch // nproc * nproc)
        return rounded, None if rounded == batch else f"val_batch_size {rounded}: batch_size {batch} rounded to a multiple of {nproc} ranks"
    if config.val_batch_size % nproc:
        near = nearest_multiples(config.val_batch_size, nproc)
        message = f"val_batch_size={config.val_batch_size} must divide by {nproc} ranks: use {near}"
        raise ConfigError(message)
    return config.val_batch_size, None


def _too_short(config: TrainConfig, n_train: int, batch: int, nproc: int) -> str:
    parts = nproc * config.accumulate
    largest, ways = n_train // parts * parts, ["--drop-last false"]
    if largest:
        of_rank = config.per_rank_batch_size is not None
        remedy = f"--per-rank-batch-size {largest // nproc}" if of_rank else f"--batch-size {largest}"
        ways.insert(0, remedy + (" or less" if of_rank or config.batch_size is not None else ""))
    return f"the training data has {n_train} samples, fewer than one batch of {batch}: {', or '.join(ways)}"


def _monitor(config: TrainConfig, n_val: int, job: Job) -> str:
    """The value that decides which checkpoint is best; names that only a step can know are checked by the first one.

    Raises:
        ConfigError: for a value that nothing records.
    """
    if n_val == 0 and "monitor" not in config.given:
        if config.patience is not None:
            message = f"patience={config.patience} needs validation data (--val or --val-split), or a value of the training to watch: --monitor loss"
            raise ConfigError(message)
        return "loss"
    if n_val == 0 and config.monitor.startswith("val_"):
        message = f"monitor={config.monitor} needs validation data: give --val or --val-split, or --monitor loss"
        raise ConfigError(message)
    if job.recorded is not None and config.monitor not in job.recorded:
        message = f"monitor={config.monitor} is not recorded; recorded are {', '.join(job.recorded)}.{suggest(config.monitor, job.recorded)}"
        raise ConfigError(message)
    return config.monitor


def _precision(config: TrainConfig, device: str, machine: Machine, job: Job, *, hooked: bool) -> tuple[str, list[str]]:
    """The precision in effect, and what there is to say about it."""
    if config.precision == "auto":
        return "bf16" if device == "cuda" and machine.bf16 and not job.float64 else "fp32", []
    if config.precision != "fp32" and job.float64:
        return config.precision, [f"precision={config.precision} changes nothing in a float64 model: autocast leaves float64 alone"]
    if config.precision == "fp16" and config.optimizer == "lbfgs" and not hooked:
        return "bf16", ["precision=fp16 with lbfgs runs as bf16: its loss can't be scaled within a line search"]
    return config.precision, []


def _rate(config: TrainConfig, batch: int) -> tuple[float, str]:
    """The learning rate in effect, and how it came about."""
    lr = config.lr if config.lr is not None else DEFAULT_LR[config.optimizer]
    if config.lr_scale is None or config.base_batch_size is None:
        return lr, ""
    ratio = batch / config.base_batch_size
    scaled = lr * (ratio if config.lr_scale == "linear" else math.sqrt(ratio))
    return scaled, f" ({lr:g} x {'' if config.lr_scale == 'linear' else 'sqrt '}{batch}/{config.base_batch_size})"


@dataclass(frozen=True, slots=True)
class _Size:
    """What every stage is planned for."""

    nproc: int
    device: Literal["cpu", "cuda"]
    n_train: int
    n_val: int
    machine: Machine
    job: Job
    stages: int
    max_steps: int | None
    limited: bool
    """The run ends by `max_steps` or `max_time`, and does not say how many epochs a stage has."""


def _plan_stage(index: int, stage: Stage | None, config: TrainConfig, size: _Size) -> tuple[StagePlan, list[str]]:
    """The plan of one stage, and what there is to say about it; its options are `config`."""
    nproc, n_train = size.nproc, size.n_train
    batch = _batch(config, nproc)
    steps = n_train // batch if config.drop_last else math.ceil(n_train / batch)
    if steps == 0:
        raise ConfigError(_too_short(config, n_train, batch, nproc))
    hooked = size.job.has_optimizer
    if stage is not None:
        hooked = stage.optimizer is not None or (hooked and "optimizer" not in stage.options)
    lr, how = (None, "") if hooked else _rate(config, batch)
    precision, remarks = _precision(config, size.device, size.machine, size.job, hooked=hooked)
    plan = StagePlan(
        index=index,
        name=stage_name(stage, index),
        batch_size=batch,
        per_rank_batch_size=batch // nproc,
        micro_batch_size=batch // nproc // config.accumulate,
        accumulate=config.accumulate,
        default_batch_size=config.batch_size is None and config.per_rank_batch_size is None,
        steps_per_epoch=steps,
        dropped=n_train - steps * batch if config.drop_last else 0,
        epochs=_epochs(index, config, size),
        max_steps=config.max_steps,
        lr=lr,
        scaled_lr=how,
        precision=precision,
        default_precision=config.precision == "auto",
        compile=config.compile,
        patience=config.patience,
        monitor=_monitor(config, size.n_val, size.job),
        besides=besides(config, hooked=lr is None),
        trains=trains(stage),
    )
    _check_schedule(config, plan.total_steps, size.max_steps)
    return plan, remarks


def _epochs(index: int, config: TrainConfig, size: _Size) -> int | None:
    """Epochs of a stage; None where something else ends it.

    Raises:
        ConfigError: where only the end of the run would end a stage that others follow.
    """
    if "epochs" in config.given:
        return config.epochs
    if config.max_steps is not None:
        return None
    if not size.limited:
        return config.epochs
    if index < size.stages - 1:
        message = "nothing ends it but the end of the run, and stages follow it: give it epochs or max_steps"
        raise ConfigError(message)
    return None


def _check_schedule(config: TrainConfig, total_steps: int | None, max_steps: int | None) -> None:
    """What a schedule needs to know, and has room for.

    Raises:
        ConfigError: for a warm-up that is longer than the stage, and a schedule to an end that is not known.
    """
    if total_steps is None and config.schedule in ("linear", "cosine"):
        message = f"schedule={config.schedule} ends at a step that is not known: give epochs or max_steps, beside the limit of the run"
        raise ConfigError(message)
    known = [steps for steps in (total_steps, max_steps) if steps is not None]
    if known and config.warmup_steps > min(known):
        message = f"warmup_steps={config.warmup_steps} is longer than the {min(known)} steps there are: use less, or train longer"
        raise ConfigError(message)


def make_plan(config: TrainConfig, *, n_train: int, n_val: int, machine: Machine, job: Job | None = None, stages: Sequence[Stage] = ()) -> Plan:
    """Derive the plan of a run.

    Raises:
        ConfigError: for sizes that don't divide, devices that are not there, data shorter than a batch; it names the stage where there are several.
    """
    job = job or Job()
    nproc, device, indices, name = _devices(config, machine)
    if n_train < 1:
        message = "the training data is empty: it needs at least one sample"
        raise ConfigError(message)
    limited = "epochs" not in config.given and (config.max_steps is not None or config.max_time is not None)
    size = _Size(nproc, device, n_train, n_val, machine, job, len(stages) or 1, config.max_steps, limited)
    plans, configs, remarks = [], [config], []
    for index, stage in enumerate(stages or (None,)):
        own = config if stage is None else stage.config(config)
        try:
            plan, said = _plan_stage(index, stage, own, size)
        except ConfigError as error:
            if stage is None:
                raise
            message = f"stage {stage_name(stage, index)}: {error}"
            raise ConfigError(message) from None
        plans.append(plan)
        configs.append(own)
        remarks += [text for text in said if text not in remarks]
    val_batch, rounded = _val_batch(config, nproc, plans[0].batch_size)
    if config.num_workers % nproc:
        near = nearest_multiples(config.num_workers, nproc)
        message = f"num_workers={config.num_workers} is the total over the ranks and must divide by {nproc} ranks: use {near}"
        raise ConfigError(message)
    warnings = advice(config, nproc, device, [plan.batch_size for plan in plans], machine)
    warnings += remarks + without_effect(configs, plans, n_val, device, nproc) + overridden(config, stages) + not_reached(config, plans)
    if n_val == 0 and config.load == "best" and "monitor" not in config.given:
        warnings.append("load=best without validation data: best is by the training loss")
    return Plan(
        nproc=nproc,
        device=device,
        device_indices=indices,
        device_name=name,
        backend=config.backend if config.backend != "auto" else "nccl" if device == "cuda" else "gloo",
        threads=machine.threads or max(1, machine.cores // nproc),
        n_train=n_train,
        n_val=n_val,
        val_batch_size=val_batch,
        max_steps=config.max_steps,
        workers_per_rank=config.num_workers // nproc,
        stages=tuple(plans),
        warnings=(*warnings, *([rounded] if rounded else [])),
    )
