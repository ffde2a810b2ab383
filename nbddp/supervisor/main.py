"""The life of a supervisor: fork server, imports, order, ranks, result.

Runs in the process that the kernel starts with ``python -m nbddp.supervisor``; its main thread lives as long as the process, which the fork server's
life hangs on. torch is imported late, beside the fork server's own imports. Imports no Jupyter.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.events import SUPERVISOR, EventWriter
from nbddp.failure import Failure
from nbddp.launch.progress import Progress
from nbddp.launch.scratch import make_scratch
from nbddp.process import ProcessId
from nbddp.rundir import RunDir, release_data
from nbddp.supervisor import preload
from nbddp.supervisor.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from nbddp.launch.order import Order

ENTRY = "nbddp.worker.main:entry"
_OWN = (preload.PARENT, preload.ENTRY_MODULE, preload.NICED, "PYTHONPATH", "NBDDP_SYS_PATH")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nbddp.supervisor", description="Started by nbddp in the kernel; reads its order from stdin.")
    parser.add_argument("--kernel", required=True, help="pid:start of the kernel")
    parser.add_argument("--entry", default=ENTRY, help="module:function that each rank runs")
    parser.add_argument("--niced", action="store_true", help="import at low priority")
    return parser.parse_args()


def main() -> NoReturn:
    """Live and end; never returns."""
    arguments = _arguments()
    kernel = ProcessId(*map(int, arguments.kernel.split(":")))
    module, _, function = arguments.entry.partition(":")
    folder = make_scratch(ProcessId.current())
    tempfile.tempdir = str(folder)
    fork_server = _start_fork_server(module, niced=arguments.niced)

    def leave() -> NoReturn:
        fork_server.send(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signals = Signals(kernel, fork_server, leave)
    code = 1
    try:
        preload.import_all(module, niced=arguments.niced)
        _plain_logs()
        entry = getattr(import_module(module), function)
        supervise(signals.wait_for_order(), entry, signals, fork_server)
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and its kernel reads what it wrote to stderr
        traceback.print_exc()
        sys.stderr.flush()
    fork_server.send(signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    # Not through interpreter shutdown: nothing that user code or torch left behind may keep this process.
    os._exit(code)


def _start_fork_server(entry_module: str, *, niced: bool) -> ProcessId:
    os.environ[preload.PARENT] = str(os.getpid())
    os.environ[preload.ENTRY_MODULE] = entry_module
    os.environ[preload.NICED] = "1" if niced else "0"
    multiprocessing.set_forkserver_preload([preload.__name__])
    multiprocessing.forkserver.ensure_running()
    # What the agent would heed is not for the kernel's environment to say: a health check listens on every interface.
    for name in [name for name in os.environ if name in _OWN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    pid: int | None = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined] # there is no public name for it
    process = None if pid is None else ProcessId.of(pid)
    if process is None:
        message = "the fork server did not start"
        raise RuntimeError(message)
    return process


def _plain_logs() -> None:
    """Have torch's messages written as they are: its own formatter imports the compiler, a second's work, for the first traceback."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(plain)


def supervise(order: Order, entry: Callable[[str, dict[str, str], int], None], signals: Signals, fork_server: ProcessId) -> None:
    """Run the order's run directory to its end, and write down how it ended."""
    run = RunDir(Path(order.run_dir))
    own_stderr = os.dup(2)
    _redirect(run.log(None))
    os.chdir(run.path)
    run.write_supervisor(ProcessId.current())
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
    if failure is not None:
        _append(own_stderr)
    if state == "failed" and not progress.first_step:
        run.drop_payload()
    error_record = None if failure is None else failure.to_json()
    run.write_result(progress.result(state, error_record, time.time()))
    events.emit("exited", state=state, exits={str(rank): code for rank, code in exits.items()}, error=error_record)
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
    watch = Watch(run, order, group, signals, fork_server, hang_after_s=TrainConfig(**spec["config"]).hang_after_s)
    watch.start()
    try:
        result = group.run()
    finally:
        watch.close()
    if watch.crash is not None:
        raise watch.crash
    exits = group.exits()
    state, failure = watch.outcome(exits, next(iter(result.failures), None))
    if state == "failed" and failure is not None and failure.kind == "WorkerLost" and not any(row.process for row in watch.progress.ranks.values()):
        failure = Failure("LaunchError", f"the process group did not form: {failure.message}", failure.rank, signal=failure.signal, exit_code=failure.exit_code)
    return state, failure, watch.progress, exits


def _environment(order: Order, threads: int) -> dict[str, str]:
    """The kernel's environment as the ranks are to have it; their traffic stays on this machine."""
    return {"OMP_NUM_THREADS": str(threads), **order.environment, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _redirect(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _append(fd: int) -> None:
    """Copy to the log what was written before there was one: by this process, the fork server, and ranks that did not come far enough to open theirs."""
    size = os.fstat(fd).st_size
    os.write(2, os.pread(fd, min(size, 1 << 20), max(0, size - (1 << 20))))
