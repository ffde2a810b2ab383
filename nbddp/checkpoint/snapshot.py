"""A copy of a state on the CPU, made of tensors and plain types, as a file holds it."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbddp.checkpoint.memory import place_of
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import nn

    Copy = Callable[[torch.Tensor, str], torch.Tensor]

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
        same: object = key if (place := place_of(value)) is None else place
        if same not in copies:
            copies[same] = copy(value, f"model[{key!r}]")
        state[key] = copies[same]
    if (versions := getattr(own, "_metadata", None)) is not None:
        state._metadata = plain(versions, "the model's metadata")  # type: ignore[attr-defined]  # where load_state_dict looks for it
    return state


def buffer_names(model: nn.Module) -> frozenset[str]:
    """Names of the entries of a state dict that are no parameters."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))


def non_finite(state: Mapping[str, Any], buffers: Collection[str] = ()) -> str | None:
    """Name of the first tensor that training has spoilt: with nan, or a parameter with inf, which a buffer, such as an attention mask, may hold."""
    return next((key for key, value in state.items() if isinstance(value, torch.Tensor) and not _finite(value, inf=key in buffers)), None)


def _finite(tensor: torch.Tensor, *, inf: bool = False) -> bool:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _finite(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values(), inf=inf)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif not tensor.is_floating_point():
        return True
    if not tensor.numel():
        return True
    if tensor.element_size() == 1:  # few operations know the dtypes of 8 bits
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # nan where there is one; reads the tensor once, several times faster than isfinite
    return not math.isnan(float(low)) if inf else math.isfinite(float(low)) and math.isfinite(float(high))
