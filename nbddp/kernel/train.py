"""From a request to a run: checks, plan, bundle, launch, and the wait for its end.

Runs in the kernel's main thread. Nothing is started, and nothing is left on disk, where a check fails.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbddp.bundle import Bundler, DataRef, Interpreter
from nbddp.errors import BundleError
from nbddp.kernel import weights
from nbddp.kernel.interrupt import Interrupts
from nbddp.kernel.machine import visible_devices
from nbddp.kernel.prepare import Prepared, prepare
from nbddp.kernel.request import Bind, Request
from nbddp.kernel.run import Run
from nbddp.kernel.runs import register
from nbddp.kernel.stopping import stopping_of
from nbddp.kernel.text import bytes_text, short_id
from nbddp.kernel.view import View, in_kernel, open_view
from nbddp.launch import local
from nbddp.launch.order import Order
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.staged import data_lock, release_data
from nbddp.version import __version__

if TYPE_CHECKING:
    from nbddp.state import RunState


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
        if heads := [*([plan_line] if in_kernel() else []), *prepared.remarks]:  # in a terminal the plan comes with the run's name
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
            if not in_kernel():
                said = f"{short_id(run.id)}: {plan_line} · in the background: {run.called}.wait() waits for it"
                print(said)  # noqa: T201 - the only word of a run that has no view
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
        **({} if prepared.resumed is None else prepared.resumed.to_spec()),
        "versions": {"nbddp": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "background": request.background,
        "interpreter": Interpreter.capture().to_json(),
        "matmul_precision": prepared.matmul_precision,
        "norm": prepared.swaps,
        "init_path": None if prepared.start.path is None else str(prepared.start.path),
        "init_swapped": prepared.start.swapped,
        "init_unswapped": prepared.start.unswapped,
        "initial": None if initial is None else os.path.relpath(initial, prepared.root) if initial.is_relative_to(prepared.root) else str(initial),
    }


class _Watch:
    """The view of a run that this kernel started, and what happens beside it: the next standby, interrupts, the card at the end."""

    def __init__(self, run: Run, plan_line: str, *, background: bool) -> None:
        self._run, self._background = run, background
        self._warmed = False
        self._stopping = stopping_of(run.files, run)
        self._view: View | None = None
        if not background or in_kernel():  # the prompt of a terminal is not to be written over by a run in the background
            options: dict[str, Any] = {"controls": self._stopping, "config": run.config, "blocking": not background}
            self._view = open_view(run.files, run.follower.state, plan_line=plan_line, **options)

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

    def interrupted(self, _count: int) -> None:
        """An interrupt of the cell: the next step of the order, whether the last one was an interrupt or a press of the view's button."""
        stage = self._stopping.advance()
        stacks = f"{self._stopping.stacks}\n" if stage == 2 else ""
        print(f"{stacks}{self._stopping.said(stage, 'interrupt again')}", flush=True)  # noqa: T201 - says what the interrupt did

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
