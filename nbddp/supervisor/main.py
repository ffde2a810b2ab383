"""The life of a supervisor: it begins as a fork of the standby with an order, forms the group of ranks, and ends with the run.

Its main thread, which the fork server's life hangs on, watches the ranks and says how the run ended. Imports no Jupyter.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.events import SUPERVISOR, EventWriter
from nbddp.failure import Failure
from nbddp.launch.progress import Progress, last_words
from nbddp.launch.scratch import make_scratch
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.staged import release_data
from nbddp.supervisor.fork_server import start_fork_server
from nbddp.supervisor.preload import NICENESS
from nbddp.supervisor.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from nbddp.launch.order import Order


def main(order: Order, entry: Callable[[str, dict[str, str], int], None]) -> NoReturn:
    """Live and end; never returns into the standby's code."""
    code, folder, fork_server = 1, None, None
    try:
        os.setsid()
        run = RunDir(Path(order.run_dir))
        _redirect(run.log(None))
        run.write_supervisor(ProcessId.current())
        if run.read_result() is not None:  # whoever was to kill it found nobody, and wrote that down
            os._exit(0)
        os.chdir(run.path)
        folder = make_scratch(ProcessId.current())
        tempfile.tempdir = str(folder)
        fork_server = start_fork_server()
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)  # watching gives way to the ranks, which are the fork server's children
        supervise(run, order, entry, Signals(), fork_server)
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and says why in its log
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        if fork_server is not None:
            fork_server.send(signal.SIGKILL)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        # Not through interpreter shutdown: nothing that user code or torch left behind may keep this process.
        os._exit(code)


def supervise(run: RunDir, order: Order, entry: Callable[[str, dict[str, str], int], None], signals: Signals, fork_server: ProcessId) -> None:
    """Run the run directory to its end, and write down how it ended."""
    events = EventWriter(run.supervisor_events, run=run.id, rank=SUPERVISOR)
    events.emit("launched", process=ProcessId.current().to_json(), fork_server=fork_server.to_json(), host=socket.gethostname())
    progress = Progress()
    exits: dict[int, int | None] = {}
    state, failure = "failed", None
    try:
        if not fork_server.alive():
            message = "the fork server, which starts the ranks, has ended"
            raise RuntimeError(message)  # noqa: TRY301 - reported like everything else that keeps the group from forming
        state, failure, progress, exits = _run_group(run, order, entry, signals, fork_server)
    except Exception as error:  # noqa: BLE001 - whatever it was, the run has ended, and says so
        traceback.print_exc()
        failure = Failure("LaunchError", f"the process group did not form: {type(error).__name__}: {error}", traceback=traceback.format_exc())
    if state == "failed" and not progress.first_step:
        run.drop_payload()
    error_record = None if failure is None else failure.to_json()
    result = progress.result(state, error_record, time.time())
    run.write_result(result)
    events.emit("exited", **last_words(result), exits={str(rank): code for rank, code in exits.items()})
    events.close()
    if not order.kernel.alive():
        release_data(run.root)


def _run_group(
    run: RunDir, order: Order, entry: Callable[[str, dict[str, str], int], None], signals: Signals, fork_server: ProcessId
) -> tuple[str, Failure | None, Progress, dict[int, int | None]]:
    from nbddp.config import TrainConfig
    from nbddp.supervisor.group import Group, Job
    from nbddp.supervisor.watch import Watch

    spec = run.read_spec()
    if spec is None:
        message = f"{run.path / 'spec.json'} can't be read"
        raise ValueError(message)
    plan = spec["plan"]
    group = Group(Job(entry, order.run_dir, _environment(order, plan["threads"])), run_id=run.id, nproc=plan["nproc"])
    watch = Watch(run, order, group, signals, fork_server, TrainConfig(**spec["config"]))
    group.start()
    watch.follow()
    exits = group.exits()
    state, failure = watch.outcome(exits)
    if state == "failed" and failure is not None and failure.kind == "WorkerLost" and not any(row.process for row in watch.progress.ranks.values()):
        failure = Failure("LaunchError", f"the process group did not form: {failure.message}", failure.rank, signal=failure.signal, exit_code=failure.exit_code)
    return state, failure, watch.progress, exits


def _environment(order: Order, threads: int) -> dict[str, str]:
    """The kernel's environment as the ranks are to have it; their traffic stays on this machine."""
    return {"OMP_NUM_THREADS": str(threads), **order.environment, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _redirect(path: Path) -> None:
    """From here on this process, its fork server and ranks that have not come to open their own write to the run's log, and read nothing."""
    log, null = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
