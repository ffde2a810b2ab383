"""Stages: parts of a run that follow each other, each with options, an optimizer and a choice of parameters of its own.

Written in the notebook, checked in the kernel, obeyed in the ranks. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.rules import FUSED_OPTIMIZERS

STAGE_FIELDS = (
    *("batch_size", "per_rank_batch_size", "accumulate", "epochs", "max_steps", "shuffle", "drop_last"),
    *("optimizer", "lr", "weight_decay", "momentum", "fused", "lr_scale", "base_batch_size", "warmup_steps", "schedule", "scheduler_interval"),
    *("clip_norm", "on_nan", "precision", "matmul_precision", "compile", "compile_mode"),
    *("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "grad_compression"),
    *("val_every", "monitor", "mode", "min_delta", "patience"),
)
"""Options that a stage may set; the others are those of the whole run."""

OF_OPTIMIZER = ("lr", "weight_decay", "momentum", "fused", "lr_scale", "base_batch_size")
"""Options that a function which makes the optimizer excludes, beside the optimizer's name."""

OF_SCHEDULE = ("schedule", "warmup_steps")
"""Options that a function which makes the scheduler excludes."""

_EITHER = {"batch_size": "per_rank_batch_size", "per_rank_batch_size": "batch_size"}

_ARGUMENTS = ("name", "freeze", "train_only", "freeze_batch_norm", "scheduler")


class Stage:
    """One stage of a run: ``stages = [Stage("head", freeze="backbone.*", epochs=3), Stage("all", epochs=5, lr=1e-4)]``.

    Each stage has an optimizer and a scheduler of its own, and DDP is built anew for what trains in it.

    Args:
        name: shown in the view, in the history and in messages; default: its number, from 0.
        freeze: patterns over parameter names (as of ``fnmatch``) that do not train in this stage, one or several.
        train_only: patterns of the only parameters that train; excludes `freeze`.
        freeze_batch_norm: keep BatchNorm layers whose parameters are all frozen in eval mode, so that their running statistics stay as well.
        optimizer: ``optimizer(model)``, or the name of one; default: as for the run.
        scheduler: ``scheduler(optimizer)``; default: as for the run.
        **options: fields of `TrainConfig` that differ from the run's; `epochs` and `max_steps` count within the stage. The run's `max_steps` and
            `max_time` limit the run, not a stage; with one of them and no `epochs` every stage but the last says how long it is.

    Raises:
        ConfigError: for an unknown option, a wrong value, or one that only a whole run can have.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        freeze: str | Iterable[str] = (),
        train_only: str | Iterable[str] = (),
        freeze_batch_norm: bool = False,
        optimizer: str | Callable[[Any], Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        **options: object,
    ) -> None:
        _check_arguments(name, freeze_batch_norm, optimizer, scheduler)
        self.name = name
        self.freeze, self.train_only = _patterns("freeze", freeze), _patterns("train_only", train_only)
        if self.freeze and self.train_only:
            message = f"{self}: freeze and train_only are both given: what one names, the other leaves out; keep one of the two"
            raise ConfigError(message)
        self.freeze_batch_norm = freeze_batch_norm
        self.scheduler = scheduler
        self.optimizer: Callable[[Any], Any] | None = None
        if isinstance(optimizer, str):
            options["optimizer"] = optimizer
        else:
            self.optimizer = optimizer
        self.options = self._checked(options)

    def __repr__(self) -> str:
        """As it was written, but for the defaults."""
        marks = {"freeze": self.freeze, "train_only": self.train_only, "freeze_batch_norm": self.freeze_batch_norm}
        functions = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        shown = [f"{name}={value!r}" for name, value in marks.items() if value]
        shown += [f"{name}={getattr(value, '__name__', value)}" for name, value in functions.items() if value is not None]
        shown += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"Stage({', '.join([*([] if self.name is None else [repr(self.name)]), *shown])})"

    def __str__(self) -> str:
        """What messages call it."""
        return "Stage" if self.name is None else f"stage {self.name}"

    def _checked(self, options: Mapping[str, object]) -> dict[str, Any]:
        """The options by the fields' own names; the rules between them are checked with those of the run."""
        for name in options:
            if name not in TrainConfig.model_fields and (near := suggest(name, _ARGUMENTS)):
                message = f"{self}: {name} is not an option.{near}"
                raise ConfigError(message)
        try:
            read = TrainConfig.read(options)
        except ConfigError as error:
            message = f"{self}: {error}"
            raise ConfigError(message) from None
        for field in read:
            if field not in STAGE_FIELDS:
                message = f"{self}: {field} is an option of the whole run, not of a stage: give it to the run, beside `stages`"
                raise ConfigError(message)
        clash = [field for field in OF_OPTIMIZER if field in read]
        if self.optimizer is not None and clash:
            message = f"{self}: {', '.join(clash)} beside the function optimizer, which sets all of it: keep one of the two"
            raise ConfigError(message)
        clash = [field for field in OF_SCHEDULE if field in read]
        if self.scheduler is not None and clash:
            message = f"{self}: {', '.join(clash)} beside the function scheduler, which makes the schedule: keep one of the two"
            raise ConfigError(message)
        return read

    def config(self, base: TrainConfig) -> TrainConfig:
        """The options that hold in this stage: its own over those of the run.

        Raises:
            ConfigError: where the two together break a rule.
        """
        kept = {field: getattr(base, field) for field in base.given - self._without(base)}
        try:
            return TrainConfig(**{**kept, **self.options})
        except ConfigError as error:
            message = f"{self}: {error}"
            raise ConfigError(message) from None

    def _without(self, base: TrainConfig) -> set[str]:
        """The run's options that do not hold here: its limits, what this stage gives another way, and what its own optimizer knows nothing of."""
        out = {"max_steps", "max_time"} | {_EITHER[field] for field in self.options if field in _EITHER}
        if self.optimizer is not None:
            out |= {"optimizer", *OF_OPTIMIZER}
        if self.scheduler is not None:
            out |= set(OF_SCHEDULE)
        own = self.options.get("optimizer", base.optimizer)
        if own != base.optimizer:
            out |= set() if own in ("sgd", "rmsprop") else {"momentum"}
            out |= set() if own in FUSED_OPTIMIZERS else {"fused"}
            out |= {"weight_decay"} if own == "lbfgs" else set()
        return out


