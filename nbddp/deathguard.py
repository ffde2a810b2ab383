"""Ties a process to the life of its parent: supervisor -> fork server -> ranks -> loader workers.

Called in each of those processes but the supervisor; importing it does nothing. Linux only. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)
_guarded: int | None = None
"""The process of this chain that was guarded last; after a fork that is the parent."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send this process SIGKILL when the thread that started it ends.

    Call it in the main thread, first thing. `parent` is the pid of the parent as it was at the start; not given, it is the process of which this one was
    forked after that had called this function itself. Where that one is gone already, this process ends at once.

    Raises:
        OSError: where prctl(2) refuses.
    """
    global _guarded  # inherited over fork, which is how a child knows its parent
    parent = _guarded if parent is None else parent
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if parent is not None and os.getpid() != parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    _guarded = os.getpid()
