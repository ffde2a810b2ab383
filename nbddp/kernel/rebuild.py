"""The module and the hooks of a run, rebuilt from its own bundle in a kernel that may never have seen the notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbddp.bundle import load_apart
from nbddp.bundle.loader import load_model
from nbddp.errors import BundleError, CheckpointError, NbddpError
from nbddp.visible import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from nbddp.bundle import Loaded
    from nbddp.rundir import RunDir


SHOWN = 400
"""Letters of what unpickling raised."""


def rebuilt_model(run: RunDir) -> nn.Module:
    """The module as it was bundled, with the weights that it had then: `weights.load_into` makes it what the run trained.

    Raises:
        CheckpointError: where the bundle is gone.
        BundleError: where it is damaged, or can't be unpickled in this kernel.
    """
    with importable(run), _rebuilding(run):
        module: nn.Module = load_model(_bundle(run))
    return module


def rebuilt(run: RunDir) -> Loaded:
    """The same with the hooks, which share with it what they shared in the notebook.

    Raises:
        CheckpointError: where the bundle is gone.
        BundleError: where hooks refer to data that are gone, and as `rebuilt_model`.
    """
    with importable(run), _rebuilding(run):
        return load_apart(_bundle(run), run.data)


@contextlib.contextmanager
def importable(run: RunDir) -> Iterator[None]:
    """Within it, modules that lay beside the run's notebook are found in a kernel of another folder too, after those that it finds itself."""
    spec = run.read_spec() or {}
    added = [entry for entry in spec.get("interpreter", {}).get("sys_path", []) if entry not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for entry in added:
            with contextlib.suppress(ValueError):  # somebody took it out in between
                sys.path.remove(entry)


@contextlib.contextmanager
def _rebuilding(run: RunDir) -> Iterator[None]:
    """What unpickling raises becomes a public error: the code of the user's classes, modules that are not here, and damaged streams may raise anything."""
    try:
        yield
    except NbddpError:
        raise
    except Exception as error:
        message = f"run {run.id} can't be rebuilt from {run.bundle}: {type(error).__name__}: {one_line(str(error), SHOWN)}"
        raise BundleError(message) from error


def _bundle(run: RunDir) -> Path:
    if run.bundle.is_file():
        return run.bundle
    message = f"run {run.id} has no bundle: a run that failed before its first step keeps only its record"
    if (run.read_result() or {}).get("first_step"):
        message = f"run {run.id} has no bundle any more: {run.bundle} was deleted, and with it how the model is made; run.load(net) needs none"
    if not run.path.is_dir():
        message = f"the directory of run {run.id} is gone, and its model and checkpoints with it"
    raise CheckpointError(message)