def _check_arguments(name: object, freeze_batch_norm: object, optimizer: object, scheduler: object) -> None:
    if name is not None and (not isinstance(name, str) or not name.strip()):
        message = f"Stage: name={name!r} must be a text; options are given by name, such as Stage(epochs=3)"
        raise ConfigError(message)
    called = "Stage" if name is None else f"stage {name}"
    if not isinstance(freeze_batch_norm, bool):
        message = f"{called}: freeze_batch_norm={freeze_batch_norm!r} must be True or False"
        raise ConfigError(message)
    for role, function in (("optimizer", None if isinstance(optimizer, str) else optimizer), ("scheduler", scheduler)):
        if function is not None and not callable(function):
            message = f"{called}: {role} is a {type(function).__name__}: it must be a function"
            raise ConfigError(message)


def _patterns(name: str, given: object) -> tuple[str, ...]:
    values = (given,) if isinstance(given, str) else given
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        message = f"Stage: {name}={given!r} must be a pattern over parameter names, or a list of them"
        raise ConfigError(message)
    patterns = tuple(values)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        message = f"Stage: {name}={given!r} must be a pattern over parameter names, or a list of them"
        raise ConfigError(message)
    return patterns


def matching(names: Iterable[str], patterns: Iterable[str], what: str = "parameter") -> set[str]:
    """The names, those of a `what`, that at least one pattern matches.

    Raises:
        ConfigError: for a pattern that matches nothing, with names that it may have meant.
    """
    known, found = list(names), set()
    for pattern in patterns:
        matched = fnmatch.filter(known, pattern) or [name for name in known if name == pattern]  # names may have brackets, as patterns do
        if not matched:
            names_are = f" The names are {', '.join(known[:6])}{', ...' if len(known) > 6 else ''}" if known else " There is none"
            message = f"the pattern {pattern} matches no {what}.{_meant(pattern, known) or names_are}"
            raise ConfigError(message)
        found.update(matched)
    return found


