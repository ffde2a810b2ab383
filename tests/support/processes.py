"""Which processes belong to a test, however far they have moved from it, and how to end them.

A child that starts a session of its own and whose parent ends is nobody's child any more. It still has the environment that it was started with:
a variable with a fresh value marks everything that was started below the process which set it.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# psutil compares pid and start time, so that a recycled pid is another process.
Processes = set[psutil.Process]


def alive(processes: Iterable[psutil.Process]) -> Processes:
    """Return those that run; a zombie has ended, whether or not its parent has asked."""
    running = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


def marked(variable: str, value: str) -> Processes:
    """Return the running processes that were started with ``variable=value`` in their environment, without this one."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is somebody else's
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.add(process)
    return alive(found)


def values_of(variable: str, processes: Iterable[psutil.Process]) -> set[str]:
    """Return the values that a variable had where these processes, or what they were forked from, were started."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            found.add(process.environ().get(variable))
    return {value for value in found if value is not None}


def of_session(pid: int) -> Processes:
    """Return the running processes of the session whose leader has, or had, this pid."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == pid:
                found.add(process)
    return alive(found)


def descendants() -> Processes:
    """Return the running children of this process, and theirs."""
    return alive(psutil.Process().children(recursive=True))


def refer_to(text: str) -> Processes:
    """Return the running processes, without this one, that name ``text`` in their command line or work in a folder below it."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and (any(text in word for word in process.cmdline()) or process.cwd().startswith(text)):
                found.add(process)
    return alive(found)


def gone(remaining: Callable[[], Processes], timeout_s: float) -> Processes:
    """Wait until ``remaining()`` is empty; return what it still is after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (left := remaining()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def describe(processes: Iterable[psutil.Process]) -> str:
    """Return one line per process: pid, parent, command line."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"  pid {process.pid}, parent {process.ppid()}: {' '.join(process.cmdline())[:200] or process.name()}")
    return "\n".join(sorted(lines))


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, by pid and start time, and wait until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
