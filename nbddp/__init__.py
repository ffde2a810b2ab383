"""nbddp: multi-GPU training native to a Jupyter notebook.

Importing this package is cheap: names are imported when they are first used, since the ranks and the supervisor import it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbddp.errors import (
    BundleError,
    CheckpointError,
    ConfigError,
    HangDetected,
    LaunchError,
    NbddpError,
    OutOfMemory,
    ReplicaMismatch,
    RunFailed,
    WorkerError,
    WorkerLost,
)
from nbddp.version import __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.api import attach, plan, prune, runs, train
    from nbddp.checkpoint import load_checkpoint
    from nbddp.config import TrainConfig
    from nbddp.kernel.compare import compare
    from nbddp.kernel.run import Run
    from nbddp.metric import Metric
    from nbddp.norm import swap_norm
    from nbddp.precision import autocast
    from nbddp.stage import Stage

    last_run: Run | None


__all__ = [
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "HangDetected",
    "LaunchError",
    "Metric",
    "NbddpError",
    "OutOfMemory",
    "ReplicaMismatch",
    "Run",
    "RunFailed",
    "Stage",
    "TrainConfig",
    "WorkerError",
    "WorkerLost",
    "__version__",
    "attach",
    "autocast",
    "compare",
    "last_run",
    "load_checkpoint",
    "plan",
    "prune",
    "runs",
    "swap_norm",
    "train",
]

_HOMES = {
    "Metric": "nbddp.metric",
    "Run": "nbddp.kernel.run",
    "Stage": "nbddp.stage",
    "TrainConfig": "nbddp.config",
    "attach": "nbddp.api",
    "autocast": "nbddp.precision",
    "compare": "nbddp.kernel.compare",
    "load_checkpoint": "nbddp.checkpoint",
    "plan": "nbddp.api",
    "prune": "nbddp.api",
    "runs": "nbddp.api",
    "swap_norm": "nbddp.norm",
    "train": "nbddp.api",
}
_LATER = ("H5Dataset",)


def __getattr__(name: str) -> Any:
    if name == "last_run":  # the run that this kernel started last: another one each time
        return importlib.import_module("nbddp.kernel.runs").last_run()
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    message = f"nbddp.{name} is not available yet" if name in _LATER else f"module 'nbddp' has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Called by `%load_ext nbddp`."""
    from nbddp.kernel.extension import load

    load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Called by `%unload_ext nbddp`."""
    from nbddp.kernel.extension import unload

    unload(ipython)
