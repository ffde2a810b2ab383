"""A pickler for what a notebook defines: cloudpickle, with file names, globals and ``__main__`` kept.

Runs in the kernel over whole archives, and in ranks and loader workers over what a loader's queue carries. cloudpickle's own reducers are used through
their results only: `Pickler.dispatch_table`, `Pickler.globals_ref`, and the six-tuples returned for classes and functions (cloudpickle 3.0 to 3.1).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from types import CodeType, FunctionType, ModuleType
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from nbddp.bundle import notebook_main

if TYPE_CHECKING:
    from collections.abc import Callable

CACHED = type(functools.lru_cache(len))
_reduce_code: Callable[[CodeType], tuple[Callable[..., CodeType], tuple[Any, ...]]] = cloudpickle.Pickler.dispatch_table[CodeType]


class MainGlobals(dict[str, Any]):
    """Stands for ``__main__``'s namespace in a pickle. Not empty: cloudpickle fills an empty one with module attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return notebook_main.main_globals, ()


class NotebookPickler(cloudpickle.Pickler):
    """Pickles classes and functions of ``main`` by value, to be bound in the reader's ``__main__``.

    Attributes:
        filenames: file names of the code objects pickled so far.
    """

    def __init__(self, file: IO[bytes], *, main: ModuleType) -> None:
        super().__init__(file)
        self.main = main
        self.filenames: set[str] = set()
        # Functions with the same globals share them after loading as well, across archives.
        self.globals_ref[id(main.__dict__)] = MainGlobals(__name__="__main__")

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions, classes, code and the process' own singletons; leave the rest to `pickle`."""
        if isinstance(obj, CodeType):
            self.filenames.add(obj.co_filename)
            return code_named, (obj.co_filename, *_reduce_code(obj))
        if isinstance(obj, (type, FunctionType)):
            _import_home(obj)
            reduced = super().reducer_override(obj)
            if isinstance(reduced, tuple) and len(reduced) == 6:
                make, args, state, _, _, setter = reduced
                return make, args, (self.name_in_main(obj), obj.__qualname__, self._owner(obj), setter, state), None, None, notebook_main.define
            return reduced
        if isinstance(obj, CACHED) and obj.__module__ == "__main__":
            return notebook_main.cached_function, (obj.__wrapped__, obj.cache_parameters(), self.name_in_main(obj))
        if isinstance(obj, functools.cached_property):
            return notebook_main.cached_attribute, (type(obj), obj.func, obj.attrname)
        return reduce_singleton(obj)

    def name_in_main(self, obj: Any) -> str | None:
        """The name that ``obj`` is to be bound to; None for what is nested, or was replaced by running its cell again."""
        name: str = obj.__qualname__
        if obj.__module__ != "__main__" or not name.isidentifier():
            return None
        return name if self.main.__dict__.get(name, obj) is obj else None

    def _owner(self, obj: Any) -> object:
        """The top-level class around a nested one: without it, the nested one could not be found by its qualified name."""
        if obj.__module__ != "__main__" or not isinstance(obj, type):
            return None
        head, *rest = obj.__qualname__.split(".")
        owner = found = self.main.__dict__.get(head)
        for part in rest:
            found = getattr(found, part, None)
        return owner if rest and found is obj else None


def _import_home(obj: type | FunctionType) -> None:
    """Import the module that ``obj`` says it is from, as `pickle` does; cloudpickle takes what is not imported yet (numpy.rec, say) for made at run time."""
    home: object = getattr(obj, "__module__", None)  # anything that its author liked
    if isinstance(home, str) and home not in sys.modules:
        with contextlib.suppress(ImportError, ValueError):
            importlib.import_module(home)


def code_named(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    """Rebuild a code object under the file name that it was compiled with."""
    return make(*args).replace(co_filename=filename)


def is_importable(obj: type | FunctionType) -> bool:
    """Whether a reader finds this very object by module and qualified name, ``__main__`` included."""
    found: object = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def dumps_by_value(obj: object) -> bytes:
    """Pickle a class or function of this process' ``__main__`` by value."""
    buffer = io.BytesIO()
    NotebookPickler(buffer, main=notebook_main.main_module()).dump(obj)
    return buffer.getvalue()


def reduce_singleton(obj: Any) -> Any:
    """Reduce to a reference what every process has one of: the environment, which by value would end up on the disk, and the standard streams."""
    if isinstance(obj, type(os.environ)):
        for name in ("environ", "environb"):
            if obj is getattr(os, name, None):
                return getattr, (os, name)
    elif isinstance(obj, io.TextIOBase):
        for name in ("stdout", "stderr"):
            if obj is getattr(sys, name) or obj is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
    return NotImplemented
