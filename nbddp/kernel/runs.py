"""The runs that this kernel knows: where they are kept, which was the last, and how to find one of another kernel.

Runs in the kernel; imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import ConfigError
from nbddp.kernel.run import Run
from nbddp.kernel.table import RunTable
from nbddp.process import ProcessId
from nbddp.rundir import find_run
from nbddp.runroot import run_root
from nbddp.staged import release_data

if TYPE_CHECKING:
    from torch import nn

_known: dict[str, Run] = {}
_last: list[Run] = []
_roots: set[Path] = set()
"""Of the runs that this kernel started."""


def register(run: Run) -> None:
    """Make a run the last one of this kernel."""
    _known[str(run.dir)] = run
    _last[:] = [run]
    if not _roots:
        atexit.register(_release)
    _roots.add(run.files.root)


def _release() -> None:
    """At the kernel's end: delete staged data that only its runs needed."""
    for root in _roots:
        with contextlib.suppress(OSError):  # the folder is gone, or its disk
            release_data(root, wait=False, leaving=ProcessId.current())


def training(model: nn.Module) -> list[Run]:
    """The runs of this kernel that are training a model object now."""
    return [run for run in list(_known.values()) if run.trains(model)]


def last_run() -> Run | None:
    """The run that this kernel started last."""
    return _last[0] if _last else None


def attach(run_or_dir: object, root: str | Path | None = None) -> Run:
    """Open a run by its id (or a part of it) or its directory, from any kernel, while it goes on and afterwards.

    Raises:
        ConfigError: where no run, or more than one, matches.
    """
    if isinstance(run_or_dir, Run):
        return run_or_dir
    if not isinstance(run_or_dir, str | Path):
        message = f"{type(run_or_dir).__name__} names no run: give its id or its directory"
        raise ConfigError(message)
    files = find_run(run_or_dir, run_root(root))
    known = _known.get(str(files.path))
    return known if known is not None else _known.setdefault(str(files.path), Run(files))


def runs(root: str | Path | None = None) -> RunTable:
    """The runs of a root, as a table, newest first; ``nbddp.runs().sorted("best")`` and slices of it are tables too."""
    return RunTable.of(run_root(root))
