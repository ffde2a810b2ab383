"""Where tensors and arrays find their memory while a stream is unpickled; pickles name the functions of this module.

Runs in the ranks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Memory(Protocol):
    """The memory of an archive."""

    def view(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """The storage and the offset in bytes of a view."""


_open: list[Memory] = []


@contextmanager
def reading(memory: Memory) -> Iterator[None]:
    """Unpickle from this archive; streams of other archives may be unpickled in between."""
    _open.append(memory)
    try:
        yield
    finally:
        _open.pop()


def view_at(index: int) -> tuple[torch.UntypedStorage, int]:
    """Return the storage and the offset in bytes of a view."""
    return _open[-1].view(index)


def storage_at(index: int, dtype: torch.dtype | None) -> torch.UntypedStorage | torch.TypedStorage:
    """Return a whole storage, typed if ``dtype`` is given."""
    storage, offset = _open[-1].view(index)
    part = storage[offset:] if offset else storage
    return part if dtype is None else torch.storage.TypedStorage(wrap_storage=part, dtype=dtype, _internal=True)
