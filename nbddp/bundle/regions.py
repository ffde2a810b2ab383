"""The memory behind the tensors and arrays of an archive: which bytes are needed, and where they end up in it.

Runs in the kernel. While objects are pickled, every tensor and array notes the byte range that it reaches; what is written of each buffer is decided when all
ranges are known, so that sharing is kept and a small slice does not drag its whole buffer along.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbddp.bundle.reading import view_at

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 64


class Key(NamedTuple):
    """Identifies a buffer while it lives."""

    device: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class View:
    """Stands for a byte range in a pickle; ``index`` counts the archive's views."""

    index: int

    def __reduce__(self) -> tuple[Any, ...]:
        return view_at, (self.index,)


class Place(NamedTuple):
    """Where a byte range is stored: number of the archive (0 is the one at hand), number of the blob in it (-1: no bytes at all), offset in bytes."""

    archive: int
    blob: int
    offset: int


@dataclass(frozen=True)
class Blob:
    """A run of bytes to be stored: part of a buffer, from ``low`` up to ``high``."""

    region: Region
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor on the CPU, without a copy if they are there already."""
        return self.region.read(self.low, self.high)


@dataclass
class Region:
    """A buffer, the object that keeps it alive, and the byte ranges that are reached in it."""

    key: Key
    keep: object
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def read(self, low: int, high: int) -> torch.Tensor:
        if isinstance(self.keep, torch.UntypedStorage) and self.keep.device.type != "cpu":
            return torch.empty(0, dtype=torch.uint8, device=self.keep.device).set_(self.keep, low, (high - low,), (1,)).cpu()
        # By address, since torch warns about read-only arrays; nothing here writes.
        return torch.frombuffer((ctypes.c_ubyte * (high - low)).from_address(self.key.address + low), dtype=torch.uint8)

    def blobs(self) -> list[Blob]:
        """What to store: the whole buffer if at least half of it is reached, else the parts that are."""
        parts: list[tuple[int, int]] = []
        for low, high in sorted(set(self.ranges)):
            # Aligned, so that element offsets stay whole numbers for every dtype of torch.
            start = low - low % ALIGNMENT
            if parts and start <= parts[-1][1]:
                parts[-1] = (parts[-1][0], max(high, parts[-1][1]))
            else:
                parts.append((start, high))
        if 2 * sum(high - low for low, high in parts) >= self.key.nbytes:
            parts = [(0, self.key.nbytes)]
        return [Blob(self, low, high) for low, high in parts]


class Stored:
    """Finds a byte range of a live buffer among the blobs of one archive."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self._of: dict[Key, list[tuple[int, Blob]]] = {}
        for index, blob in enumerate(blobs):
            self._of.setdefault(blob.region.key, []).append((index, blob))

    def find(self, key: Key, low: int, high: int, archive: int = 0) -> Place | None:
        """Return the place of bytes ``low`` to ``high``; None if they are not all stored."""
        blobs = self._of.get(key, [])
        position = bisect_right(blobs, low, key=lambda entry: entry[1].low) - 1
        if position < 0:
            return None
        index, blob = blobs[position]
        return Place(archive, index, low - blob.low) if high <= blob.high else None


class Regions:
    """All buffers that the objects of one archive reach.

    ``elsewhere`` holds what other archives store already, in the order of their numbers, from 1.
    """

    def __init__(self, elsewhere: Sequence[Stored] = ()) -> None:
        self._elsewhere = list(enumerate(elsewhere, start=1))
        self._regions: dict[Key, Region] = {}
        self._views: list[Place | tuple[Key, int, int]] = []

    def view(self, key: Key, keep: object, low: int, high: int, *, share: bool) -> View:
        """Note that bytes ``low`` to ``high`` of a buffer are needed; ``share``: another archive may hold them."""
        self._views.append(self._place(key, keep, low, high, share=share))
        return View(len(self._views) - 1)

    def _place(self, key: Key, keep: object, low: int, high: int, *, share: bool) -> Place | tuple[Key, int, int]:
        if low == high:
            return Place(0, -1, 0)
        if share:
            for number, stored in self._elsewhere:
                if place := stored.find(key, low, high, number):
                    return place
        self._regions.setdefault(key, Region(key, keep)).ranges.append((low, high))
        return key, low, high

    def settle(self) -> tuple[list[Blob], list[Place]]:
        """Return the blobs to store, and the place of every view."""
        blobs = [blob for region in self._regions.values() for blob in region.blobs()]
        stored = Stored(blobs)
        places = [view if isinstance(view, Place) else stored.find(*view) for view in self._views]
        return blobs, [place for place in places if place is not None]


def storage_key(storage: torch.UntypedStorage) -> Key:
    """Return the key of a torch storage; an array over the same memory has the same."""
    return Key(str(storage.device), storage.data_ptr(), storage.nbytes())
