"""State dicts in files, and how they get into a model."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.checkpoint.reading import read
from nbddp.checkpoint.writing import FORMAT
from nbddp.errors import CheckpointError, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

LOAD_HINT = "the model is unchanged"
_WRAPPERS = ("module.", "_orig_mod.")


def state_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The model's state dict in a checkpoint of ours, or a bare state dict; without the prefixes of DDP and torch.compile.

    Raises:
        CheckpointError: where there is none.
    """
    ours = content.get("format") == FORMAT
    state = content.get("model") if ours else content
    if isinstance(state, dict) and _is_state_dict(state):
        return _unwrapped(state)
    if ours and state == {}:
        return {}
    nested = next((key for key, value in content.items() if _is_state_dict(value)), None)
    hint = "" if nested is None else f"; its entry {nested!r} may be one: model.load_state_dict(torch.load({str(path)!r})[{nested!r}])"
    message = f"{path} holds no state dict of a model: keys {', '.join(map(str, list(content)[:5]))}{hint}"
    raise CheckpointError(message)


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and any(isinstance(item, torch.Tensor) for item in value.values())


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
