"""Checkpoint files: tensors and plain types only, in a versioned schema, readable with `weights_only=True`.

Written by rank 0, read by ranks and kernels.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from nbddp.errors import CheckpointError, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "nbddp.checkpoint"
VERSION = 1
LOAD_HINT = "the model is unchanged"


def plain(value: Any, where: str) -> Any:  # noqa: ANN401 - any value of a state dict
    """Copy a state to the CPU as tensors and plain types.

    Raises:
        CheckpointError: names the entry that a checkpoint cannot hold.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value)).clone()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.Size | torch.device):
        return value
    if isinstance(value, dict):
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set):
        return set(value)
    message = f"{where} is a {type(value).__name__}: checkpoints hold tensors and plain types only"
    raise CheckpointError(message)


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict on the CPU, tied tensors as one."""
    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...], int, torch.dtype], torch.Tensor] = {}
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            state[key] = plain(value, f"model[{key!r}]")
            continue
        same = (value.data_ptr(), tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype)
        if same not in copies or not value.numel():
            copies[same] = value.detach().to("cpu", copy=True)
        state[key] = copies[same]
    return state


def non_finite(state: Mapping[str, Any]) -> str | None:
    """Name of the first tensor with a value that is not finite."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and not bool(torch.isfinite(value).all()):
            return key
    return None


def write(path: Path, content: dict[str, Any]) -> int:
    """Write a checkpoint so that `path` always holds a complete one; return its size in bytes."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def link(source: Path, target: Path) -> None:
    """Let `target` be the same file as `source`, replacing what was there; copied where links are not to be had."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        os.link(source, temporary)
    except OSError:
        temporary.write_bytes(source.read_bytes())
    temporary.replace(target)


def read(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU.

    Raises:
        CheckpointError: where the file is missing, incomplete, or holds more than tensors and plain types.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=_is_zip(path))
    except FileNotFoundError:
        near = [other.name for other in path.parent.glob("*.pt")] if path.parent.is_dir() else []
        has = f"; {path.parent} has {', '.join(sorted(near))}" if near else ""
        message = f"no checkpoint {path}{has}"
        raise CheckpointError(message) from None
    except pickle.UnpicklingError as error:
        reason = "it holds pickled objects beside tensors; weights_only=False runs them, for files that you trust" if _is_zip(path) else "not a checkpoint"
        message = f"{path} can't be read: {reason}"
        raise CheckpointError(message) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        message = f"{path} is not a complete checkpoint ({str(error).splitlines()[0]})"
        raise CheckpointError(message) from error
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}, not a checkpoint or a state dict"
        raise CheckpointError(message)
    if content.get("format") == FORMAT and content.get("version") != VERSION:
        message = f"{path} has version {content.get('version')} of the schema; this nbddp reads version {VERSION}"
        raise CheckpointError(message)
    return content


def _is_zip(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return zipfile.is_zipfile(path)
    return False


def state_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The model's state dict in a checkpoint of ours, or a bare state dict.

    Raises:
        CheckpointError: where there is none.
    """
    state = content["model"] if content.get("format") == FORMAT else content
    if isinstance(state, dict) and state and all(isinstance(key, str) for key in state) and any(isinstance(v, torch.Tensor) for v in state.values()):
        return state
    if content.get("format") == FORMAT and state == {}:
        return state
    message = f"{path} holds no state dict of a model: keys {', '.join(map(str, list(content)[:5]))}"
    raise CheckpointError(message)


def misfits(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """What keeps a state dict from fitting a model, a line each: missing, unexpected, other shape."""
    own = model.state_dict()
    lines = []
    for key, value in own.items():
        if key not in state:
            lines.append(f"missing     {key}{suggest(key, [other for other in state if other not in own])}")
        elif isinstance(value, torch.Tensor) and isinstance(state[key], torch.Tensor) and value.shape != state[key].shape:
            lines.append(f"shape       {key}: the model has {tuple(value.shape)}, the file {tuple(state[key].shape)}")
    lines.extend(f"unexpected  {key}" for key in state if key not in own)
    return lines


def load_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool, what: str) -> None:
    """Write a state dict into a model in place: device, dtype, mode and ties of the model stay.

    Raises:
        CheckpointError: where it does not fit; the model is unchanged then.
    """
    lines = misfits(model, state)
    hard = lines if strict else [line for line in lines if line.startswith("shape")]
    if hard:
        shown = "\n  ".join(hard[:12] + ([f"and {len(hard) - 12} more"] if len(hard) > 12 else []))
        message = f"{what} does not fit {type(model).__name__}; {LOAD_HINT}:\n  {shown}"
        raise CheckpointError(message)
    result = model.load_state_dict(OrderedDict(state), strict=False)
    assert isinstance(result, _IncompatibleKeys)


def load_checkpoint(path_or_run: object, model: nn.Module | None = None, strict: bool = True, weights_only: bool = True) -> Any:  # noqa: ANN401 - see below
    """Load a checkpoint file into a model of this process, in place.

    Args:
        path_or_run: a checkpoint file of nbddp, a file with a bare state dict, a run (its last checkpoint) or a run directory.
        model: the module to write into; tied weights stay tied, device and dtype are the model's.
        strict: whether every key must be in both.
        weights_only: refuse files that hold more than tensors and plain types; False runs whatever code the file carries.

    Returns:
        the model, or the state dict where no model is given.

    Raises:
        CheckpointError: where the file is incomplete or does not fit; the model is unchanged then.
    """
    path = checkpoint_path(path_or_run)
    state = state_of(read(path, weights_only=weights_only), path)
    if model is None:
        return state
    load_state(model, state, strict=strict, what=str(path))
    return model


def checkpoint_path(path_or_run: object) -> Path:
    """The file that a path, a run directory or a Run stands for."""
    path = Path(getattr(path_or_run, "dir", path_or_run))  # type: ignore[arg-type]
    return path / "checkpoints" / "last.pt" if path.is_dir() else path
