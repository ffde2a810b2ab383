"""Everything that can be said about a request before something is written: options put together, data taken apart, hooks and stages checked, the plan.

Runs in the kernel's main thread.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nbddp.config import TrainConfig
from nbddp.data import split_size
from nbddp.errors import ConfigError
from nbddp.kernel import inputs, norms, resume, resume_rules, weights
from nbddp.kernel.hooks import check_hooks
from nbddp.kernel.machine import check_devices, this_machine
from nbddp.kernel.request import Request
from nbddp.kernel.runs import training
from nbddp.kernel.trackers import check_trackers
from nbddp.metric import check_metrics
from nbddp.planning import Job, Machine, make_plan
from nbddp.plans import Plan
from nbddp.runroot import run_root
from nbddp.stage import OF_OPTIMIZER, OF_SCHEDULE, Stage, check_stages, read_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    class Decide(Protocol):
        """`nbddp.kernel.norms.decide`, or what remembers it."""

        def __call__(self, config: TrainConfig, model: nn.Module, plan: Plan, *, asked: bool) -> tuple[dict[str, str], list[str]]: ...

    Devices = Callable[[Plan, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check; nothing is written yet."""

    request: Request
    model: nn.Module
    datasets: dict[str, tuple[str, Any]]
    hooks: dict[str, object]
    config: TrainConfig
    plan: Plan
    root: Path
    start: weights.Start
    swaps: dict[str, str]
    matmul_precision: str
    notes: tuple[str, ...]
    resumed: resume.ResumePoint | None = None

    def plan_line(self, data: str = "") -> str:
        inherited = "matmul_precision" not in self.config.given and self.matmul_precision != "highest"
        matmul = f"matmul {self.matmul_precision} (the notebook's)" if inherited else ""
        begins = f"{self.request.model.name} {self.start.line}" if self.start.line else "" if self.resumed is None else self.resumed.line
        return self.plan.line(*(part for part in (matmul, begins, data) if part))

    @property
    def remarks(self) -> list[str]:
        """What was taken apart or assumed, then warnings: a line each."""
        return [*self.plan.stage_lines(), *self.notes, *(f"note: {warning}" for warning in self.plan.warnings)]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a request says before it is known how many ranks there are and what they run on."""

    request: Request
    model: nn.Module
    train: inputs.Data
    val: inputs.Data | None
    hooks: dict[str, object]
    stages: tuple[Stage, ...]
    config: TrainConfig
    root: Path
    n_train: int
    n_val: int
    job: Job
    notes: tuple[str, ...]
    resumed: resume.ResumePoint | None

    def plan(self, machine: Machine, config: TrainConfig | None = None) -> Plan:
        """The plan on a machine; with `config` that of other options.

        Raises:
            ConfigError: as `make_plan`.
        """
        return make_plan(config or self.config, n_train=self.n_train, n_val=self.n_val, machine=machine, job=self.job, stages=self.stages)


def prepare(request: Request) -> Prepared:
    """Check everything that can be checked before something is written.

    Raises:
        ConfigError: a wrong value, its rule and the remedy.
        CheckpointError: where the run is to start from weights that do not fit, or to go on from a checkpoint that is not complete.
    """
    return complete(outline(request), this_machine())


def outline(request: Request) -> Outline:
    """Take model and data, put the options together and check the hooks.

    Raises:
        ConfigError, CheckpointError: as `prepare`.
    """
    _refuse_nested()
    model, notes = inputs.take_model(request.model)
    notes += request.notes
    check_hooks(request.hooks, model)
    stages = read_stages(request.hooks.get("stages"))
    names = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)} if stages else {}
    hooked = {name: request.hooks.get(name) is not None for name in ("optimizer", "scheduler")}
    check_stages(stages, names, **hooked)
    train = inputs.take_data(request.data, training=True, sampler=request.hooks.get("sampler"))
    val = None if request.val is None else inputs.take_data(request.val, training=False)
    given = _given(request)
    root = run_root(given.run_root)
    brought = {**train.options, **({} if val is None else val.options)}
    point = None if given.resume is None else resume.find(given.resume, root=root, name=given.name, model=model)
    config, changes = _config(given, brought, point)
    check_trackers(config)
    notes += changes
    notes += _said(request.data.name, train, config) + ([] if val is None or request.val is None else _said(request.val.name, val, config))
    hooks = _hooks(request, train, val, stages)
    n_train, n_val, said = _sizes(request, train, val, config, hooks, given)
    notes += said
    if "metrics" in hooks:
        check_metrics(hooks["metrics"], validated=n_val > 0)
    job = _job(hooks, model, validates=n_val > 0)
    return Outline(request, model, train, val, hooks, stages, config, root, n_train, n_val, job, tuple(notes), point)


def complete(outlined: Outline, machine: Machine, *, decide: Decide = norms.decide, devices: Devices = check_devices) -> Prepared:
    """Plan it for a machine, and check what depends on the plan.

    `decide` and `devices` are what looks through the modules of the model, and at the GPUs: both take their time, and a panel asks with every key.

    Raises:
        ConfigError, CheckpointError: as `prepare`.
    """
    request, model, config, point = outlined.request, outlined.model, outlined.config, outlined.resumed
    hooks, stages, root = outlined.hooks, outlined.stages, outlined.root
    notes = list(outlined.notes)
    plan = outlined.plan(machine)
    notes += devices(plan, root)
    if point is not None:
        notes += inputs.stateful(request.data, outlined.train.dataset, hooks.get("sampler"))
        notes += resume_rules.check(point, config, plan, stages=stages, sampler=hooks.get("sampler"))
    swaps, said = decide(config, model, plan, asked="norm" in TrainConfig(**request.options).given)
    norms.check_stages(stages, model, swaps)
    notes += said
    if point is not None:
        resume_rules.check_norm(point, model, swaps, config)
    if request.hooks.get("scheduler") is not None and "scheduler_interval" not in config.given:
        notes.append("the scheduler advances every step; --scheduler-interval epoch has it advance every epoch")
    if outlined.n_val == 0 and "validation_step" in hooks:
        notes.append("the hook validation_step has no effect without validation data: --val or --val-split")
    notes += [f"{request.model.name} is being trained by run {run.id} as well; the run that ends last lands in it" for run in training(model)]
    precision = config.matmul_precision
    if "matmul_precision" not in config.given:
        precision = torch.get_float32_matmul_precision()  # type: ignore[assignment]
    start = weights.Start() if point is not None else weights.initial_weights(config.init, model, root, swaps)
    datasets = {"train": (request.data.name, outlined.train.dataset)}
    if outlined.val is not None and request.val is not None:
        datasets["val"] = (request.val.name, outlined.val.dataset)
    return Prepared(request, model, datasets, hooks, config, plan, root, start, swaps, precision, tuple(notes), point)


def _hooks(request: Request, train: inputs.Data, val: inputs.Data | None, stages: tuple[Stage, ...]) -> dict[str, object]:
    """What the cell defines, over what DataLoaders brought."""
    hooks = {name: value for name, value in {**train.hooks, **({} if val is None else val.hooks), **request.hooks}.items() if value is not None}
    if "val_collate_fn" in hooks and "collate_fn" in request.hooks:
        del hooks["val_collate_fn"]
    if stages:
        hooks["stages"] = stages
    return hooks


def _sizes(
    request: Request, train: inputs.Data, val: inputs.Data | None, config: TrainConfig, hooks: dict[str, object], given: TrainConfig
) -> tuple[int, int, list[str]]:
    """Numbers of samples to train and to validate on, and how they came about."""
    n_train, n_val = len(train.dataset), 0 if val is None else len(val.dataset)
    name = request.val.name if request.val else "the validation data"
    if val is not None and n_val == 0:
        message = f"{name} is empty: leave --val out, or give it samples"
        raise ConfigError(message)
    if "sampler" in hooks:
        n_train = inputs.count_sampled(hooks["sampler"], train.dataset, given=given.given, val_split=config.val_split, seed=config.seed)
        return n_train, n_val, []
    if config.val_split is None:
        return n_train, n_val, []
    if val is not None:
        message = f"val_split={config.val_split:g} and --val {name}: validate on one of the two"
        raise ConfigError(message)
    if n_train < 2:
        message = f"val_split={config.val_split:g}: {n_train} samples can't be split"
        raise ConfigError(message)
    n_val = split_size(n_train, config.val_split)
    said = f"val_split {config.val_split:g}: {n_val} samples to validate on, {n_train - n_val} to train on"
    return n_train - n_val, n_val, [said]


def _refuse_nested() -> None:
    in_kernel = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    if not in_kernel and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        message = "RANK and WORLD_SIZE are set: working as a rank of torchrun is not available yet; call nbddp.train from a plain process"
        raise ConfigError(message)


def _given(request: Request) -> TrainConfig:
    """The options as written, which the hooks must leave room for."""
    given = TrainConfig(**request.options)
    if request.hooks.get("optimizer") is not None:
        clash = [name for name in ("optimizer", *OF_OPTIMIZER) if name in given.given]
        if clash:
            message = f"{', '.join(clash)} beside the hook optimizer, which sets all of it: keep one of the two"
            raise ConfigError(message)
    if request.hooks.get("scheduler") is not None:
        clash = [name for name in OF_SCHEDULE if getattr(given, name) != TrainConfig.model_fields[name].default]
        if clash:
            message = f"{', '.join(clash)} beside the hook scheduler, which makes the schedule: keep one of the two"
            raise ConfigError(message)
    elif "scheduler_interval" in given.given and not any(stage.scheduler for stage in read_stages(request.hooks.get("stages"))):
        message = f"scheduler_interval={given.scheduler_interval} without the hook scheduler: there is nothing to advance"
        raise ConfigError(message)
    return given


def _config(given: TrainConfig, brought: dict[str, object], point: resume.ResumePoint | None) -> tuple[TrainConfig, list[str]]:
    """The options as written, over those that DataLoaders brought, over those of the checkpoint; with what differs from that."""
    if point is not None:
        merged = resume_rules.merge(point, brought=brought, given=given)
        return merged.config, [f"unlike the checkpoint: {change}" for change in merged.changes]
    if given.batch_size is not None or given.per_rank_batch_size is not None:
        brought = {name: value for name, value in brought.items() if name not in ("batch_size", "per_rank_batch_size")}
    return TrainConfig(**{**brought, **{name: getattr(given, name) for name in given.given}}), []


def _job(hooks: dict[str, object], model: nn.Module, *, validates: bool) -> Job:
    """What the plan needs to know of model and hooks."""
    recorded: tuple[str, ...] | None = None
    given = hooks.get("metrics")
    metrics = given if isinstance(given, dict) else {}
    known = all(callable(metric) and not hasattr(metric, "update") for metric in metrics.values())  # others may compute several values
    if known and not {"training_step", "validation_step", "on_epoch_end"} & set(hooks):  # those may return, or report, any name
        recorded = ("loss", *(["val_loss", *(f"val_{name}" for name in metrics)] if validates else []))
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    return Job(
        has_optimizer=hooks.get("optimizer") is not None,
        float64=bool(floating) and all(parameter.dtype is torch.float64 for parameter in floating),
        recorded=recorded,
    )


def _said(name: str, data: inputs.Data, config: TrainConfig) -> list[str]:
    """What was taken out of a DataLoader, a line."""
    lines = list(data.notes)
    taken = [f"{option} {value}" for option, value in data.options.items() if getattr(config, option) == value]
    taken += [hook.removeprefix("val_") for hook in data.hooks]
    if taken:
        lines.append(f"{name}: taken from the DataLoader: dataset, {', '.join(taken)}")
    return lines
