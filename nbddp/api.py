"""The Python entry points: what the magics do, as functions."""

from __future__ import annotations

import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.kernel.request import HOOKS, Named, Request
from nbddp.kernel.runs import attach, last_run, runs
from nbddp.runroot import run_root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from nbddp.kernel.run import Run
    from nbddp.kernel.settings import Settings
    from nbddp.stage import Stage

__all__ = ["attach", "last_run", "plan", "prune", "runs", "train"]


def train(
    model: object,
    data: object,
    val_data: object = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    validation_step: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    scheduler: Callable[[Any], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    metrics: Mapping[str, Any] | None = None,
    stages: Sequence[Stage | dict[str, Any]] | None = None,
    on_epoch_end: Callable[[Any], Any] | None = None,
    config: TrainConfig | Mapping[str, object] | str | Path | None = None,
    freeze_rb_layer: str | None = None,
    background: bool = False,
    note: str | None = None,
    **options: object,
) -> Run:
    """Train a model of this process on several ranks, each in a process of its own; the weights come back into it.

    Args:
        model: a torch.nn.Module; written to in place at the end.
        data: a map-style dataset, or a plain DataLoader, which is taken apart.
        val_data: the same for validation.
        loss: ``loss(output, target)``, a mean over samples; batches are ``(*inputs, target)``.
        training_step: ``training_step(model, batch)`` instead of a loss: returns the scalar loss, or a dict with ``loss``.
        validation_step: the same for validation; default: the training step.
        optimizer: ``optimizer(model)``, or the name of one.
        scheduler: ``scheduler(optimizer)``.
        collate_fn: makes a batch of a list of samples.
        sampler: the order of the training samples: an object that yields indices and has a length, or ``sampler(dataset)``.
        metrics: by name a torchmetrics metric, an `nbddp.Metric`, or ``f(output, target)`` that gives a value per sample; recorded as ``val_<name>``.
        stages: a list of `nbddp.Stage`.
        on_epoch_end: ``on_epoch_end(state)``, called on rank 0; ``state.report(name=value)`` records.
        config: options as a TrainConfig, a dict or a YAML file; `options` win over them.
        freeze_rb_layer: patterns over parameter names that the key of that name in a settings file stands for.
        background: return at once; ``run.wait()`` waits and loads the weights.
        note: kept with the run.
        **options: fields of `TrainConfig`.

    Returns:
        the run.

    Raises:
        ConfigError, BundleError: before anything is started.
        RunFailed: where the run fails; `WorkerError` says on which rank and line.
    """
    requested = time.time()
    from nbddp.kernel.train import train as run_training

    hooks = {
        "loss": loss,
        "training_step": training_step,
        "validation_step": validation_step,
        "scheduler": scheduler,
        "collate_fn": collate_fn,
        "sampler": sampler,
        "metrics": metrics,
        "stages": stages,
        "on_epoch_end": on_epoch_end,
        "optimizer": None if isinstance(optimizer, str) else optimizer,
    }
    if isinstance(optimizer, str):
        options["optimizer"] = optimizer
    request = _request(model, data, val_data, hooks, config, options, requested=requested, freeze_rb_layer=freeze_rb_layer)
    return run_training(replace(request, background=background, note=note))


def plan(
    model: object,
    data: object,
    val_data: object = None,
    *,
    config: TrainConfig | Mapping[str, object] | str | Path | None = None,
    **options: object,
) -> None:
    """Print what `train` with these arguments would do; starts nothing.

    Raises:
        ConfigError: a wrong value, its rule and the remedy.
    """
    from nbddp.kernel.train import dry_run

    hooks = {name: options.pop(name) for name in HOOKS if name in options and not (name == "optimizer" and isinstance(options[name], str))}
    dry_run(_request(model, data, val_data, hooks, config, options, requested=time.time()))


def prune(root: str | Path | None = None, *, runs: object = None, keep: int = 20, older_than_days: float = 30, dry_run: bool = True) -> list[str]:
    """Delete old runs, or those that are named, and staged data that nobody needs any more. A run that is not over yet is never deleted.

    Args:
        root: folder of the run directories; default: this kernel's.
        runs: these alone, however young: runs, ids, directories, or a table such as ``nbddp.runs().sorted("best")[10:]``.
        keep: the newest runs that stay in any case.
        older_than_days: only runs older than this are deleted.
        dry_run: only say which.

    Returns:
        the ids of the runs that were, or would be, deleted.

    Raises:
        ConfigError: for negative numbers, for what names no run, and where one of those named is not over yet.
    """
    from nbddp.kernel.pruning import prune_named, prune_old

    if runs is None:
        return prune_old(run_root(root), keep=keep, older_than_days=older_than_days, dry_run=dry_run).ids
    return prune_named([runs], run_root(root), dry_run=dry_run).ids


def _request(
    model: object,
    data: object,
    val_data: object,
    hooks: Mapping[str, object],
    config: TrainConfig | Mapping[str, object] | str | Path | None,
    options: Mapping[str, object],
    *,
    requested: float,
    freeze_rb_layer: str | None = None,
) -> Request:
    caller = _caller()
    main, cells, cell = _notebook()
    given = [name for name, hook in hooks.items() if hook is not None]
    file = _settings(config, options, given, has_val=val_data is not None, freeze_rb_layer=freeze_rb_layer)
    if file.stages:
        hooks = {**hooks, "stages": list(file.stages)}
    return Request(
        model=Named(_name_of(model, caller, "model"), model),
        data=Named(_name_of(data, caller, "data"), data),
        val=None if val_data is None else Named(_name_of(val_data, caller, "val_data"), val_data),
        options=_options(file.config, options),
        hooks=hooks,
        requested=requested,
        cell=cell,
        main=main,
        cells=cells,
        notes=file.notes,
    )


def _settings(
    config: TrainConfig | Mapping[str, object] | str | Path | None,
    options: Mapping[str, object],
    hooks: Sequence[str],
    *,
    has_val: bool,
    freeze_rb_layer: str | None,
) -> Settings:
    """What `config` says, in whichever form."""
    from nbddp.kernel.settings import Settings, read

    if config is None or isinstance(config, TrainConfig):
        return Settings(config or TrainConfig())
    source = Path(config) if isinstance(config, str) else config
    return read(source, over=_plain(options), hooks=hooks, has_val=has_val, freeze_rb_layer=freeze_rb_layer)


def _options(base: TrainConfig, options: Mapping[str, object]) -> dict[str, object]:
    """The fields of a settings file, and `options` over them."""
    over = TrainConfig.read(_plain(options))
    return {**{name: getattr(base, name) for name in base.given}, **over}


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """The options, with a directory where `resume` names a Run."""
    resume = options.get("resume")
    return {**options, "resume": str(resume.dir)} if resume is not None and hasattr(resume, "dir") else dict(options)


def _caller() -> FrameType | None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame


def _name_of(value: object, caller: FrameType | None, default: str) -> str:
    """How the caller calls an object, for messages."""
    if caller is not None:
        for scope in (caller.f_locals, caller.f_globals):
            for name, other in scope.items():
                if other is value and not name.startswith("_"):
                    return name
    return default


def _notebook() -> tuple[Any, Any, Any]:
    """The notebook's `__main__`, its cells and the running one; nothing of it in a script."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return sys.modules.get("__main__"), {}, None
    from nbddp.bundle import CellSource
    from nbddp.kernel.cells import CellSources, running_cell

    return shell.user_module, CellSources(shell, CellSource), running_cell(shell)