def _meant(pattern: str, names: Collection[str]) -> str:
    """Patterns that match something and look like this one: a module was named without what is in it, or was misspelt."""
    if fnmatch.filter(names, f"{pattern}.*"):
        return f" Did you mean {pattern}.*?"
    modules = dict.fromkeys(name[:end] for name in names for end, letter in enumerate(name) if letter == ".")
    return suggest(pattern, [*(f"{module}.*" for module in modules), *names])


def trainable(names: Mapping[str, bool], stage: Stage | None, *, tied: Iterable[Collection[str]] = ()) -> dict[str, bool]:
    """Which parameters train in a stage.

    Args:
        names: per parameter whether it trains as the user left it.
        stage: None for a run without stages.
        tied: groups of names that stand for one parameter; a pattern that matches one of them is about it.

    Raises:
        ConfigError: for a pattern that matches nothing, and where nothing would train.
    """
    if stage is None or not (stage.freeze or stage.train_only):
        return dict(names)
    try:
        matched = matching(names, stage.train_only or stage.freeze)
    except ConfigError as error:
        message = f"{stage}: {error}"
        raise ConfigError(message) from None
    for group in tied:
        if matched & set(group):
            matched |= set(group)
    if stage.train_only:
        return {name: name in matched for name in names}
    chosen = {name: trains and name not in matched for name, trains in names.items()}
    if not any(chosen.values()):
        message = f"{stage}: freeze={', '.join(stage.freeze)} freezes all that would train: leave something out of it"
        raise ConfigError(message)
    return chosen


def read_stages(value: object) -> tuple[Stage, ...]:
    """The stages of a run, from what the name `stages` is bound to; one without a name is called by its number.

    Raises:
        ConfigError: for anything but a list of stages with different names.
    """
    if value is None:
        return ()
    if isinstance(value, Stage):
        message = "stages is one Stage: it must be a list, stages = [Stage(...), Stage(...)]"
        raise ConfigError(message)
    if not isinstance(value, list | tuple) or not value:
        what = "an empty list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
        message = f"stages is {what}: it must be a list of nbddp.Stage"
        raise ConfigError(message)
    stages = [Stage(**entry) if isinstance(entry, dict) else entry for entry in value]
    for number, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            message = f"stages[{number}] is a {type(stage).__name__}: it must be an nbddp.Stage, or a dict of its arguments"
            raise ConfigError(message)
    named = [_named(stage, number) for number, stage in enumerate(stages)]
    names = [stage_name(stage, number) for number, stage in enumerate(named)]
    if twice := [name for name in names if names.count(name) > 1]:
        message = f"two stages are called {twice[0]}: give them different names"
        raise ConfigError(message)
    return tuple(named)


def _named(stage: Stage, number: int) -> Stage:
    """A copy: the user's own may stand in several lists."""
    named = copy.copy(stage)
    named.name = stage_name(stage, number)
    return named


def check_stages(stages: Iterable[Stage], names: Mapping[str, bool], *, optimizer: bool, scheduler: bool) -> None:
    """Whether the patterns of each stage match, and its options agree with the functions of the run.

    Args:
        stages: as `read_stages` gives them.
        names: per parameter, under each of its names, whether it trains as the user left it.
        optimizer: a function of the run makes the optimizer.
        scheduler: the same for the scheduler.

    Raises:
        ConfigError: names the stage.
    """
    for stage in stages:
        trainable(names, stage)
        own = [field for field in OF_OPTIMIZER if field in stage.options]
        if optimizer and own and "optimizer" not in stage.options:
            message = f"{stage}: {', '.join(own)} beside the hook optimizer, which sets all of it: give the stage an optimizer of its own"
            raise ConfigError(message)
        if scheduler and stage.scheduler is None and "warmup_steps" in stage.options and "schedule" not in stage.options:
            message = f"{stage}: warmup_steps beside the hook scheduler, which makes the schedule: give the stage a schedule of its own"
            raise ConfigError(message)
        hooked = stage.scheduler is not None or (scheduler and "schedule" not in stage.options)
        if "scheduler_interval" in stage.options and not hooked:
            message = f"{stage}: scheduler_interval={stage.options['scheduler_interval']} without a function scheduler: there is nothing to advance"
            raise ConfigError(message)


def stage_name(stage: Stage | None, index: int) -> str:
    """What a stage is called: its name, else its number."""
    return str(index) if stage is None or stage.name is None else stage.name
