"""`nbddp.load_checkpoint`: from whatever names a checkpoint to a state dict or a model that holds it."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nbddp.checkpoint.contents import found_in
from nbddp.checkpoint.folder import SUFFIXES, described, part_of
from nbddp.checkpoint.loading import Loaded, load_found
from nbddp.checkpoint.misfit import readable
from nbddp.checkpoint.names import without_wrappers
from nbddp.checkpoint.reading import read
from nbddp.checkpoint.resumable import of_the_end
from nbddp.checkpoint.writing import FORMAT, first_line
from nbddp.errors import CheckpointError, ConfigError
from nbddp.rundir import RunDir, find_run
from nbddp.runroot import run_root


@dataclass(frozen=True, slots=True)
class Place:
    """What is at a path: a folder, a file or anything else that is there, or nothing.

    A text that can't be a path at all, because it is too long, is one at which nothing is.

    Raises:
        ConfigError: for an empty text, and for the home of a user that there is not.
        CheckpointError: where the system doesn't let us look.
    """

    path: Path
    is_folder: bool
    is_there: bool

    @classmethod
    def of(cls, given: str | os.PathLike[str]) -> Place:
        if not str(given):
            message = "the path of the checkpoint is empty"
            raise ConfigError(message)
        try:
            path = Path(given).expanduser()
        except RuntimeError as error:
            message = f"{given}: {first_line(error)}"
            raise ConfigError(message) from None
        try:
            mode = path.stat().st_mode
        except PermissionError as error:
            message = f"{path} can't be read: {error.strerror}"
            raise CheckpointError(message) from error
        except (OSError, ValueError):
            return cls(path, is_folder=False, is_there=False)
        return cls(path, is_folder=stat.S_ISDIR(mode), is_there=True)


def load_checkpoint(path_or_run: object, model: nn.Module | None = None, strict: bool = True, weights_only: bool = True) -> Any:
    """Load a checkpoint file into a model of this process, in place, or read its state dict.

    Files are known by their content: checkpoints of nbddp, bare state dicts, those that stand under ``state_dict``, ``model`` or ``model_state_dict``
    (also one within another), Lightning's, and safetensors. Of several state dicts in a file, one under those names is taken, and averaged weights beside it
    are named in a line; where that leaves a choice, it is an error.

    Names fit with and without what wrappers put into them (``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.``), in the file and in the model, in any
    nesting; an attribute that is really called ``module`` keeps its name. Of a LightningModule's file, the one attribute is taken below which everything fits
    the model, and that is said in a line. Values are cast to the model's device and dtype; from complex to real, and to integers that would differ, they are
    not. Tied tensors stay tied, and one of their names in the file is enough. Mode and ``requires_grad`` stay.

    Args:
        path_or_run: a file, a run directory, a Run or the id of one (a part of it that no other has); runs stand for their last checkpoint.
        model: the module to write into, which may be wrapped.
        strict: whether every entry must be in both and fit; False leaves out what does not, and says what that was.
        weights_only: refuse files that hold more than tensors and plain types, as checkpoints of other trainers may; False runs whatever code the file
            carries, for files that you trust.

    Returns:
        the model, or without one the state dict, an OrderedDict of tensors on the CPU under names without wrappers.

    Raises:
        CheckpointError: where the file is missing, incomplete or holds no state dict of a model, where pickled objects are refused, and where it does not
            fit: a table of what is missing, unexpected, of another shape or dtype, with the nearest names. The model is unchanged then.
        ConfigError: for arguments that are no checkpoint or no module, and for switches that are not True or False.
    """
    _check_switches(strict=strict, weights_only=weights_only)
    path = located(path_or_run)
    if model is None:
        content = read(path, weights_only=weights_only)
        found = found_in(content, path)
        _say(path, Loaded(found, len(found.state)).remarks())
        ours = content.get("format") == FORMAT  # whose names are those of the model without wrappers already
        return found.state if ours and isinstance(found.state, OrderedDict) else without_wrappers(found.state)
    _say(path, load_file(path, model, strict=strict, weights_only=weights_only).remarks())
    return model


def load_file(path: Path, model: object, *, strict: bool = True, weights_only: bool = True, undo: bool = True) -> Loaded:
    """`load_checkpoint` of a file into a model, which says nothing and returns what was done; `undo` as for `load_state`."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        message = f"a checkpoint is loaded into a torch.nn.Module, not into {what}"
        raise ConfigError(message)
    _check_switches(strict=strict, weights_only=weights_only)
    found = found_in(read(path, weights_only=weights_only), path)
    try:
        return load_found(model, found, strict=strict, what=str(path), undo=undo)
    except CheckpointError as error:
        if not (parts := part_of(path)):
            raise
        message = f"{error}\n  {parts}"
        raise CheckpointError(message) from error


def _check_switches(**switches: object) -> None:
    """Whether code runs is not left to what counts as false."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            message = f"load_checkpoint: {name}={value!r} must be True or False"
            raise ConfigError(message)


def _say(path: Path, remarks: list[str]) -> None:
    if remarks:
        print(f"{path}: {'; '.join(remarks)}")  # noqa: T201 - says what the caller could not have expected


def checkpoint_path(path_or_run: object) -> Path:
    """The file that a path, a run directory or a Run stands for, whether it is there or not."""
    place = Place.of(getattr(path_or_run, "dir", path_or_run))  # type: ignore[arg-type]
    return of_the_end(RunDir(place.path)) if place.is_folder else place.path


def located(path_or_run: object) -> Path:
    """The file that an argument of `load_checkpoint` stands for.

    Raises:
        ConfigError: for what names no checkpoint.
        CheckpointError: for a folder that is no run directory, and for a name that is neither a file nor a run.
    """
    given = getattr(path_or_run, "dir", None) or getattr(path_or_run, "path", None) or path_or_run
    if not isinstance(given, str | os.PathLike) or isinstance(given, bytes):
        swapped = "; the model comes second" if isinstance(path_or_run, nn.Module) else ""
        message = f"load_checkpoint takes a checkpoint file, a run, its id or its directory, not a {type(path_or_run).__name__}{swapped}"
        raise ConfigError(message)
    place = Place.of(given)
    path = place.path
    if place.is_folder:
        return _last_of(path)
    if place.is_there or path.suffix in SUFFIXES or len(path.parts) != 1:
        return path
    try:
        return of_the_end(find_run(str(given), run_root()))
    except ConfigError as error:
        message = f"{readable(given)} is neither a file nor a run: {error}"
        raise CheckpointError(message) from None


def _last_of(folder: Path) -> Path:
    if (folder / "spec.json").is_file() or (folder / "checkpoints").is_dir():
        return of_the_end(RunDir(folder))
    message = f"{folder} is a folder, not a run directory; {described(folder)}"
    raise CheckpointError(message)
