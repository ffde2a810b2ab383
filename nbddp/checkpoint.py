"""Checkpoint files: tensors and plain types only, in a versioned schema, readable with `weights_only=True`.

Written by rank 0, read by ranks and kernels.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import shutil
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nbddp.errors import CheckpointError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Copy = Callable[[torch.Tensor, str], torch.Tensor]

FORMAT = "nbddp.checkpoint"
VERSION = 1
LOAD_HINT = "the model is unchanged"
_WRAPPERS = ("module.", "_orig_mod.")


_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, type(None))


def _copy(tensor: torch.Tensor, _where: str) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def plain(value: Any, where: str, copy: Copy = _copy) -> Any:
    """Copy a state to the CPU as tensors and plain types.

    Args:
        value: what the state is made of: dicts, sequences, sets, tensors, arrays, scalars.
        where: its name, from which those of its entries are made.
        copy: copies a tensor, given its name.

    Raises:
        CheckpointError: names the entry that a checkpoint cannot hold.
    """
    if isinstance(value, torch.Tensor):
        return copy(value, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return copy(torch.from_numpy(np.array(value, order="C")), where)  # a copy: torch warns of arrays that can't be written to
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        copied = {plain(key, f"a key of {where}", copy): plain(item, f"{where}[{key!r}]", copy) for key, item in value.items()}
        return Counter(copied) if isinstance(value, Counter) else copied
    if isinstance(value, list | tuple | deque):
        items = [plain(item, f"{where}[{index}]", copy) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        return {plain(item, f"an element of {where}", copy) for item in value}
    message = f"{where} is a {type(value).__name__}: checkpoints hold tensors and plain types only"
    raise CheckpointError(message)


def check_plain(value: Any, where: str) -> None:
    """The check of `plain`, without a copy of the tensors.

    Raises:
        CheckpointError: names the entry that a checkpoint cannot hold.
    """
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            plain(key, f"a key of {where}")
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    else:
        plain(value, where)


def model_state(model: nn.Module, copy: Copy = _copy) -> OrderedDict[str, Any]:
    """The model's state dict on the CPU, tied tensors as one; with the modules' versions, which torch keeps beside it. `copy` as in `plain`.

    Raises:
        CheckpointError: names an extra state that a checkpoint cannot hold.
    """
    copies: dict[object, torch.Tensor] = {}
    own = model.state_dict()
    state: OrderedDict[str, Any] = OrderedDict()
    for key, value in own.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            state[key] = plain(value, f"model[{key!r}]", copy)
            continue
        same = (value.data_ptr(), tuple(value.shape), tuple(value.stride()), value.dtype) if value.numel() else key
        if same not in copies:
            copies[same] = copy(value, f"model[{key!r}]")
        state[key] = copies[same]
    if (versions := getattr(own, "_metadata", None)) is not None:
        state._metadata = plain(versions, "the model's metadata")  # type: ignore[attr-defined]  # where load_state_dict looks for it
    return state


def non_finite(state: Mapping[str, Any]) -> str | None:
    """Name of the first tensor with a value that is not finite."""
    return next((key for key, value in state.items() if isinstance(value, torch.Tensor) and not _finite(value)), None)


def _finite(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _finite(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif not tensor.is_floating_point():
        return True
    if not tensor.numel():
        return True
    if tensor.element_size() == 1:  # few operations know the dtypes of 8 bits
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # nan where there is one; reads the tensor once, several times faster than isfinite
    return math.isfinite(float(low)) and math.isfinite(float(high))


def write(path: Path, content: dict[str, Any]) -> int:
    """Write a checkpoint so that `path` always holds a complete one; return its size in bytes.

    Raises:
        CheckpointError: where it can't be written; says why, and what was there stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):  # torch's writer makes a RuntimeError of a full disk
            message = f"the checkpoint {path} can't be written: {_why(error)}; what was written before stays"
            raise CheckpointError(message) from error
        raise
    return size


def _why(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def link(source: Path, target: Path) -> None:
    """Let `target` be the same file as `source`, replacing what was there; copied where links are not to be had."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            temporary.touch(0o600)
            shutil.copyfile(source, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_unfinished(folder: Path) -> None:
    """Delete what writers left behind that were killed while they wrote."""
    for path in folder.glob(".*.pt.*"):
        path.unlink(missing_ok=True)


def read(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU.

    Raises:
        CheckpointError: where the file is missing, incomplete, or holds more than tensors and plain types.
    """
    try:
        content = _load(path, weights_only=weights_only)
    except FileNotFoundError:
        near = [other.name for other in path.parent.glob("*.pt")] if path.parent.is_dir() else []
        has = f"; {path.parent} has {', '.join(sorted(near))}" if near else ""
        message = f"no checkpoint {path}{has}"
        raise CheckpointError(message) from None
    except pickle.UnpicklingError as error:
        reason = "it holds pickled objects beside tensors; weights_only=False runs them, for files that you trust" if _is_zip(path) else "not a checkpoint"
        message = f"{path} can't be read: {reason}"
        raise CheckpointError(message) from error
    except Exception as error:  # whatever the bytes of a file make of torch's reader
        message = f"{path} is not a complete checkpoint ({_why(error)})"
        raise CheckpointError(message) from error
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}, not a checkpoint or a state dict"
        raise CheckpointError(message)
    if content.get("format") == FORMAT and content.get("version") != VERSION:
        message = f"{path} has version {content.get('version')} of the schema; this nbddp reads version {VERSION}"
        raise CheckpointError(message)
    return content


def _load(path: Path, *, weights_only: bool) -> Any:
    """Read the file that the path names now; torch opens it a second time to map the tensors, and by then a run may have put the next one there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        same = Path(f"/proc/self/fd/{fd}")
        return torch.load(same, map_location="cpu", weights_only=weights_only, mmap=_is_zip(same))
    finally:
        os.close(fd)


def _is_zip(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return zipfile.is_zipfile(path)
    return False


def state_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The model's state dict in a checkpoint of ours, or a bare state dict; without the prefixes of DDP and torch.compile.

    Raises:
        CheckpointError: where there is none.
    """
    ours = content.get("format") == FORMAT
    state = content.get("model") if ours else content
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        if any(isinstance(value, torch.Tensor) for value in state.values()):
            return _unwrapped(state)
        if ours and not state:
            return state
    message = f"{path} holds no state dict of a model: keys {', '.join(map(str, list(content)[:5]))}"
    raise CheckpointError(message)


def _unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """Without `module.` and `_orig_mod.` in front, where every name has them."""
    while (prefix := next((p for p in _WRAPPERS if all(key.startswith(p) for key in state)), None)) is not None:
        versions = getattr(state, "_metadata", None)
        state = OrderedDict((key.removeprefix(prefix), value) for key, value in state.items())
        if versions is not None:
            inner = {key.removeprefix(prefix): value for key, value in versions.items() if key.startswith(prefix)}
            state._metadata = {**inner, "": versions.get(prefix[:-1], {})}  # type: ignore[attr-defined]  # where load_state_dict looks for it
    return state


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
    model.load_state_dict(state, strict=False)


def load_checkpoint(path_or_run: object, model: nn.Module | None = None, strict: bool = True, weights_only: bool = True) -> Any:
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
