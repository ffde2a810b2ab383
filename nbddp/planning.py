"""The arithmetic of a run: what the options mean for this many ranks, samples and cores.

A pure function of its arguments, used by the kernel (plan line, dry run) and read by the ranks from spec.json. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from nbddp.errors import ConfigError

if TYPE_CHECKING:
    from nbddp.config import TrainConfig

DEFAULT_RANK_BATCH = 32
DEFAULT_LR = {"adam": 1e-3, "adamw": 1e-3, "sgd": 1e-3, "adagrad": 1e-2, "rmsprop": 1e-2, "lbfgs": 1.0}
"""torch.optim's own defaults."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this host offers: visible GPUs, the cores that this process may use, and the threads per process that OMP_NUM_THREADS asks for."""

    gpus: tuple[str, ...]
    cores: int
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will happen, in numbers. Batches are in samples; `None` steps or epochs are unlimited."""

    nproc: int
    device: Literal["cpu", "cuda"]
    device_indices: tuple[int, ...]
    device_name: str
    backend: Literal["gloo", "nccl"]
    threads: int
    n_train: int
    n_val: int
    batch_size: int
    per_rank_batch_size: int
    micro_batch_size: int
    accumulate: int
    default_batch_size: bool
    val_batch_size: int
    steps_per_epoch: int
    dropped: int
    epochs: int | None
    max_steps: int | None
    lr: float | None
    precision: str
    default_precision: bool
    workers_per_rank: int
    monitor: str
    warnings: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that the run ends at; None where only time limits it."""
        by_epochs = None if self.epochs is None else self.epochs * self.steps_per_epoch
        known = [steps for steps in (by_epochs, self.max_steps) if steps is not None]
        return min(known) if known else None

    def line(self, *extra: str) -> str:
        """One line that heads a run; `extra` parts, such as the data's size, come last."""
        unit = self.device_name if self.device == "cuda" else f"{self.device_name} rank{'s' if self.nproc > 1 else ''}"
        batch = f"{self.batch_size} = {self.nproc} x {self.per_rank_batch_size}"
        if self.accumulate > 1:
            batch += f" (in {self.accumulate} micro-batches of {self.micro_batch_size})"
        if self.default_batch_size:
            batch += " (default)"
        steps = f"{self.steps_per_epoch} step{'s' if self.steps_per_epoch > 1 else ''}/epoch"
        if self.dropped:
            steps += f", {self.dropped} sample{'s' if self.dropped > 1 else ''} dropped"
        rate = "optimizer hook" if self.lr is None else f"lr {self.lr:g}"
        precision = f"{self.precision} (auto)" if self.default_precision else self.precision
        return " · ".join([f"{self.nproc} x {unit}", batch, steps, rate, precision, *(part for part in extra if part)])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        values = {field.name: record[field.name] for field in fields(cls)}
        for name in ("device_indices", "warnings"):
            values[name] = tuple(values[name])
        return cls(**values)


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


def _too_short(config: TrainConfig, n_train: int, batch: int, parts: int) -> str:
    largest = n_train // parts * parts
    ways = ["--drop-last false"]
    if largest:
        ways.insert(0, f"--batch-size {largest}" + ("" if config.batch_size is None else " or less"))
    return f"the training data has {n_train} samples, fewer than one batch of {batch}: {', or '.join(ways)}"


def _advice(config: TrainConfig, nproc: int, device: str, batch: int, machine: Machine) -> list[str]:
    warnings = []
    per_rank = batch // nproc
    if nproc > 1 and per_rank < DEFAULT_RANK_BATCH:
        warnings.append(f"{per_rank} samples per rank: same steps as on one {'GPU' if device == 'cuda' else 'rank'} plus all-reduce; raise --batch-size")
    if device == "cpu" and nproc > machine.cores:
        warnings.append(f"{nproc} ranks on {machine.cores} cores: they take turns; -n {machine.cores} is as fast")
    if config.num_workers > machine.cores:
        warnings.append(f"{config.num_workers} loader workers on {machine.cores} cores: more than the cores can serve")
    return warnings


