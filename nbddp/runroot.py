"""Where the runs of this process are kept. Used in the kernel; imports neither torch nor Jupyter."""

from __future__ import annotations

import os
from pathlib import Path

from nbddp.errors import ConfigError
from nbddp.rundir import ROOT_NAME

_fixed: Path | None = None


def run_root(given: str | Path | None = None, *, fix: bool = True) -> Path:
    """The folder of the run directories: as given, else NBDDP_RUN_ROOT, else nbddp_runs in the folder where this process first needed one.

    `fix=False` only looks: the next call may name another folder.
    """
    global _fixed
    if given is not None:
        return Path(given).expanduser().resolve()
    if (root := os.environ.get("NBDDP_RUN_ROOT")) is not None:
        return Path(root).expanduser().resolve()
    if _fixed is not None:
        return _fixed
    try:
        here = Path.cwd() / ROOT_NAME
    except FileNotFoundError:
        message = "the working directory no longer exists: change to one that does, with %cd or os.chdir, or set --run-root"
        raise ConfigError(message) from None
    if fix:
        _fixed = here
    return here
