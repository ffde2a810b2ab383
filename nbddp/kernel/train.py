"""From a request to a run: checks, plan, bundle, launch, and the wait for its end.

Runs in the kernel's main thread. Nothing is started, and nothing is left on disk, where a check fails.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbddp.bundle import Bundler, DataRef, Interpreter
from nbddp.config import TrainConfig
from nbddp.data import split_size
from nbddp.errors import BundleError, ConfigError
from nbddp.kernel import inputs, weights
from nbddp.kernel.hooks import check_hooks
from nbddp.kernel.interrupt import Interrupts
from nbddp.kernel.machine import check_devices, this_machine, visible_devices
from nbddp.kernel.request import Bind, Request
from nbddp.kernel.run import Run
from nbddp.kernel.runs import register, run_root, training
from nbddp.kernel.text import bytes_text
from nbddp.kernel.view import View, in_kernel, open_view
from nbddp.launch import local
from nbddp.launch.order import Order
from nbddp.norm import keep_warning
from nbddp.planning import Plan, make_plan
from nbddp.process import ProcessId
from nbddp.rundir import RunDir, data_lock, release_data
from nbddp.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from nbddp.state import RunState


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
    init_path: Path | None
    starts_from: str | None
    matmul_precision: str
    notes: tuple[str, ...]

    def plan_line(self, data: str = "") -> str:
        return self.plan.line(*([f"{self.request.model.name} {self.starts_from}"] if self.starts_from else []), *([data] if data else []))

    @property
    def remarks(self) -> list[str]:
        """What was taken apart or assumed, then warnings: a line each."""
        return [*self.notes, *(f"note: {warning}" for warning in self.plan.warnings)]


def prepare(request: Request) -> Prepared:
    """Check everything that can be checked before something is written.

    Raises:
        ConfigError: a wrong value, its rule and the remedy.
        CheckpointError: where the run is to start from weights that do not fit.
    """
    _refuse_nested()
    model, notes = inputs.take_model(request.model)
    check_hooks(request.hooks, model)
    train = inputs.take_data(request.data, training=True)
    val = None if request.val is None else inputs.take_data(request.val, training=False)
    config = _config(request, train, val)
    notes += _said(request.data.name, train, config) + ([] if val is None or request.val is None else _said(request.val.name, val, config))
    n_train, n_val = len(train.dataset), 0 if val is None else len(val.dataset)
    if config.val_split is not None:
        if val is not None:
            message = f"val_split={config.val_split:g} and --val {request.val.name if request.val else ''}: validate on one of the two"
            raise ConfigError(message)
        if n_train < 2:
            message = f"val_split={config.val_split:g}: {n_train} samples can't be split"
            raise ConfigError(message)
        n_val = split_size(n_train, config.val_split)
        n_train -= n_val
        notes.append(f"val_split {config.val_split:g}: {n_val} samples to validate on, {n_train} to train on")
    if val is not None and n_val == 0:
        message = f"{request.val.name if request.val else 'the validation data'} is empty: leave --val out, or give it samples"
        raise ConfigError(message)
    plan = make_plan(config, n_train=n_train, n_val=n_val, machine=this_machine(), has_optimizer=request.hooks.get("optimizer") is not None)
    root = run_root(config.run_root)
    notes += check_devices(plan, root)
    if (warning := keep_warning(model, world_size=plan.nproc, per_rank=plan.micro_batch_size)) is not None:
        notes.append(warning)
    if request.hooks.get("scheduler") is not None and "scheduler_interval" not in config.given:
        notes.append("the scheduler advances every step; --scheduler-interval epoch has it advance every epoch")
    notes += [f"{request.model.name} is being trained by run {run.id} as well; the run that ends last lands in it" for run in training(model)]
    precision = config.matmul_precision
    if "matmul_precision" not in config.given:
        precision = torch.get_float32_matmul_precision()  # type: ignore[assignment]
    init_path, starts_from = weights.initial_weights(config.init, model, root)
    hooks = {name: value for name, value in {**train.hooks, **({} if val is None else val.hooks), **request.hooks}.items() if value is not None}
    if "val_collate_fn" in hooks and "collate_fn" in request.hooks:
        del hooks["val_collate_fn"]
    datasets = {"train": (request.data.name, train.dataset)}
    if val is not None and request.val is not None:
        datasets["val"] = (request.val.name, val.dataset)
    return Prepared(request, model, datasets, hooks, config, plan, root, init_path, starts_from, precision, tuple(notes))


def _refuse_nested() -> None:
    in_kernel = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    if not in_kernel and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        message = "RANK and WORLD_SIZE are set: working as a rank of torchrun is not available yet; call nbddp.train from a plain process"
        raise ConfigError(message)


def _config(request: Request, train: inputs.Data, val: inputs.Data | None) -> TrainConfig:
    """The options as written, over those that DataLoaders brought."""
    given = TrainConfig(**request.options)
    brought = {**train.options, **({} if val is None else val.options)}
    if given.batch_size is not None or given.per_rank_batch_size is not None:
        brought.pop("batch_size", None)
    config = TrainConfig(**{**brought, **{name: getattr(given, name) for name in given.given}})
    if request.hooks.get("optimizer") is not None:
        clash = [name for name in ("optimizer", "lr", "weight_decay", "momentum", "fused") if name in given.given]
        if clash:
            message = f"{', '.join(clash)} beside the hook optimizer, which sets all of it: keep one of the two"
            raise ConfigError(message)
    if request.hooks.get("scheduler") is None and "scheduler_interval" in given.given:
        message = f"scheduler_interval={config.scheduler_interval} without the hook scheduler: there is nothing to advance"
        raise ConfigError(message)
    return config


def _said(name: str, data: inputs.Data, config: TrainConfig) -> list[str]:
    """What was taken out of a DataLoader, a line."""
    lines = list(data.notes)
    taken = [f"{option} {value}" for option, value in data.options.items() if getattr(config, option) == value]
    taken += [hook.removeprefix("val_") for hook in data.hooks]
    if taken:
        lines.append(f"{name}: taken from the DataLoader: dataset, {', '.join(taken)}")
    return lines


def dry_run(request: Request) -> None:
    """Print what would happen: the plan line, and what there is to say about it. Starts nothing."""
    if request.hooks.get("loss") is None and request.hooks.get("training_step") is None:
        request = _with_placeholder_loss(request)
    prepared = prepare(request)
    print("\n".join([prepared.plan_line(), *prepared.remarks]))  # noqa: T201 - the output of the cell


def _with_placeholder_loss(request: Request) -> Request:
    """A plan needs no loss."""
    from dataclasses import replace

    return replace(request, hooks={**request.hooks, "loss": torch.nn.functional.mse_loss})


def train(request: Request, bind: Bind | None = None) -> Run:
    """Train as asked; returns when the run has ended, or at once in the background.

    Args:
        request: what was asked for.
        bind: called with the run as soon as it exists.

    Raises:
        ConfigError, BundleError, CheckpointError: before anything is started.
        LaunchError, RunFailed: where the run fails.
    """
    with Interrupts().taken() as interrupts:
        prepared = prepare(request)
        run_dir, plan_line = _write(prepared, interrupts)
        if heads := [*([plan_line] if in_kernel() else []), *prepared.remarks]:  # in a terminal the view begins with the plan
            print("\n".join(heads))  # noqa: T201 - heads the run
        supervised = local.launch(run_dir, _order(prepared, run_dir), local.standby)
        try:
            run = Run(run_dir, supervised=supervised, model=prepared.model, blocking=not request.background)
            register(run)
            if bind is not None:
                bind(run)
            watch = _Watch(run, plan_line, background=request.background)
            run.follower.add_listener(watch.update)
        except BaseException:
            supervised.kill()  # nobody would be there to stop it
            raise
        if request.background:
            interrupts.handle(watch.interrupted)
            return run
        interrupts.wait(run.follower.done, watch.interrupted)
        watch.end()
    if (error := run.error) is not None:
        raise error
    return run


def _write(prepared: Prepared, interrupts: Interrupts) -> tuple[RunDir, str]:
    """Make the run directory and what travels; return it with the plan line. From here on interrupts are counted; where it fails, nothing is left."""
    run_dir = RunDir.create(prepared.root, prepared.config.name or type(prepared.model).__name__)
    try:
        plan_line = _bundle(prepared, run_dir)
        interrupts.hold()
    except BaseException:
        interrupts.clear_away(lambda: _remove(run_dir))
        raise
    return run_dir, plan_line


def _remove(run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.path, ignore_errors=True)
    release_data(run_dir.root)


def _order(prepared: Prepared, run_dir: RunDir) -> Order:
    on_exit = prepared.config.on_kernel_exit
    if on_exit == "auto":
        on_exit = "continue" if prepared.request.background else "stop"
    return Order(str(run_dir.path), dict(os.environ), str(Path.cwd()), ProcessId.current(), on_exit)


def _bundle(prepared: Prepared, run_dir: RunDir) -> str:
    """Write the spec, the data and the bundle; return the plan line."""
    request = prepared.request
    spec = _spec(prepared, run_dir)
    _write_spec(run_dir, spec)  # the run is live from here on, so that nobody releases its data
    release_data(prepared.root)
    bundler = Bundler(data_dir=run_dir.data, main=request.main, cells=request.cells)
    refs: list[DataRef] = []
    before = {path.name for path in run_dir.data.glob("*.pt")}
    with data_lock(run_dir.data):
        for role, (name, dataset) in prepared.datasets.items():
            refs.append(bundler.stage(role, name, dataset))
        spec["data"] = [asdict(ref) for ref in refs]
        _write_spec(run_dir, spec)
    always = [request.cell.filename] if request.cell is not None and request.cell.filename is not None else []
    size = bundler.write(run_dir.bundle, model=prepared.model, hooks=prepared.hooks, model_name=request.model.name, always=always)
    staged = sum(ref.bytes for ref in refs)
    new = any(f"{ref.hash}.pt" not in before for ref in refs)
    plan_line = prepared.plan_line(f"data {bytes_text(staged)}, {'staged' if new else 'staged before'}")
    spec.update(plan_line=plan_line, bundle_bytes=size)
    spec["times"]["bundled"] = time.time()
    _write_spec(run_dir, spec)
    return plan_line


def _write_spec(run_dir: RunDir, spec: dict[str, Any]) -> None:
    try:
        run_dir.write_spec(spec)
    except OSError as error:
        message = f"writing to {run_dir.path} failed: {error.strerror}; free some space with nbddp.prune(), or choose another place with --run-root"
        raise BundleError(message) from error


def _spec(prepared: Prepared, run_dir: RunDir) -> dict[str, Any]:
    """What is known before anything travels. No values of the environment."""
    request, origin = prepared.request, weights.origin_of(prepared.model)
    initial = origin.initial
    return {
        "version": 1,
        "run": run_dir.id,
        "name": prepared.config.name,
        "model_name": request.model.name,
        "model_type": type(prepared.model).__name__,
        "data_name": request.data.name,
        "val_name": None if request.val is None else request.val.name,
        "hooks": sorted(prepared.hooks),
        "config": prepared.config.to_json(),
        "plan": prepared.plan.to_json(),
        "plan_line": prepared.plan_line(),
        "remarks": prepared.remarks,
        "note": request.note,
        "host": socket.gethostname(),
        "kernel": ProcessId.current().to_json(),
        "visible_devices": visible_devices(),
        "created": time.time(),
        "times": {"requested": request.requested, "bundled": None},
        "cell": None if request.cell is None else {"number": request.cell.number, "source": request.cell.source},
        "data": [],
        "parent": None,
        "versions": {"nbddp": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "background": request.background,
        "interpreter": Interpreter.capture().to_json(),
        "matmul_precision": prepared.matmul_precision,
        "init_path": None if prepared.init_path is None else str(prepared.init_path),
        "initial": None if initial is None else os.path.relpath(initial, prepared.root) if initial.is_relative_to(prepared.root) else str(initial),
    }


class _Watch:
    """The view of a run that this kernel started, and what happens beside it: the next standby, interrupts, the card at the end."""

    def __init__(self, run: Run, plan_line: str, *, background: bool) -> None:
        self._run, self._background = run, background
        self._warmed = False
        # The prompt of a terminal is not to be written over by a run in the background.
        self._view: View | None = None if background and not in_kernel() else open_view(run.files, run.follower.state, plan_line=plan_line)

    def update(self, state: RunState) -> None:
        """Called by the follower: show the state; once the first step is done, warm the next supervisor up."""
        if not self._warmed and (state.first_step_time is not None or state.done):
            self._warmed = True
            with contextlib.suppress(OSError):  # no process can be started: the next run will say so
                local.standby.warm(niced=not state.done)
        if state.done and self._background:
            self._run.say_weights_wait()
            self._finish()
        elif not state.done and self._view is not None:
            self._view.update(state)

    def interrupted(self, count: int) -> None:
        """The n-th interrupt of the cell."""
        run = self._run
        if count == 1:
            print("stopping in order, with a checkpoint; interrupt again to terminate", flush=True)  # noqa: T201 - says what the interrupt did
            run.stop()
        elif count == 2:
            print(f"{run.stacks()}\nterminating; interrupt again to kill", flush=True)  # noqa: T201 - as above
            run.terminate()
        else:
            run.kill()

    def end(self) -> None:
        """After the wait, in the main thread: weights first, then the card, then the line that says what the model holds."""
        if not self._run.dir.is_dir():
            self._run.kill()
        line = self._run.take_weights()
        self._finish()
        if line is not None and in_kernel():  # a terminal's card ends with it
            print(line)  # noqa: T201 - the last line of the cell

    def _finish(self) -> None:
        card = self._run.card()
        with contextlib.suppress(OSError):  # the disk is full, or the directory was deleted: the notebook has it all the same
            card.save(self._run.files.card)
            release_data(self._run.files.root, wait=False)  # what only the run before this one needed
        if self._view is not None:
            self._view.finish(card)
