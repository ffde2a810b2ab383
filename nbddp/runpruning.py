"""Deleting run directories: which are old, and what became of it.

Used in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from typing import TYPE_CHECKING

from nbddp.rundir import run_dirs
from nbddp.staged import release_data

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nbddp.rundir import RunDir

_TRIES = 5


def prune_runs(root: Path, *, keep: int, older_than_days: float) -> list[RunDir]:
    """Runs that have ended, beyond the newest `keep` and older than `older_than_days`."""
    ended = [run for run in run_dirs(root) if not run.live()]
    limit = time.time() - older_than_days * 86400
    return [run for run in ended[: max(0, len(ended) - keep)] if _changed(run.path) < limit]


def _changed(path: Path) -> float:
    """When a folder was changed last; one that is being deleted is not old."""
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def delete_runs(root: Path, runs: Iterable[RunDir]) -> dict[str, str]:
    """Delete runs that have ended, and staged data that no run needs any more; return why some of them are still there, by id."""
    failed: dict[str, str] = {}
    for run in runs:
        why = _delete(run.path)
        if why is not None:
            failed[run.id] = why
    release_data(root)
    return failed


def _delete(path: Path) -> str | None:
    """Delete a folder; return why some of it is still there, None where it is gone."""
    why = ""
    for _ in range(_TRIES):  # another kernel may be at it, or write a last file
        try:
            shutil.rmtree(path)
        except OSError as error:
            why = str(error)
        if not os.path.lexists(path):
            return None
    return f"it is a link to {path.readlink()}: delete that, and the link" if path.is_symlink() else why or "files appear in it"
