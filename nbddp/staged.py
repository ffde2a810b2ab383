"""Staged datasets, which the runs of one root share: the lock under which they are referred to, and their release.

Used in the kernel and in supervisors; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from typing import TYPE_CHECKING

from nbddp.process import ProcessId
from nbddp.rundir import private_folder, run_dirs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ABANDONED_S = 3600.0
_DIGEST = re.compile(r"^[0-9a-f]{40}$")


@contextlib.contextmanager
def data_lock(data: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock under which staged data is referred to and released; a file system without locks has to do without.

    Raises:
        BlockingIOError: without `wait`, where another kernel holds it.
    """
    private_folder(data)
    with os.fdopen(os.open(data / ".lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield


def release_data(root: Path, *, wait: bool = True, leaving: ProcessId | None = None) -> list[Path]:
    """Delete staged datasets that no run needs any more, and return them.

    Needed are those of live runs and of the latest run of every living kernel, so that running a cell again does not stage its data again. Without
    `wait`, nothing is deleted while another kernel stages. `leaving` is a kernel that ends: it needs nothing any more.
    """
    data = root / "data"
    if not data.is_dir():
        return []
    released: list[Path] = []
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(data_lock(data, wait=wait))
        except BlockingIOError:
            return released
        needed: set[str] = set()
        latest: dict[ProcessId, set[str]] = {}
        for run in run_dirs(root):
            spec = run.read_spec() or {}
            hashes = {ref["hash"] for ref in spec.get("data", [])}
            kernel = ProcessId.from_json(spec.get("kernel"))
            if hashes and run.live():
                needed |= hashes
            if hashes and kernel is not None and kernel != leaving and (kernel.alive() or spec.get("host") != socket.gethostname()):
                latest[kernel] = hashes
        needed.update(*latest.values())
        for path in data.glob("*.pt"):
            if _DIGEST.match(path.stem) and path.stem not in needed:  # the folder may be one of the user's, with files of theirs
                path.unlink(missing_ok=True)
                released.append(path)
        for path in data.glob(".*.tmp"):  # of a kernel that was killed in the middle
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
    return released
