"""How tensors and modules are taken apart for an archive (kernel) and put together again (ranks; pickles name the functions of this module).

The memory itself is not in the pickle: a tensor refers to a view, see `nbddp.bundle.regions`. Tensors on an accelerator arrive on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize

from nbddp.bundle.regions import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbddp.bundle.regions import View


def reduce_tensor(tensor: torch.Tensor, note: Callable[..., View], *, detach: bool) -> Any:
    """Reduce a plain tensor to a view and its layout; NotImplemented for all others, whose storages are noted when pickle comes to them."""
    if tensor.device.type not in ("cpu", "cuda", "xpu"):
        return as_leaf, (tensor.detach().cpu(), tensor.requires_grad and not detach)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return NotImplemented
    storage, size, stride = tensor.untyped_storage(), tuple(tensor.size()), tensor.stride()
    low = high = 0
    if tensor.numel():
        low = int(tensor.storage_offset()) * tensor.itemsize
        high = low + (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * tensor.itemsize
    view = note(storage_key(storage), storage, low, high)
    args = (view, tensor.dtype, size, stride, tensor.requires_grad and not detach, tensor.is_conj(), tensor.is_neg())
    attributes = dict(vars(tensor))
    return (rebuild_tensor, args, attributes, None, None, set_attributes) if attributes else (rebuild_tensor, args)


def rebuild_tensor(
    view: tuple[torch.UntypedStorage, int],
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    is_conj: bool,
    is_neg: bool,
) -> torch.Tensor:
    """Put a tensor over its stored bytes."""
    storage, offset = view
    # The device is named, since the notebook may have made another one torch's default.
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset // dtype.itemsize, size, stride)
    if is_conj:
        tensor = tensor.conj()
    if is_neg:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_(requires_grad)


def as_leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return the tensor, which an accelerator without storages of its own held in the kernel."""
    return tensor.requires_grad_(requires_grad)


def set_attributes(obj: Any, attributes: Mapping[str, object]) -> None:
    """Set the attributes that a user gave to a tensor or torch gave to a buffer."""
    vars(obj).update(attributes)


def recomputed_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors with an autograd history that ``module`` makes anew at each forward: weights under weight_norm, spectral_norm or pruning, and an RNN's list."""
    names = {getattr(hook, name, None) for hook in vars(module).get("_forward_pre_hooks", {}).values() for name in ("name", "_tensor_name")}
    found = [value for name, value in vars(module).items() if name in names]
    if isinstance(module, torch.nn.RNNBase):
        if not parametrize.is_parametrized(module):
            # Its __getstate__ does so as well, but later. A parametrized one was reduced before, and makes other tensors each time it is asked.
            module._update_flat_weights()
        found += module._flat_weights
    return [value for value in found if isinstance(value, torch.Tensor)]


def reduce_module(module: torch.nn.Module) -> Any:
    """Reduce a module with parametrizations to its class as it was written; NotImplemented for all others.

    torch gives each such module a class of its own, made at run time, and refuses to pickle it
    (https://pytorch.org/tutorials/intermediate/parametrizations.html).
    """
    cls = type(module)
    if not (parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{cls.__bases__[0].__name__}"):
        return NotImplemented
    base: Any = cls.__bases__[0]
    return parametrized_module, (base, tuple(module.parametrizations)), base.__getstate__(module)  # type: ignore[arg-type] # a ModuleDict


def parametrized_module(base: type[torch.nn.Module], names: Sequence[str]) -> torch.nn.Module:
    """Make an empty module of class ``base`` whose tensors ``names`` are computed by parametrizations; pickle then sets its state."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
