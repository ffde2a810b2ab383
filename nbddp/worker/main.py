"""Entry of a rank: called by torch elastic in a process of its own, forked from the supervisor's forkserver.

Sets the process up, loads what travelled from the notebook, trains, and writes down how it ended. Imports neither IPython nor ipywidgets,
traitlets or zmq.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nbddp import bundle, checkpoint, norm
from nbddp.config import TrainConfig
from nbddp.deathguard import die_with_parent
from nbddp.evaluation.hooks import Hooks
from nbddp.evaluation.ranks import Ranks
from nbddp.events import EventWriter
from nbddp.failure import CANNOT_WRITE
from nbddp.plans import Plan
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.worker.context import Context
from nbddp.worker.failure import failure_record, shortened
from nbddp.worker.group import join_group, leave_group
from nbddp.worker.loop import train
from nbddp.worker.output import redirect
from nbddp.worker.position import Heartbeat, Position
from nbddp.worker.trackers import Trackers

if TYPE_CHECKING:
    from collections.abc import Mapping

ELASTIC = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE")
PREFIXES = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "GLOO_SOCKET_", "NCCL_SOCKET_", "NBDDP_")


def entry(run_dir: str, environment: dict[str, str], attempt: int) -> None:
    """Work as one rank of a run. Returns when training ended in order; a failure is written down and exits with code 1."""
    rank = int(os.environ["RANK"])
    run = RunDir(Path(run_dir))
    die_with_parent()
    redirect(run.log(rank))
    _install_environment(environment)
    events = EventWriter(run.rank_events(rank, attempt), run=run.id, rank=rank, attempt=attempt)
    position = Position()
    cells: dict[str, bundle.CellSource] = {}
    try:
        _work(run, rank, attempt, events, position, cells)
    except BaseException as error:  # noqa: BLE001 - the boundary of user code: whatever ends it is written down, SystemExit included
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a loader worker ends, and would do so in here
        _leave(failure_record(error, cells, position.phase), events, run.log(rank))
    events.close()


def _leave(record: dict[str, Any], events: EventWriter, log: Path) -> NoReturn:
    """Write down why, all of it in the log, and end at once: the group is broken, nothing of it can be left in order, and atexit handlers could wait for it."""
    code = CANNOT_WRITE
    with contextlib.suppress(OSError):  # a full disk: then at least the exit code says it
        events.emit("failed", **shortened(record, log))
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(record["traceback"] + "\n")
        sys.stderr.flush()
    os._exit(code)


def _install_environment(environment: Mapping[str, str]) -> None:
    """The kernel's environment, and what torch elastic says about this rank."""
    own = {name: value for name, value in os.environ.items() if name in ELASTIC or name.startswith(PREFIXES)}
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(own)
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", threads)
    time.tzset()


def _work(run: RunDir, rank: int, attempt: int, events: EventWriter, position: Position, cells: dict[str, bundle.CellSource]) -> None:
    spec = run.read_spec()
    assert spec is not None, "spec.json is written before the launch"
    plan, config = Plan.from_json(spec["plan"]), TrainConfig(**spec["config"])
    _prepare_process(run, rank, plan, config)
    device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", plan.device_indices[int(os.environ["LOCAL_RANK"])])
    name = plan.device_name if plan.device == "cuda" else "CPU"
    events.emit(
        "started",
        process=ProcessId.current().to_json(),
        host=socket.gethostname(),
        device=str(device),
        device_name=name,
        backend=plan.backend,
        world_size=plan.nproc,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )
    sys.stdout.write(f"Process group initialised: backend={plan.backend}, rank={rank}, world_size={plan.nproc}\n")
    heartbeat = Heartbeat(events, position, device)
    began = time.monotonic()
    position.phase = "loading"
    loaded = _load(run, spec, cells)
    position.phase = "joining"
    ranks = join_group(plan, config.process_group_timeout_s)
    try:
        context = _context(run, spec, config, plan, ranks, events, position, loaded)
        trackers = Trackers(run, config, events, attempt) if rank == 0 else None
        progress = train(context)
        if trackers is not None:
            trackers.finish(position, stopped=progress.stopped, reason=progress.reason)
        events.emit(
            "finished",
            step=progress.step,
            epoch=progress.epoch,
            stopped=progress.stopped,
            reason=progress.reason,
            duration_s=time.monotonic() - began,
        )
    finally:
        heartbeat.stop()
    leave_group()


def _prepare_process(run: RunDir, rank: int, plan: Plan, config: TrainConfig) -> None:
    multiprocessing.set_start_method("fork", force=True)  # else loader workers would come from a forkserver of their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = os.open(run.logs / f"rank-{rank:05d}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(plan.threads)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def _load(run: RunDir, spec: dict[str, Any], cells: dict[str, bundle.CellSource]) -> bundle.Loaded:
    bundle.Interpreter.from_json(spec["interpreter"]).apply()
    torch.set_float32_matmul_precision(spec["matmul_precision"])
    refs = [bundle.DataRef(**ref) for ref in spec["data"]]
    return bundle.load(run.bundle, run.data, refs, cells)


def _context(
    run: RunDir,
    spec: dict[str, Any],
    config: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    events: EventWriter,
    position: Position,
    loaded: bundle.Loaded,
) -> Context:
    swaps = spec.get("norm") or {}
    if spec.get("init_swapped"):
        norm.apply(loaded.model, swaps, ranks.device)
    if spec.get("init_path"):
        path = Path(spec["init_path"])
        if spec.get("init_unswapped"):
            state = norm.without_dropped(checkpoint.state_of(checkpoint.read(path), path), loaded.model)
            checkpoint.load_state(loaded.model, state, strict=True, what=str(path), undo=False)
        else:
            checkpoint.load_file(path, loaded.model, undo=False)
    norm.apply(loaded.model, swaps, ranks.device)
    context = Context(
        run_dir=run,
        spec=spec,
        config=config,
        plan=plan,
        ranks=ranks,
        events=events,
        position=position,
        hooks=Hooks.of(loaded.hooks),
        model=loaded.model,
        train_data=loaded.datasets["train"],
        val_data=loaded.datasets.get("val"),
    )
    if ranks.rank == 0:
        events.emit("plan", **spec["plan"], line=spec["plan_line"], total_steps=plan.total_steps, epochs=plan.epochs)
    return context
