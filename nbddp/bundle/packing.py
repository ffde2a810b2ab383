"""Takes objects of the kernel apart into pickle streams and byte ranges; nothing is written here.

Runs in the kernel. Whatever can't travel is refused at this point, by name.
"""

from __future__ import annotations

import gc
import io
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from nbddp.bundle.arrays import INLINE_BYTES, reduce_array
from nbddp.bundle.culprit import find_path
from nbddp.bundle.pickler import NotebookPickler, reduce_singleton
from nbddp.bundle.reading import storage_at
from nbddp.bundle.refusals import Refused, explain, in_graph, refusal_for
from nbddp.bundle.regions import Regions, Stored, View, storage_key
from nbddp.bundle.tensors import recomputed_tensors, reduce_module, reduce_tensor
from nbddp.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from nbddp.bundle.regions import Blob, Key, Place

# Long enough to reach back from a temporary object of a reduction to something that has a name.
TRAIL = 64
MANY_ITEMS = 10_000
_ATOMS = frozenset({str, bytes, int, float, tuple})
_COPIED = (type, torch.nn.Module, str, bytes, tuple, np.dtype, np.generic)


@dataclass
class Packed:
    """What one archive will hold.

    Attributes:
        streams: pickled objects by name.
        blobs: the memory to store.
        places: where each view of the streams is found.
        archives: hashes of the other archives that streams and places refer to, numbered from 1.
        filenames: file names of all code in the streams.
    """

    streams: dict[str, bytes]
    blobs: list[Blob]
    places: list[Place]
    archives: list[str]
    filenames: set[str]


@dataclass
class Source:
    """An archive that others may refer to: its hash, its memory, and the objects in it by id, which are kept alive along with their ids."""

    hash: str
    stored: Stored
    objects: dict[int, tuple[int, object]] = field(default_factory=dict)


class Packer:
    """Packs the streams of one archive, which may refer to each other and to the archives ``sources``."""

    def __init__(self, main: ModuleType, sources: Sequence[Source] = ()) -> None:
        self._main = main
        self._sources = sources
        self._regions = Regions([source.stored for source in sources])
        self._streams: dict[str, bytes] = {}
        self._filenames: set[str] = set()
        self._own: dict[int, tuple[int, object]] = {}

    def add(self, stream: str, obj: object, names: Mapping[str, object], *, share: bool) -> None:
        """Pickle ``obj`` as a stream; ``share``: what the sources and earlier streams hold is referred to.

        ``names`` are the objects in it that the user has names for. Raises BundleError with the path from such a name to what can't travel.
        """
        # By id, an object of another stream: number of its archive (0 is this one), index in the stream's memo.
        shared: dict[int, tuple[int, int]] = {}
        if share:
            for number, source in reversed(list(enumerate(self._sources, start=1))):
                shared.update((key, (number, index)) for key, (index, _) in source.objects.items())
            shared.update((key, (0, index)) for key, (index, kept) in self._own.items() if not isinstance(kept, (str, bytes)))
        buffer = io.BytesIO()
        if shared:
            pickler: _ArchivePickler = _SharingPickler(buffer, shared, main=self._main, regions=self._regions)
        else:
            pickler = _ArchivePickler(buffer, main=self._main, regions=self._regions, share=share)
        try:
            with _collector_paused():
                pickler.dump(obj)
                self._own = pickler.memo.copy()
        except Exception as error:  # noqa: BLE001 - pickling runs the user's __getstate__ and __reduce__
            raise _refusal(error, pickler.trail, names) from (None if isinstance(error, Refused) else error)
        self._streams[stream] = buffer.getvalue()
        self._filenames |= pickler.filenames

    def finish(self) -> Packed:
        """Settle which memory is stored where."""
        blobs, places = self._regions.settle()
        return Packed(self._streams, blobs, places, [source.hash for source in self._sources], self._filenames)

    def data_objects(self, root: object) -> dict[int, tuple[int, object]]:
        """The last stream's objects worth a reference from elsewhere: data, and not every small thing, so that archives stay independent where they can."""
        return {key: entry for key, entry in self._own.items() if entry[1] is root or _is_data(entry[1])}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, over the many objects that a pickler keeps."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_data(obj: object) -> bool:
    if type(obj) in _ATOMS:
        return False
    if isinstance(obj, Dataset):
        return True
    if isinstance(obj, torch.Tensor):
        return obj.numel() * obj.itemsize >= INLINE_BYTES
    if isinstance(obj, np.ndarray):
        return obj.nbytes >= INLINE_BYTES
    if isinstance(obj, _COPIED):
        return False
    if isinstance(obj, (list, dict, set, frozenset, deque)):
        return len(obj) >= MANY_ITEMS
    return hasattr(type(obj), "__getitem__") and hasattr(type(obj), "__len__")