def _without_effect(config: TrainConfig, n_val: int, device: str) -> list[str]:
    """Options that were given and that nothing will come of."""
    idle = [(name, "without loader workers: --num-workers") for name in ("prefetch_factor", "persistent_workers") if config.num_workers == 0]
    idle += [(name, "without validation data: --val or --val-split") for name in ("val_every", "val_batch_size") if n_val == 0]
    if device == "cpu" and config.pin_memory:
        idle.append(("pin_memory", "for ranks on the CPU"))
    return [f"{name} has no effect {why}" for name, why in idle if name in config.given]


def _monitor(config: TrainConfig, n_val: int) -> str:
    """The value that decides which checkpoint is best; names that only a validation can know are checked by the first one.

    Raises:
        ConfigError: for a value that nothing records.
    """
    if n_val == 0 and "monitor" not in config.given:
        return "loss"
    if n_val == 0 and config.monitor != "loss":
        message = f"monitor={config.monitor} needs validation data: give --val or --val-split, or --monitor loss"
        raise ConfigError(message)
    if config.monitor != "loss" and not config.monitor.startswith("val_"):
        message = f"monitor={config.monitor} is not recorded: loss (of the training), val_loss, or val_ and the name of a scalar that the validation returns"
        raise ConfigError(message)
    return config.monitor


def make_plan(config: TrainConfig, *, n_train: int, n_val: int, machine: Machine, has_optimizer: bool = False) -> Plan:
    """Derive the plan of a run; `has_optimizer` says that a hook makes the optimizer.

    Raises:
        ConfigError: for sizes that don't divide, devices that are not there, data shorter than a batch.
    """
    nproc, device, indices, name = _devices(config, machine)
    batch = _batch(config, nproc)
    if n_train < 1:
        message = "the training data is empty: it needs at least one sample"
        raise ConfigError(message)
    steps = n_train // batch if config.drop_last else math.ceil(n_train / batch)
    if steps == 0:
        raise ConfigError(_too_short(config, n_train, batch, nproc * config.accumulate))
    val_batch, rounded = _val_batch(config, nproc, batch)
    if config.num_workers % nproc:
        near = nearest_multiples(config.num_workers, nproc)
        message = f"num_workers={config.num_workers} is the total over the ranks and must divide by {nproc} ranks: use {near}"
        raise ConfigError(message)
    warnings = _advice(config, nproc, device, batch, machine) + _without_effect(config, n_val, device)
    monitor = _monitor(config, n_val)
    if n_val == 0 and config.load == "best" and "monitor" not in config.given:
        warnings.append("load=best without validation data: best is by the training loss")
    limited = config.max_steps is not None or config.max_time is not None
    return Plan(
        nproc=nproc,
        device=device,
        device_indices=indices,
        device_name=name,
        backend=config.backend if config.backend != "auto" else "nccl" if device == "cuda" else "gloo",
        threads=machine.threads or max(1, machine.cores // nproc),
        n_train=n_train,
        n_val=n_val,
        batch_size=batch,
        per_rank_batch_size=batch // nproc,
        micro_batch_size=batch // nproc // config.accumulate,
        accumulate=config.accumulate,
        default_batch_size=config.batch_size is None and config.per_rank_batch_size is None,
        val_batch_size=val_batch,
        steps_per_epoch=steps,
        dropped=n_train - steps * batch if config.drop_last else 0,
        epochs=None if limited and "epochs" not in config.given else config.epochs,
        max_steps=config.max_steps,
        lr=None if has_optimizer else config.lr if config.lr is not None else DEFAULT_LR[config.optimizer],
        precision="fp32",
        default_precision=config.precision == "auto",
        workers_per_rank=config.num_workers // nproc,
        monitor=monitor,
        warnings=(*warnings, *([rounded] if rounded else [])),
    )
