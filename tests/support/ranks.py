"""A function on N real gloo ranks: what the tests of the worker's parts run, without kernel, supervisor or elastic agent.

Ranks are forked from a server process that has imported torch already, one for the whole pytest session. This module is imported there as well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess

PRELOAD = ["torch", "torch.distributed", "nbddp.worker.main", "support.ranks"]
GRACE_S = 1.0  # for the other ranks, after one has failed


class RankError(AssertionError):
    """A rank ended without a result: it was killed, timed out, or raised something that does not pickle."""


@dataclass(frozen=True)
class _Outcome:
    at: float  # CLOCK_MONOTONIC, which all processes of a machine share
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""


def start_server() -> None:
    """Start the process that ranks are forked from, if there is none yet. It ends with this process."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def run_on_ranks(function: Callable[..., Any], nproc: int, *args: Any, folder: Path, timeout: float = 60) -> list[Any]:
    """Call ``function(rank, *args)`` on ``nproc`` gloo ranks and return the results, by rank.

    The process group is initialised there, torch uses one thread. Function, arguments and results travel by cloudpickle; so closures and lambdas do as well.

    Raises:
        Exception: what the first rank to fail raised, with its traceback as a note.
        RankError: a rank was killed, did not end within ``timeout`` seconds, or raised something that does not pickle.
    """
    start_server()
    if (module := sys.modules.get(function.__module__)) is not None:
        cloudpickle.register_pickle_by_value(module)  # a rank cannot import pytest's test modules by name
    payload = cloudpickle.dumps((function, args))
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=_rank_main, args=(payload, rank, nproc, str(folder), dict(os.environ), timeout), name=f"rank {rank}", daemon=True)
        for rank in range(nproc)
    ]
    try:
        for process in ranks:
            process.start()
        _join(ranks, timeout)
        outcomes = [_read_outcome(folder, rank) for rank in range(nproc)]
        _raise_first_failure(ranks, outcomes, folder, timeout)
        return [outcome.result for outcome in outcomes if outcome is not None]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            process.close()


def _join(ranks: list[ForkServerProcess], timeout: float) -> None:
    """Wait until all have ended, or one has failed and the others had a moment to say why they failed too."""
    deadline = time.monotonic() + timeout
    running = {process.sentinel: process for process in ranks}
    while running and time.monotonic() < deadline:
        for sentinel in multiprocessing.connection.wait(list(running), timeout=max(0, deadline - time.monotonic())):
            process = running.pop(sentinel)  # type: ignore[arg-type] # sentinels are what was waited for
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _raise_first_failure(ranks: list[ForkServerProcess], outcomes: list[_Outcome | None], folder: Path, timeout: float) -> None:
    failed = [(outcome.at, rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None and outcome.traceback]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    killed = [rank for rank in silent if ranks[rank].exitcode is not None]
    if killed:  # before any exception: where a rank vanishes, those of the others are consequences
        message = f"rank {killed[0]} ended with exit code {ranks[killed[0]].exitcode} and no result\n{_log(folder, killed[0])}"
        raise RankError(message)
    if failed:
        _, rank, outcome = min(failed, key=lambda entry: entry[0])
        note = f"rank {rank} of {len(ranks)}:\n{outcome.traceback}{_log(folder, rank)}"
        if outcome.error is None:
            raise RankError(note)
        outcome.error.add_note(note)
        raise outcome.error
    if silent:
        logs = "\n".join(_log(folder, rank) for rank in silent)
        message = f"after {timeout} s there was no result from rank {', '.join(map(str, silent))}\n{logs}"
        raise RankError(message)


def _read_outcome(folder: Path, rank: int) -> _Outcome | None:
    try:
        outcome = cloudpickle.loads((folder / f"outcome-{rank}").read_bytes())
    except FileNotFoundError:
        return None
    assert isinstance(outcome, _Outcome)
    return outcome


def _log(folder: Path, rank: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        if text := (folder / f"log-{rank}").read_text(errors="replace"):
            return f"rank {rank} printed:\n{text[-4000:]}"
    return ""


# -- in the rank


def _rank_main(payload: bytes, rank: int, nproc: int, folder: str, env: dict[str, str], timeout: float) -> None:
    # The pytest process imports this module without torch.
    import torch
    import torch.distributed as dist

    _end_with_parent()
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(max(timeout - 1, timeout / 2), file=log)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    outcome = _Outcome(0.0)
    try:
        function, args = cloudpickle.loads(payload)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=nproc, timeout=timedelta(seconds=timeout))
        outcome = _Outcome(time.monotonic(), result=function(rank, *args))
    except BaseException as error:  # noqa: BLE001 - whatever the function raises, SystemExit included, is the test's to see
        outcome = _Outcome(time.monotonic(), error=error, traceback=traceback.format_exc())
    try:
        data = cloudpickle.dumps(outcome)
        cloudpickle.loads(data)  # exceptions whose arguments are not those of their class pickle and don't come back
    except Exception:  # noqa: BLE001 - pickling runs foreign code
        text = outcome.traceback or f"the result does not pickle:\n{traceback.format_exc()}"
        data = cloudpickle.dumps(_Outcome(outcome.at, traceback=text))
        outcome = _Outcome(outcome.at, traceback=text)
    Path(folder, f"outcome-{rank}.part").write_bytes(data)
    Path(folder, f"outcome-{rank}.part").rename(Path(folder, f"outcome-{rank}"))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    if not outcome.traceback and dist.is_initialized():
        dist.barrier()  # nobody closes its connections while another still uses them
        dist.destroy_process_group()
    # No clean-up after a failure: destroying a group whose other ranks hang would wait for them.
    os._exit(1 if outcome.traceback else 0)


def _end_with_parent() -> None:
    """End this rank when pytest ends, however that ends: the server that forked it may outlive both."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
