"""The fork server of a run: multiprocessing's own, forked from the supervisor instead of started anew, so that it has everything imported at once.

Runs in the supervisor while that has no other threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import traceback
from multiprocessing import util
from typing import TYPE_CHECKING

from nbddp.deathguard import die_with_parent
from nbddp.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Sequence


def start_fork_server() -> ProcessId:
    """Start it; ranks that multiprocessing starts by the method "forkserver" are its children. It dies with this process.

    Raises:
        RuntimeError: where it did not start.
    """
    multiprocessing.resource_tracker.ensure_running()
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment] # multiprocessing has no other place to say how its server is started
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
    pid: int | None = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined] # there is no public name for it
    process = None if pid is None else ProcessId.of(pid)
    if process is None:
        message = "the fork server did not start"
        raise RuntimeError(message)
    return process


def _fork(_path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    """Do in a forked child what the command `python -c PROGRAM` would do in a new process."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(supervisor)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _close_all_but({0, 1, 2, *passfds})  # of the pipe whose other end it listens to, above all
        exec(args[-1], {})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:  # noqa: BLE001 - nothing of the supervisor's stack may run here
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(keep: set[int]) -> None:
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - keep:  # noqa: PTH208 - names are what is wanted
        with contextlib.suppress(OSError):  # the listing's own
            os.close(fd)
