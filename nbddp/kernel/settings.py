"""The settings file of ``--config``: options as keys of a YAML (or JSON) mapping, or a file of one of two other systems.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nbddp.config import SYNONYMS, TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.kernel.foreign import MARKS, SHARED, Found, layout_of
from nbddp.kernel.foreign_local import read_local
from nbddp.kernel.foreign_trainer import read_trainer
from nbddp.rules import FUSED_OPTIMIZERS
from nbddp.stage import STAGE_FIELDS, Stage, read_stages

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_OF_OPTIMIZER = ("optimizer", "lr", "weight_decay", "momentum", "fused", "lr_scale", "base_batch_size")
_EXCLUDED = {
    "batch_size": ("per_rank_batch_size",),
    "per_rank_batch_size": ("batch_size",),
    "static_graph": ("find_unused_parameters",),
    "find_unused_parameters": ("static_graph",),
    "resume": ("init",),
    "init": ("resume",),
}
"""What a file's option gives way to where the line has the other."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file says: options of the run, its stages, and what there is to tell about it, a line each."""

    config: TrainConfig = field(default_factory=TrainConfig)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML would keep the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def read(
    source: Path | Mapping[str, object],
    *,
    over: Mapping[str, object] | None = None,
    hooks: Collection[str] = (),
    has_val: bool = False,
    freeze_rb_layer: str | None = None,
) -> Settings:
    """The settings of a file, or of a mapping such as one holds.

    Args:
        source: the file, or the mapping.
        over: options of the line or the call, which win: what the file has against them is left out.
        hooks: names of the hooks that are given; they win as well.
        has_val: whether validation data is given, which a file's split gives way to.
        freeze_rb_layer: patterns over parameter names for the key of that name, separated by commas.

    Raises:
        ConfigError: where the file is missing or no mapping, mixes layouts, or has keys or values that are refused; it names the file and the key.
    """
    given = TrainConfig.read(over or {})
    is_file = isinstance(source, Path)
    values = _load(source) if isinstance(source, Path) else dict(source)
    try:
        found = _find(values, freeze_rb_layer, hooks)
        _settle(found, given, hooks, has_val=has_val)
        config = TrainConfig(**found.options)
        stages = read_stages([Stage(**stage) for stage in found.stages]) if found.stages else ()
    except ConfigError as error:
        message = f"--config {source}: {error}" if is_file else str(error)
        raise ConfigError(message) from None
    name = source.name if isinstance(source, Path) else "config"
    return Settings(config, stages, tuple(f"{name}: {note}" for note in found.notes()))


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        near = suggest(path.name, [other.name for other in path.parent.glob("*") if other.is_file()])
        message = f"--config {path}: there is no such file.{near}"
        raise ConfigError(message) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"--config {path}: the file can't be read: {error}"
        raise ConfigError(message) from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        message = f"--config {path}{where}: {error.problem or error.context}"
        raise ConfigError(message) from None
    except yaml.YAMLError as error:
        message = f"--config {path}: {str(error).splitlines()[0]}"
        raise ConfigError(message) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        message = f"--config {path}: must be a mapping with options as keys, such as `batch_size: 256`"
        raise ConfigError(message)
    return values


def _find(values: dict[str, Any], freeze: str | None, hooks: Collection[str]) -> Found:
    """What a file says, by its layout.

    Raises:
        ConfigError: where it has keys of several layouts.
    """
    layout = layout_of(values)
    if freeze is not None and layout != "local":
        message = "freeze_rb_layer is given in the call, and no stage of the file has that key: leave it out"
        raise ConfigError(message)
    if layout is None:
        return _own(values)
    ours = [key for key in values if key in {*TrainConfig.model_fields, *SYNONYMS, "stages"} - SHARED]
    if ours:
        message = f"{', '.join(ours)} beside {' and '.join(key for key in values if key in MARKS[layout])}, a mixture of layouts: give it in the line"
        raise ConfigError(message)
    return read_local(values, freeze, hooks) if layout == "local" else read_trainer(values, hooks)


