"""Opens a bundle: the datasets, the model and the hooks as they were in the notebook.

Runs in the ranks, after `Interpreter.apply`; and in kernels that rebuild the model of a run. Imports no Jupyter.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp.bundle.archive import Archive
from nbddp.bundle.cells import install_sources
from nbddp.bundle.forking import install_forking_reducer
from nbddp.bundle.notebook_main import bind_into, install_main, new_main
from nbddp.bundle.reading import reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbddp.bundle.bundler import DataRef
    from nbddp.bundle.cells import CellSource


@dataclass
class Loaded:
    """What a rank works with, or a kernel that evaluates a run.

    Attributes:
        model: the user's module.
        hooks: by name.
        datasets: by role.
        cells: sources of the notebook cells that code came from, by file name.
    """

    model: Any
    hooks: dict[str, Any]
    datasets: dict[str, Any]
    cells: dict[str, CellSource]


def load(path: Path, data_dir: Path, refs: Sequence[DataRef], cells: dict[str, CellSource] | None = None) -> Loaded:
    """Open the bundle at ``path`` and the datasets ``refs`` in a rank, whose ``__main__`` becomes the notebook's.

    ``cells`` is given the sources of the cells before any of their code runs, so that what goes wrong in it can be placed.
    Memory is mapped copy-on-write: ranks and their loader workers share it until they write to it. Raises BundleError if a file is gone or foreign;
    what goes wrong in the user's own code (a missing module, a ``__setstate__``) is raised as it is, with a note that says in what.
    """
    install_main()
    install_forking_reducer()
    bundle = _Open(Archive.read(path), data_dir, {})
    install_sources(bundle.archive.cells)
    if cells is not None:
        cells.update(bundle.archive.cells)
    datasets = {}
    for ref in refs:
        with _Noting(ref.name):
            datasets[ref.role] = bundle.other(ref.hash).stream("dataset")
    with _Noting("the model"):
        model = bundle.stream("model")
    with _Noting("one of the hooks"):
        hooks = bundle.stream("hooks")
    return Loaded(model, hooks, datasets, bundle.archive.cells)


def load_model(path: Path) -> Any:
    """Rebuild only the model of the bundle at ``path``, in any process: names of this one's ``__main__`` are left alone."""
    with _apart(path, path.parent) as bundle:
        return bundle.stream("model")


def load_apart(path: Path, data_dir: Path) -> Loaded:
    """Rebuild the model and the hooks of the bundle at ``path``, in any process: names of this one's ``__main__`` are left alone.

    What the two share is shared. Datasets are opened only as far as hooks refer to them. Raises BundleError if a file that is needed is gone or foreign.
    """
    with _apart(path, data_dir) as bundle:
        with _Noting("the model", ""):
            model = bundle.stream("model")
        with _Noting("one of the hooks", ""):
            hooks = bundle.stream("hooks")
        return Loaded(model, hooks, {}, bundle.archive.cells)


@contextlib.contextmanager
def _apart(path: Path, data_dir: Path) -> Iterator[_Open]:
    """A bundle whose classes and functions are bound in a ``__main__`` of its own while it is unpickled."""
    archive = Archive.read(path)
    install_sources(archive.cells)
    bind_into(new_main())
    try:
        yield _Open(archive, data_dir, {})
    finally:
        bind_into(None)


class _Noting:
    """Adds to an exception what was being rebuilt."""

    def __init__(self, what: str, where: str = " on the rank") -> None:
        self._what, self._where = what, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            error.add_note(f"while {self._what} was rebuilt{self._where}")


class _Open:
    """An archive whose streams are unpickled on demand; archives that it refers to are opened once, in ``others``."""

    def __init__(self, archive: Archive, data_dir: Path, others: dict[str, _Open]) -> None:
        self.archive = archive
        self._data_dir = data_dir
        self._others = others
        self._storages = archive.storages()
        self._places: list[list[int]] = archive.places.tolist()
        self._streams: dict[str, tuple[Any, dict[int, Any]]] = {}

    def other(self, digest: str) -> _Open:
        if digest not in self._others:
            self._others[digest] = _Open(Archive.read(self._data_dir / f"{digest}.pt"), self._data_dir, self._others)
        return self._others[digest]

    def stream(self, name: str) -> Any:
        return self._unpickled(name)[0]

    def view(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """The storage and byte offset of a view."""
        archive, blob, offset = self._places[index]
        if blob < 0:
            return torch.UntypedStorage(0, device="cpu"), 0
        return self._numbered(archive)._storages[blob], offset

    def object(self, archive: int, index: int) -> Any:
        """An object of another stream, by its index in that stream's memo: pickler and unpickler count alike."""
        return self._numbered(archive)._unpickled("dataset" if archive else "model")[1][index]

    def _numbered(self, archive: int) -> _Open:
        return self.other(self.archive.archives[archive - 1]) if archive else self

    def _unpickled(self, name: str) -> tuple[Any, dict[int, Any]]:
        if name not in self._streams:
            unpickler = _Unpickler(self.archive.streams[name], self)
            with reading(self):
                root = unpickler.load()
            self._streams[name] = root, unpickler.memo.copy()
        return self._streams[name]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: torch.Tensor, archive: _Open) -> None:
        super().__init__(io.BytesIO(stream.numpy().data))
        self._archive = archive

    def persistent_load(self, pid: tuple[int, int]) -> Any:
        return self._archive.object(*pid)
