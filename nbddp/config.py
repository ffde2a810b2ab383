"""TrainConfig: every option of a run, defined once.

The same definition makes the flags of the magics, the keywords of `nbddp.train`, the keys of a settings file and the table in the
documentation. Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from nbddp.errors import ConfigError, suggest
from nbddp.rules import broken_rule
from nbddp.values import (
    Count,
    CountOrZero,
    Flag,
    NotNegative,
    Positive,
    auto_is_none,
    not_bool,
    read_devices,
    read_duration,
    read_every,
    read_norm,
    read_precision,
    read_steps_or_epochs,
    read_tf32,
    read_wandb,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Group = Literal["ranks and batch", "length", "data", "optimisation", "precision and speed", "normalization", "checkpoints", "launch", "trackers"]


_EACH_ALONE: ContextVar[bool] = ContextVar("_EACH_ALONE", default=False)


def _option(default: Any, help_: str, group: Group, **extra: str) -> Any:
    return Field(default=default, description=help_, json_schema_extra={"group": group, **extra})


class TrainConfig(BaseModel):
    """Every option of a training run, checked, frozen and serialisable.

    Raises:
        ConfigError: for an unknown name, a wrong value or two options that exclude each other; the message says the rule and the remedy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nproc: Annotated[Count | None, BeforeValidator(auto_is_none)] = _option(None, "ranks on this node; default: all visible GPUs, else 1", "ranks and batch")
    devices: Annotated[Literal["auto", "cpu"] | tuple[int, ...], BeforeValidator(read_devices)] = _option(
        "auto", "auto, cpu, or GPU indices such as 0,1", "ranks and batch"
    )
    backend: Literal["auto", "nccl", "gloo"] = _option("auto", "process-group backend", "ranks and batch")
    batch_size: Count | None = _option(None, "global batch, samples per optimizer step over all ranks; default: 32 per rank and micro-batch", "ranks and batch")
    per_rank_batch_size: Count | None = _option(None, "samples per rank and optimizer step; excludes batch_size", "ranks and batch")
    val_batch_size: Count | None = _option(None, "global batch of the validation; default: batch_size", "ranks and batch")
    accumulate: Count = _option(1, "micro-batches per optimizer step; the inner ones are not synchronised", "ranks and batch")

    epochs: Count = _option(
        1, "passes over the data, as a total; in a stage those of the stage; unlimited when max_steps or max_time is given and this is not", "length"
    )
    max_steps: Count | None = _option(None, "optimizer steps, as a total; in a stage those of the stage", "length")
    max_time: Annotated[Positive | None, BeforeValidator(read_duration)] = _option(
        None, "wall-clock limit of the training: 90 s, 10 min, 2 h", "length", unit="s"
    )

    shuffle: Flag = _option(True, "draw a new order of the samples in every epoch", "data")
    drop_last: Flag = _option(True, "leave out the samples that do not fill a whole batch", "data")
    val_split: Annotated[float, BeforeValidator(not_bool), Field(gt=0, lt=1)] | None = _option(
        None, "share of the training data to validate on, drawn with the seed", "data"
    )
    num_workers: CountOrZero = _option(0, "loader workers, the total over this node's ranks", "data")
    prefetch_factor: Count = _option(2, "batches that each loader worker holds ready", "data")
    persistent_workers: Flag = _option(True, "keep loader workers between epochs", "data")
    pin_memory: Annotated[Flag | None, BeforeValidator(auto_is_none)] = _option(None, "page-locked host memory for batches; default: on GPUs", "data")
    seed: CountOrZero = _option(0, "seed of the sample order and of the ranks' random streams", "data")

    optimizer: Literal["adam", "adamw", "sgd", "adagrad", "rmsprop", "lbfgs"] = _option("adamw", "optimizer, where no hook makes one", "optimisation")
    lr: NotNegative | None = _option(None, "learning rate; default: torch's own for the optimizer", "optimisation")
    weight_decay: NotNegative | None = _option(None, "weight decay; default: torch's own for the optimizer", "optimisation")
    momentum: NotNegative | None = _option(None, "momentum of sgd and rmsprop", "optimisation")
    fused: Flag = _option(False, "fused kernels of adam, adamw, adagrad, sgd", "optimisation")
    lr_scale: Literal["linear", "sqrt"] | None = _option(None, "scale lr with batch_size / base_batch_size", "optimisation")
    base_batch_size: Count | None = _option(None, "the batch that lr was tuned for", "optimisation")
    warmup_steps: CountOrZero = _option(0, "steps over which lr grows from 0, in each stage", "optimisation")
    schedule: Literal["constant", "linear", "cosine", "plateau"] = _option(
        "constant", "constant, linear and cosine (to 0 at the end of a stage), plateau (lr / 10 when the monitored value stalls)", "optimisation"
    )
    scheduler_interval: Literal["step", "epoch"] = _option("step", "when the scheduler of the hook advances", "optimisation")
    clip_norm: Positive | None = _option(None, "largest norm of the gradient; larger ones are scaled down", "optimisation")
    on_nan: Literal["warn", "skip", "stop"] = _option("warn", "what a step with a non-finite loss or gradient does", "optimisation")

    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(read_precision)] = _option(
        "auto", "auto, bf16, fp16 (loss scaling), fp32 (no autocast)", "precision and speed"
    )
    matmul_precision: Annotated[Literal["highest", "high", "medium"], BeforeValidator(read_tf32)] = _option(
        "highest", "torch.set_float32_matmul_precision; tf32 true is high", "precision and speed"
    )
    cudnn_benchmark: Flag = _option(True, "let cuDNN time its kernels", "precision and speed")
    compile: Flag = _option(False, "torch.compile", "precision and speed")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = _option(
        None, "mode of torch.compile", "precision and speed"
    )
    compile_cache_dir: Path | None = _option(None, "folder on node-local disk for compiled code", "precision and speed")
    compile_timeout_s: Positive = _option(3600.0, "how long compiling may take", "precision and speed", unit="s")
    find_unused_parameters: Flag = _option(False, "let DDP search for parameters that a step does not use", "precision and speed")
    static_graph: Flag = _option(False, "tell DDP that every step uses the same parameters", "precision and speed")
    gradient_as_bucket_view: Flag = _option(True, "gradients live in DDP's buckets", "precision and speed")
    bucket_cap_mb: Positive = _option(25.0, "size of DDP's gradient buckets", "precision and speed", unit="MB")
    grad_compression: Literal["bf16", "fp16", "powersgd"] | None = _option(None, "compress gradients on the wire", "precision and speed")

    norm: Annotated[str | dict[str, str], BeforeValidator(read_norm)] = _option(
        "auto", "what becomes of BatchNorm: auto, keep, sync, batch, layer, group, none, or pattern=value", "normalization"
    )

    val_every: Annotated[str, BeforeValidator(read_steps_or_epochs)] = _option("1 epoch", "how often to validate: 2, 500 steps", "checkpoints")
    monitor: str = _option("val_loss", "recorded value that decides which checkpoint is best; loss where nothing is validated", "checkpoints")
    mode: Literal["min", "max"] = _option("min", "whether a smaller or a larger monitored value is better", "checkpoints")
    min_delta: NotNegative = _option(0.0, "smallest change of the monitored value that counts", "checkpoints")
    patience: Count | None = _option(None, "values of monitor in a row, none of them better, after which the stage, or the run, ends", "checkpoints")
    checkpoint_every: Annotated[str, BeforeValidator(read_every)] = _option(
        "1 epoch", "how often to write last.pt: 2, 500 steps, 10 min; by default every epoch, but at most every 20 s", "checkpoints"
    )
    keep_last: Count = _option(1, "how many of the periodic checkpoints to keep", "checkpoints")
    resume: str | None = _option(None, "go on from: last, a run, or a checkpoint file", "checkpoints")
    init: str = _option("current", "weights to start from: current, initial, a run, or a checkpoint file", "checkpoints")
    load: Literal["auto", "last", "best", "none"] = _option("auto", "weights that end up in the model: auto is best with patience, else last", "checkpoints")

    launcher: Literal["local", "slurm", "htcondor", "torchrun"] = _option("local", "how the ranks are started", "launch")
    nnodes: Count = _option(1, "nodes of the run", "launch")
    max_restarts: CountOrZero = _option(0, "restarts of the group after a failure", "launch")
    slurm: str | None = _option(None, "options for sbatch", "launch")
    requeue: Flag = _option(False, "let the cluster queue the run again", "launch")
    extra_submit_lines: str | None = _option(None, "lines for the submit file, verbatim", "launch")
    prologue: str | None = _option(None, "shell lines to run before the ranks", "launch")
    pass_env: str | None = _option(None, "environment variables to pass on", "launch")
    run_root: Path | None = _option(None, "folder for run directories; default: nbddp_runs beside the notebook", "launch")
    name: str | None = _option(None, "name of the run; default: the model's class", "launch")
    process_group_timeout_s: Positive = _option(600.0, "how long a collective may wait", "launch", unit="s")
    hang_after_s: Positive = _option(
        120.0, "the run fails when no rank makes progress for this long; before the first step, 5 times as long", "launch", unit="s"
    )
    on_kernel_exit: Literal["auto", "stop", "continue"] = _option("auto", "auto: stop with a checkpoint, in the background continue", "launch")
    wandb: Annotated[dict[str, str] | None, BeforeValidator(read_wandb)] = _option(
        None, "track with Weights & Biases: project=NAME[,group=,name=,entity=,mode=,tags=a+b,job_type=]", "trackers"
    )
    tensorboard: Path | None = _option(None, "folder for TensorBoard, which gets one of each run", "trackers")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**_by_field(values))
        except ValidationError as error:
            raise ConfigError(_message(error)) from None

    @model_validator(mode="after")
    def _exclusions(self) -> TrainConfig:
        if not _EACH_ALONE.get() and (problem := broken_rule(self)) is not None:
            raise ValueError(problem)
        return self

    @classmethod
    def read(cls, values: Mapping[str, object]) -> dict[str, Any]:
        """Some options by the fields' own names, each checked by itself: rules between them are for the whole configuration that they become part of.

        Raises:
            ConfigError: for an unknown name or a wrong value.
        """
        token = _EACH_ALONE.set(True)
        try:
            alone = cls(**values)
        finally:
            _EACH_ALONE.reset(token)
        return {name: getattr(alone, name) for name in type(alone).model_fields if name in alone.given}

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that were set, whatever their value."""
        return frozenset(self.model_fields_set)

    def changes(self) -> dict[str, Any]:
        """The fields that differ from their default, in the order of definition."""
        return {name: getattr(self, name) for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}

    def replace(self, **values: object) -> TrainConfig:
        """Return a copy in which ``values`` are set, checked again."""
        return TrainConfig(**{**{name: getattr(self, name) for name in self.model_fields_set}, **values})

    def to_json(self) -> dict[str, Any]:
        """The fields that were set, as plain types; `TrainConfig(**...)` of it is equal."""
        return self.model_dump(mode="json", include=set(self.model_fields_set))


SYNONYMS = {
    "n": "nproc",
    "num_gpus": "nproc",
    "nproc_per_node": "nproc",
    "num_processes": "nproc",
    "world_size": "nproc",
    "gpus": "devices",
    "global_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_batch_size": "per_rank_batch_size",
    "per_device_train_batch_size": "per_rank_batch_size",
    "eval_batch_size": "val_batch_size",
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "learning_rate": "lr",
    "max_grad_norm": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "grad_clip": "clip_norm",
    "sync_batchnorm": "norm",
    "sync_bn": "norm",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "mixed_precision": "precision",
    "torch_compile": "compile",
    "torch_compile_cache_dir": "compile_cache_dir",
    "float32_matmul_precision": "matmul_precision",
    "tf32": "matmul_precision",
    "benchmark": "cudnn_benchmark",
    "save_total_limit": "keep_last",
    "save_every": "checkpoint_every",
    "check_val_every_n_epoch": "val_every",
    "early_stopping_patience": "patience",
    "dataloader_num_workers": "num_workers",
    "workers": "num_workers",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "timeout": "process_group_timeout_s",
}
"""Names that other tools give to a field."""


def _known(name: str) -> str:
    field = SYNONYMS.get(name, name)
    if field not in TrainConfig.model_fields:
        message = f"{name} is not an option.{suggest(name, [*TrainConfig.model_fields, *SYNONYMS])}"
        raise ConfigError(message)
    return field


def _by_field(values: Mapping[str, object]) -> dict[str, object]:
    """Values by the fields' own names.

    Raises:
        ConfigError: for an unknown name, and for two names of one field.
    """
    fields: dict[str, str] = {}
    for name in values:
        field = _known(name)
        if field in fields:
            message = f"{fields[field]} and {name} are the same option: give one of the two"
            raise ConfigError(message)
        fields[field] = name
    return {field: None if _leaves_out(field, values[name]) else values[name] for field, name in fields.items()}


def _leaves_out(field: str, value: object) -> bool:
    """Whether a value is the word `none` of an option that may be none: a line takes an option of a settings file, a run or a loader back with it."""
    optional = TrainConfig.model_fields[field].default is None and field != "name"  # a run may be called so
    return optional and isinstance(value, str) and value.strip().lower() == "none"


def _message(error: ValidationError) -> str:
    """One sentence per problem: name, wrong value, rule."""
    lines = []
    for problem in error.errors():
        where, text = problem["loc"], problem["msg"].removeprefix("Value error, ")
        if not where:
            lines.append(text)
            continue
        text = "must be a path" if problem["type"] == "path_type" else text.replace("Input should be", "must be")
        line = f"{where[0]}={problem['input']!r} {text}"
        if line not in lines and not any(other.startswith(f"{where[0]}=") for other in lines):
            lines.append(line)
    return "\n".join(lines)