def _own(values: dict[str, Any]) -> Found:
    """Options as keys, and `stages`."""
    found = Found()
    found.options = TrainConfig.read({key: value for key, value in values.items() if key != "stages"})
    if "stages" not in values:
        return found
    stages = values["stages"]
    if not isinstance(stages, list) or not stages:
        message = f"stages={stages!r} must be a list of mappings, such as `- {{name: head, freeze: backbone.*, epochs: 3}}`"
        raise ConfigError(message)
    for number, stage in enumerate(stages):
        if not isinstance(stage, dict) or not all(isinstance(key, str) for key in stage):
            message = f"stages[{number}]={stage!r} must be a mapping, such as `{{freeze: backbone.*, epochs: 3}}`"
            raise ConfigError(message)
        try:
            Stage(**stage)
        except ConfigError as error:
            message = f"stages[{number}]: {error}"
            raise ConfigError(message) from None
        found.stages.append(_by_field(stage))
    return found


def _by_field(stage: dict[str, Any]) -> dict[str, Any]:
    return {SYNONYMS.get(key, key): value for key, value in stage.items()}


def _settle(found: Found, given: Mapping[str, Any], hooks: Collection[str], *, has_val: bool) -> None:
    """Let what the line and the cell give go before the file.

    Raises:
        ConfigError: where both have stages.
    """
    if found.stages and "stages" in hooks:
        message = "the file has stages, and so has the cell: keep one of the two"
        raise ConfigError(message)
    _settle_ranks(found, given)
    for options in (found.options, *found.stages):
        _settle_options(options, given, hooks)
    found.defaults = [name for name in found.defaults if name not in given]
    if both := [name for name in given if name in STAGE_FIELDS and any(name in stage for stage in found.stages)]:
        for stage in found.stages:
            for name in both:
                stage.pop(name, None)
        found.note(f"in every stage {', '.join(both)} of the line")
    if has_val and found.options.pop("val_split", None) is not None:
        found.note("its split of the training data is left out: validation data is given")


def _settle_options(options: dict[str, Any], given: Mapping[str, Any], hooks: Collection[str]) -> None:
    gone = [other for name, value in given.items() if value is not None for other in _EXCLUDED.get(name, ())]
    taken_back = [name for name, value in given.items() if value is None]
    gone += [*taken_back, *(["base_batch_size"] if "lr_scale" in taken_back else [])]
    if "optimizer" in hooks:
        gone += _OF_OPTIMIZER
    if "scheduler" in hooks:
        gone += ["schedule"]
    if given.get("compile"):
        gone += ["drop_last"]
    elif "compile" in given:
        gone += ["compile_mode", "compile_cache_dir", "compile_timeout_s"]
    if (optimizer := given.get("optimizer")) is not None:
        gone += [] if optimizer in ("sgd", "rmsprop") else ["momentum"]
        gone += [] if optimizer in FUSED_OPTIMIZERS else ["fused"]
        gone += ["weight_decay"] if optimizer == "lbfgs" else []
    for name in gone:
        options.pop(name, None)


def _settle_ranks(found: Found, given: Mapping[str, Any]) -> None:
    """Devices that don't fit the ranks of the line, and loader workers that the file counts per rank."""
    options, devices = found.options, given.get("devices")
    if isinstance(devices, tuple):
        options.pop("nproc", None)
    elif "nproc" in given and "devices" not in given and isinstance(options.get("devices"), tuple) and len(options["devices"]) != given["nproc"]:
        del options["devices"]
        found.note(f"its GPUs are left out: -n {given['nproc']}")
    if found.workers_per_rank is None or "num_workers" in given:
        return
    ranks = _ranks({**options, **given})
    options["num_workers"] = found.workers_per_rank * ranks
    found.note(f"num_workers {found.workers_per_rank} per rank, {options['num_workers']} over {ranks} rank{'s' if ranks > 1 else ''}")


def _ranks(options: Mapping[str, Any]) -> int:
    if options.get("nproc") is not None:
        return int(options["nproc"])
    if isinstance(devices := options.get("devices"), tuple):
        return len(devices)
    if devices == "cpu":
        return 1
    from nbddp.kernel.machine import this_machine  # imports torch

    return len(this_machine().gpus) or 1
