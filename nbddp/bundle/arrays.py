"""How numpy arrays are taken apart for an archive (kernel) and put together again (ranks; pickles name the functions of this module).

Their memory is stored like that of tensors, so that ranks map it instead of copying it; dtype, strides and the read-only flag are kept.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbddp.bundle.refusals import Refused
from nbddp.bundle.regions import Key, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.bundle.regions import View

    Array = np.ndarray[Any, Any]

# Below this, pickle's own way is faster, and there is nothing to gain from mapping.
INLINE_BYTES = 4096


def reduce_array(array: Array, note: Callable[..., View]) -> Any:
    """Reduce an array to a view and its layout; NotImplemented where numpy's own way is as good (objects, subclasses, small arrays)."""
    if type(array) not in (np.ndarray, np.memmap) or array.dtype.hasobject or not array.nbytes:
        return NotImplemented
    root = _root(array)
    low, high = _bounds(array)
    if isinstance(root, np.memmap) and (place := _in_file(root, low)) is not None:
        path, start, mode = place
        stat = Path(path).stat()
        layout = (array.dtype, array.shape, array.strides, _address(array) - low, type(array) is np.memmap)
        return map_file, (path, mode, start, high - low, (stat.st_size, stat.st_mtime_ns), *layout)
    if array.nbytes < INLINE_BYTES and array.flags.writeable and type(array) is np.ndarray:
        return NotImplemented
    key, keep = _buffer(root)
    if not key.address <= low <= high <= key.address + key.nbytes or high - low > 2 * array.nbytes:
        # A sparse view: its own bytes alone.
        copy = np.array(array, order="K", subok=False)
        low, high = _bounds(copy)
        view, strides, first = note(Key("cpu", low, high - low), copy, 0, high - low), copy.strides, 0
    else:
        view, strides, first = note(key, keep, low - key.address, high - key.address), array.strides, _address(array) - low
    return rebuild_array, (view, high - low, array.dtype, array.shape, strides, first, array.flags.writeable)


def rebuild_array(
    view: tuple[torch.UntypedStorage, int],
    nbytes: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    writeable: bool,
) -> Array:
    """Put an array over its stored bytes; element 0 starts at byte ``first`` of them."""
    storage, offset = view
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,), (1,)).numpy()
    array: Array = np.ndarray(shape, dtype, buffer=raw, offset=first, strides=strides)
    array.flags.writeable = writeable
    return array


def map_file(
    path: str,
    mode: Any,
    start: int,
    nbytes: int,
    _version: tuple[int, int],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first: int,
    as_memmap: bool,
) -> Array:
    """Map the part of a user's file that an array of the kernel was a view of.

    The file's size and time of change are in the pickle only so that archives differ where the file's content does.
    """
    mapped: Array = np.memmap(path, dtype=np.uint8, mode=mode, offset=start, shape=(nbytes,))
    array: Array = np.ndarray.__new__(np.memmap if as_memmap else np.ndarray, shape, dtype, buffer=mapped, offset=first, strides=strides)
    if as_memmap:
        array.__array_finalize__(mapped)  # hands on path, offset and mode
    return array


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _bounds(array: Array) -> tuple[int, int]:
    """Addresses of the first byte of an array and of the one behind its last."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    address = _address(array)
    return address + sum(min(0, step) for step in steps), address + sum(max(0, step) for step in steps) + array.itemsize


def _root(array: Array) -> Any:
    """The object at the end of the chain of bases: the array that owns the memory (or maps it), a tensor, or some other buffer's array."""
    while True:
        base: Any = array.base
        if isinstance(base, torch.Tensor):
            return base
        if not isinstance(base, np.ndarray):
            return array
        array = base


def _buffer(root: Any) -> tuple[Key, object]:
    if isinstance(root, torch.Tensor):
        storage = root.untyped_storage()
        return storage_key(storage), storage
    low, high = _bounds(root)
    return Key("cpu", low, high - low), root


def _in_file(root: np.memmap[Any, Any], low: int) -> tuple[str, int, str] | None:
    """Path, offset in the file, and mode to map it with, of address ``low``; None where the memory is more than the file's (copy-on-write, or no name)."""
    handle = root._mmap  # type: ignore[attr-defined]
    if root.mode == "c" or root.filename is None or handle is None:
        return None
    path = Path(root.filename)
    if not path.is_file():
        message = f"an array that is mapped from {path} can't be sent, since that file no longer exists; restore it, or keep a copy: np.array(...)"
        raise Refused(message)
    if root.flags.writeable:
        root.flush()  # for ranks on other machines, which do not share this one's page cache
    base = _address(np.frombuffer(handle, np.uint8))
    return str(path), low - base + root.offset - root.offset % mmap.ALLOCATIONGRANULARITY, "r" if root.mode == "r" else "r+"
