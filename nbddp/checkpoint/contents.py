"""Where in a file the state dict of a model is: files of nbddp, bare state dicts, those of other trainers, which wrap it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.checkpoint import tensorfile
from nbddp.checkpoint.misfit import readable
from nbddp.checkpoint.names import bare
from nbddp.checkpoint.writing import FORMAT
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ENTRIES = ("state_dict", "model", "model_state_dict")
_AROUND = (*_ENTRIES, "checkpoint", "ckpt", "state")
_NOT_MODELS = ("optim", "sched", "scaler", "callback", "loops")
_DEPTH = 3
_LISTED = 6


@dataclass(frozen=True, slots=True)
class Found:
    """A state dict, with whatever wrappers its names have, and what the file says about it.

    Attributes:
        where: the keys under which it stands.
        others: keys of state dicts beside it that have the same names, as averaged weights do.
        lightning: whether a LightningModule's, in which the model is an attribute.
        norm: kinds of the normalization layers that a run of nbddp put in, by name.
        epoch, step: of the file; None where it does not say.
    """

    state: Mapping[str, Any]
    where: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lightning: bool = False
    norm: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None
    step: int | None = None


def state_of(content: Mapping[str, Any], path: Path) -> Any:
    """The model's state dict in the content of a file, as it stands there.

    Raises:
        CheckpointError: where there is none, or which one is meant can't be told.
    """
    return found_in(content, path).state


def found_in(content: Mapping[str, Any], path: Path) -> Found:
    """Find the model's state dict in the content of a file.

    Raises:
        CheckpointError: where there is none, or which one is meant can't be told.
    """
    epoch, step = _count(content, "epoch"), _count(content, "step", "global_step", "iteration")
    if content.get("format") == FORMAT:
        state, norm = content.get("model"), content.get("norm")
        if isinstance(state, dict) and (not state or _is_state_dict(state)):
            return Found(state, norm=norm if isinstance(norm, dict) else {}, epoch=epoch, step=step)
        message = f"{path} holds no state dict of a model: its entry 'model' is a {type(state).__name__}"
        raise CheckpointError(message)
    if content.get("format") == tensorfile.FORMAT and "tensors" in content:
        said = content["metadata"]
        return Found(content["tensors"], epoch=_count(said, "epoch"), step=_count(said, "step", "global_step"))
    places = dict(_state_dicts(content))
    chosen = [where for where in places if where[-1] in _ENTRIES and set(where) <= set(_AROUND)]
    if not chosen and (_is_state_dict(content) or _is_empty_one(content)):
        return Found(content)
    if len(chosen) == 1:
        where = chosen[0]
        state = places[where]
        others = tuple(".".join(other) for other, there in places.items() if other != where and _alike(state, there))
        return Found(state, where, others, "pytorch-lightning_version" in content, epoch=epoch, step=step)
    raise CheckpointError(_unclear(path, content, chosen or list(places)))


def _count(content: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = content.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.isdecimal():
            return int(value)
    return None


def _is_state_dict(value: object) -> bool:
    """Whether most of a dict's entries are tensors, by name; extra states of modules do not count."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    entries = [item for key, item in value.items() if not key.endswith("_extra_state")]
    tensors = sum(isinstance(item, torch.Tensor) for item in entries)
    return tensors > 0 and 2 * tensors >= len(entries)


def _is_empty_one(value: object) -> bool:
    """Whether it is the state dict of a model without entries, by what torch keeps beside one."""
    return isinstance(value, dict) and not value and hasattr(value, "_metadata")


def _state_dicts(content: Mapping[Any, Any], above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The state dicts inside a dict, with their keys; not those within one of them, nor what belongs to optimizers and the like."""
    found: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
    for key, value in content.items():
        if not isinstance(key, str) or any(word in key.lower() for word in _NOT_MODELS):
            continue
        if isinstance(value, nn.Module):
            found.append(((*above, key), value.state_dict()))
        elif _is_state_dict(value) or _is_empty_one(value):
            found.append(((*above, key), value))
        elif isinstance(value, dict) and len(above) + 1 < _DEPTH:
            found += _state_dicts(value, (*above, key))
    return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts are of one model: they share most of their names."""
    names, others = ({bare(name) for name in state} for state in (one, other))
    return 2 * len(names & others) >= len(names)


def _keys(content: Mapping[str, Any]) -> str:
    return f"keys {', '.join(readable(key) for key in list(content)[:5])}" if content else "it is an empty dict"


def _unclear(path: Path, content: Mapping[str, Any], places: list[tuple[str, ...]]) -> str:
    if not places:
        return f"{path} holds no state dict of a model: {_keys(content)}"
    listed = [readable(".".join(where)) for where in places[:_LISTED]]
    load = f"model.load_state_dict(torch.load({str(path)!r}){''.join(f'[{key!r}]' for key in places[0])})"
    if len(places) == 1:
        return f"{path} holds no state dict of a model under a usual name: {_keys(content)}; its entry {listed[0]!r} may be one: {load}"
    more = f" and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
    return f"{path} holds several state dicts ({', '.join(listed)}{more}), and which one is meant can't be told: choose one, as in {load}"
