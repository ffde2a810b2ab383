"""Packs what a run needs: datasets into content-addressed archives that runs share, model and hooks into the run's own.

Runs in the kernel, in its main thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.bundle.archive import Archive
from nbddp.bundle.packing import Packer, Source
from nbddp.bundle.regions import Stored
from nbddp.bundle.space import disk_free, require_space
from nbddp.rundir import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import ModuleType

    from nbddp.bundle.cells import CellSource


@dataclass(frozen=True)
class DataRef:
    """A staged dataset.

    Attributes:
        role: what the run uses it for, ``"train"`` or ``"val"``.
        name: how the user wrote it.
        hash: names its archive in the data directory.
        bytes: size of the archive's content.
        type: its class.
    """

    role: str
    name: str
    hash: str
    bytes: int
    type: str


@dataclass
class _Staged:
    root: object
    source: Source
    filenames: set[str]


class Bundler:
    """Packs the datasets, model and hooks of one run.

    Args:
        data_dir: where dataset archives are kept; made on demand, mode 0700.
        main: the notebook's ``__main__``, whose classes and functions travel by value; None: that of this process.
        cells: sources of the notebook's cells, by the file name of their code.
        disk_free: free bytes on the file system of a folder.
    """

    def __init__(
        self,
        *,
        data_dir: Path,
        main: ModuleType | None,
        cells: Mapping[str, CellSource],
        disk_free: Callable[[Path], int] = disk_free,
    ) -> None:
        self._data_dir = data_dir
        self._main = main or sys.modules["__main__"]
        self._cells = cells
        self._disk_free = disk_free
        self._staged: dict[str, _Staged] = {}
        self._pending: dict[str, tuple[str, Archive]] = {}

    def stage(self, role: str, name: str, dataset: object) -> DataRef:
        """Pack a dataset and hash its content; it is written by `write` or `flush`, unless the same content is there already.

        What a dataset shares with one staged before it (two Subsets of one dataset) is stored once. Raises BundleError for what can't travel.
        """
        others = [staged for other, staged in self._staged.items() if other != role]
        # The same object in two roles is the same content, hence the same archive.
        sources = [] if any(staged.root is dataset for staged in others) else [staged.source for staged in others]
        packer = Packer(self._main, sources)
        packer.add("dataset", dataset, {name: dataset}, share=True)
        packed = packer.finish()
        archive = Archive.of(packed)
        digest = archive.digest()
        if not self._path(digest).exists():
            self._pending.setdefault(digest, (name, archive))
        source = Source(digest, Stored(packed.blobs), packer.data_objects(dataset))
        self._staged[role] = _Staged(dataset, source, packed.filenames)
        return DataRef(role, name, digest, archive.nbytes, type(dataset).__qualname__)

    def write(self, path: Path, *, model: object, hooks: Mapping[str, object], model_name: str, always: Iterable[str] = ()) -> int:
        """Write the staged datasets and, to ``path``, model and hooks; return the bytes of the latter file.

        What hooks share with the model and the datasets is referred to. The model does not depend on any dataset, so that it can be opened when those are gone.
        ``always`` are file names of cells whose sources go along even if no code refers to them.
        Raises BundleError for what can't travel and for a full disk, in both cases before anything is written.
        """
        packer = Packer(self._main, [staged.source for staged in self._staged.values()])
        packer.add("model", model, {model_name: model}, share=False)
        packer.add("hooks", dict(hooks), hooks, share=True)
        packed = packer.finish()
        filenames = packed.filenames.union(always, *(staged.filenames for staged in self._staged.values()))
        archive = Archive.of(packed, {name: self._cells[name] for name in sorted(filenames & self._cells.keys())})
        self._write_pending((f"{model_name} and hooks", path.parent, archive.nbytes))
        private_folder(path.parent)
        return archive.write(path)

    def flush(self) -> None:
        """Write the staged datasets that are not there yet."""
        self._write_pending()

    def _write_pending(self, *others: tuple[str, Path, int]) -> None:
        needs = [(name, self._data_dir, archive.nbytes) for name, archive in self._pending.values()]
        require_space([*needs, *others], self._disk_free)
        if self._pending:
            private_folder(self._data_dir)
        while self._pending:
            digest = next(iter(self._pending))
            self._pending[digest][1].write(self._path(digest))
            del self._pending[digest]

    def _path(self, digest: str) -> Path:
        return self._data_dir / f"{digest}.pt"
