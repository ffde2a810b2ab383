"""Settings files with `local` and `training: stage_0, stage_1, ...`, read as options of ours.

The batch is the global one there too, loader workers are counted in total, and a stage has its own optimizer and scheduler. Runs in the kernel; imports
neither torch nor Jupyter.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.kernel.foreign import Found, Section, take_optimizer, take_scheduler
from nbddp.values import WANDB_KEYS

if TYPE_CHECKING:
    from collections.abc import Collection

_STAGE = re.compile(r"stage_(0|[1-9]\d*)")


def read_local(values: dict[str, Any], freeze: str | None, hooks: Collection[str]) -> Found:
    """A file with `local` and `training: stage_0, stage_1, ...`.

    Raises:
        ConfigError: for wrong values, contradictions and gaps in the numbers of the stages.
    """
    found = Found(hooks)
    root = Section(values, "", found)
    local = Section(values.get("local", {}), "local", found)
    _local_ranks(local, found)
    _local_options(local, found)
    root.take("local")
    if "training" in root.keys:
        _stages(Section(root.take("training"), "training", found), found, freeze)
    elif freeze is not None:
        message = "freeze_rb_layer is given in the call, and the file has no stages: leave it out"
        raise ConfigError(message)
    if (data := root.section("data")) is not None:
        _split(data, found)
        data.close()
    root.close()
    if not found.options.get("compile"):
        found.default("drop_last", value=False)  # with compile both systems leave the last batch out
    found.default("precision", "fp32")
    if "matmul_precision" not in found.options:
        found.default("matmul_precision", "highest")
    if len(found.stages) == 1:  # what its only stage says holds for the run
        only = found.stages[0]
        found.options.update({name: only.pop(name) for name in list(only) if name in TrainConfig.model_fields and name != "name"})
    return found


def _local_ranks(local: Section, found: Found) -> None:
    """Device and number of ranks."""
    device, num_gpus = local.word("device"), local.count("num_gpus", 0)
    condor = local.section("condor")
    if condor is not None:
        older = condor.count("num_gpus", 0)
        if num_gpus is not None and older is not None and older != num_gpus:
            message = f"local.num_gpus={num_gpus} and local.condor.num_gpus={older}: keep one of the two"
            raise ConfigError(message)
        num_gpus = older if num_gpus is None else num_gpus
        lines = condor.take("extra_submit_lines")
        if lines is not None:
            text = "\n".join(map(str, lines)) if isinstance(lines, list) else lines
            found.put(found.options, "extra_submit_lines", text, condor.path("extra_submit_lines"))
        condor.close("--launcher brings its own")
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        message = f"local.device={device} must be cpu or cuda.{suggest(device, ('cpu', 'cuda'))}"
        raise ConfigError(message)
    if device == "cpu":
        if num_gpus:
            message = f"local.num_gpus={num_gpus} with local.device=cpu: leave num_gpus out; -n sets the number of ranks on the CPU"
            raise ConfigError(message)
        found.options["devices"] = "cpu"
    elif device is not None and ":" in device:
        if num_gpus is not None and num_gpus != 1:
            message = f"local.num_gpus={num_gpus} with local.device={device}, which is one GPU: write device: cuda"
            raise ConfigError(message)
        found.options["devices"] = (int(device.partition(":")[2]),)
    if num_gpus:
        found.options["nproc"] = num_gpus
    else:
        found.default("nproc", 1)


def _local_options(local: Section, found: Found) -> None:
    """The other keys of `local`."""
    local.put("num_workers", "num_workers")
    local.put("torch_compile", "compile")
    if found.options.get("compile"):
        local.put("torch_compile_cache_dir", "compile_cache_dir")
    local.refuse("torch_compile_cache_dir", "nothing is compiled")
    local.put("float32_matmul_precision", "matmul_precision")
    local.refuse("ddp_port", "not needed, a free port is taken")
    local.refuse("checkpoint_epochs", "last.pt is written after every epoch; see --checkpoint-every and --keep-last")
    local.refuse("runtime_limits", "limits of a job; --max-time and --max-steps limit a run")
    wandb = local.take("wandb")
    if wandb is True:
        found.unmapped.append("local.wandb: it needs a project")
    elif wandb is not None and wandb is not False:
        section = Section(wandb, "local.wandb", found)
        taken = {key: section.take(key) for key in section.keys if key in WANDB_KEYS}
        found.put(found.options, "wandb", taken, "local.wandb")
        section.close()
    local.close()


def _split(data: Section, found: Found) -> None:
    """`train_fraction` f as val_split 1 - f."""
    fraction = data.take("train_fraction")
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        message = f"{data.path('train_fraction')}={fraction!r} must be above 0 and at most 1"
        raise ConfigError(message)
    if fraction < 1:
        found.options["val_split"] = round(1 - fraction, 12)


def _stages(training: Section, found: Found, freeze: str | None) -> None:
    numbers = {}
    for key in training.keys:
        if (match := _STAGE.fullmatch(key)) is not None:
            numbers[int(match[1])] = key
        elif key.startswith("stage"):
            message = f"{training.path(key)} is not the name of a stage: they are stage_0, stage_1, ..."
            raise ConfigError(message)
    if not numbers:
        message = "training has no stages: the first is stage_0"
        raise ConfigError(message)
    missing = [number for number in range(max(numbers)) if number not in numbers]
    if missing:
        message = f"training.stage_{missing[0]} is missing: the stages are {', '.join(numbers[number] for number in sorted(numbers))}"
        raise ConfigError(message)
    freezes = False
    for number in sorted(numbers):
        section = Section(training.take(numbers[number]), training.path(numbers[number]), found)
        arguments: dict[str, Any] = {"name": numbers[number]}
        freezes = _freeze(section, arguments, found, freeze) or freezes
        _stage_options(section, arguments, found)
        found.stages.append(arguments)
    if freeze is not None and not freezes:
        message = "freeze_rb_layer is given in the call, and no stage of the file has freeze_rb_layer: true: leave it out"
        raise ConfigError(message)
    training.close()


def _freeze(section: Section, into: dict[str, Any], found: Found, patterns: str | None) -> bool:
    path = section.path("freeze_rb_layer")
    if not section.flag("freeze_rb_layer"):
        return False
    if patterns is None:
        found.unmapped.append(f"{path}: say which parameters are meant: --freeze-rb-layer PATTERN, such as '*layers_rb*'")
    else:
        into["freeze"] = tuple(pattern.strip() for pattern in patterns.split(","))
    return True


def _stage_options(section: Section, into: dict[str, Any], found: Found) -> None:
    section.put("epochs", "epochs", into)
    section.put("batch_size", "batch_size", into)
    updates = section.count("gradient_updates_per_optimizer_step")
    if updates is not None and updates > 1:
        into["accumulate"] = updates
        if "batch_size" in into:  # there it is the batch of one backward pass
            into["batch_size"] *= updates
            found.note(f"{section.path('batch_size')}: {into['batch_size']} per optimizer step, in {updates} micro-batches")
    amp = section.flag("automatic_mixed_precision")
    if amp is not None:
        into["precision"] = "fp16" if amp else "fp32"
    if (stopping := section.section("early_stopping")) is not None:
        stopping.put("patience", "patience", into)
        stopping.put("delta", "min_delta", into)
        metric = stopping.word("metric")
        if metric in ("training", "validation"):
            into["monitor"] = "loss" if metric == "training" else "val_loss"
        elif metric is not None:
            message = f"{stopping.path('metric')}={metric} must be training or validation"
            raise ConfigError(message)
        stopping.close()
    if (optimizer := section.section("optimizer")) is not None:
        take_optimizer(optimizer, optimizer.word("type"), into, found)
    if (scheduler := section.section("scheduler")) is not None:
        take_scheduler(scheduler, scheduler.word("type"), into.get("epochs"), into, found)
    section.close()