def _refusal(error: Exception, trail: Sequence[object], names: Mapping[str, object]) -> BundleError:
    """Turn what went wrong while pickling into an error that names the culprit, the last object that pickle came to."""
    path = find_path(names, trail)
    cause = error.__cause__ if isinstance(error.__cause__, RecursionError) else error
    if isinstance(cause, RecursionError):
        message = f"{path}: nested too deeply to be sent to another process; keep such chains flat, in a list"
    elif isinstance(error, Refused):
        message = f"{path}: {error}"
    else:
        message = f"{path}: {explain(trail[-1], error) if trail else error}"
    return BundleError(message)


class _ArchivePickler(NotebookPickler):
    """Leaves memory out of the stream, refers to shared objects, and refuses what would not arrive as it was."""

    def __init__(self, file: io.BytesIO, *, main: ModuleType, regions: Regions, share: bool) -> None:
        super().__init__(file, main=main)
        self.trail: deque[object] = deque(maxlen=TRAIL)
        self._regions = regions
        self._share = share
        self._by_type: dict[type, Callable[[Any], Any]] = {}
        self._recomputed: dict[int, torch.Tensor] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Reduce by type; what is done for a type is looked up once."""
        self.trail.append(obj)
        cls = type(obj)
        try:
            reduce = self._by_type[cls]
        except KeyError:
            reduce = self._by_type[cls] = self._reducer_for(cls)
        return reduce(obj)

    def _reducer_for(self, cls: type) -> Callable[[Any], Any]:
        refusal = refusal_for(cls)
        if issubclass(cls, torch.Tensor):
            reduce: Callable[[Any], Any] = self._tensor
        elif issubclass(cls, np.ndarray):
            reduce = lambda array: reduce_array(array, self._note)  # noqa: E731 - one of several reducers
        elif issubclass(cls, torch.nn.Module):
            reduce = self._module
        elif issubclass(cls, (torch.UntypedStorage, torch.TypedStorage)):
            reduce = self._storage
        else:
            reduce = super().reducer_override

        if refusal is None:
            return reduce

        def checked(obj: Any) -> Any:
            # sys.stdout is an open file as well, yet one that every process has.
            reduced = reduce_singleton(obj)
            if reduced is not NotImplemented:
                return reduced
            if text := refusal(obj):
                raise Refused(text)
            return reduce(obj)

        return checked

    def _note(self, key: Key, keep: object, low: int, high: int) -> View:
        return self._regions.view(key, keep, low, high, share=self._share)

    def _storage(self, storage: torch.UntypedStorage | torch.TypedStorage) -> Any:
        untyped, dtype = (storage, None) if isinstance(storage, torch.UntypedStorage) else (storage._untyped_storage, storage.dtype)
        view = self._note(storage_key(untyped), untyped, 0, untyped.nbytes())
        return storage_at, (view.index, dtype)

    def _module(self, module: torch.nn.Module) -> Any:
        reduced = reduce_module(module)
        self._recomputed.update((id(tensor), tensor) for tensor in recomputed_tensors(module))
        return reduced

    def _tensor(self, tensor: torch.Tensor) -> Any:
        has_history = tensor.requires_grad and not tensor.is_leaf
        if has_history and id(tensor) not in self._recomputed:
            raise Refused(in_graph(tensor))
        return reduce_tensor(tensor, self._note, detach=has_history)


class _SharingPickler(_ArchivePickler):
    """Refers to objects of other streams. A class of its own, since `persistent_id` is called for every number and string, which takes its time."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, tuple[int, int]], *, main: ModuleType, regions: Regions) -> None:
        super().__init__(file, main=main, regions=regions, share=True)
        self._shared = shared

    def persistent_id(self, obj: object) -> tuple[int, int] | None:
        """Return where the object is found; None if it is not shared."""
        return self._shared.get(id(obj))
