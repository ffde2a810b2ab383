"""What can't be sent to another process although pickle would take it, or that pickle refuses without saying what to do.

Runs in the kernel, while objects are pickled.
"""

from __future__ import annotations

import io
import itertools
import socket
import sys
import threading
import types
import weakref
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from nbddp.bundle.pickler import is_importable

if TYPE_CHECKING:
    from collections.abc import Callable

_ELSEWHERE = "can't be sent to another process"
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
)
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_FILE_MODULES = {"_io", "io", "gzip", "bz2", "lzma", "zipfile", "tempfile"}


class Refused(Exception):
    """Raised while pickling, for the object at hand; the message goes on from its name."""


def type_name(obj: object) -> str:
    """Name the type as users know it, by the shortest module that has it: ``h5py.File``, not ``h5py._hl.files.File``."""
    cls = type(obj)
    if cls in _LOCKS[:2]:
        return f"threading.{'Lock' if cls is _LOCKS[0] else 'RLock'}"
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    parts = cls.__module__.split(".")
    modules = (".".join(parts[:count]) for count in range(1, len(parts)))
    home = next((module for module in modules if getattr(sys.modules.get(module), cls.__name__, None) is cls), cls.__module__)
    return f"{home}.{cls.__name__}"


def refusal_for(cls: type) -> Callable[[Any], str | None] | None:
    """Return the function that says why an object of this type is refused (or None: it is not), and None where nothing of the kind is."""
    if issubclass(cls, io.IOBase) and not issubclass(cls, (io.StringIO, io.BytesIO)):
        return _file
    if cls is types.FunctionType:
        return _function
    if issubclass(cls, torch.nn.Module):
        return _module
    if issubclass(cls, torch.Tensor):
        return _tensor
    for kinds, remedy in _REMEDIES:
        if issubclass(cls, kinds):
            return lambda obj: f"{type_name(obj)} {_ELSEWHERE}; {remedy}"
    if _is_h5py(cls):
        return lambda obj: f"{type_name(obj)} {_ELSEWHERE}; open it in __getitem__ (once per process), and keep only its path"
    if any(base.__name__ == "InteractiveShell" and base.__module__.partition(".")[0] == "IPython" for base in cls.__mro__):
        return lambda _: f"the notebook's shell {_ELSEWHERE}; leave get_ipython(), % magics and ! commands to the notebook: ranks run plain Python"
    return None


_REMEDIES: list[tuple[tuple[type, ...], str]] = [
    (_LOCKS, "create it where it is first used, or leave it out in __getstate__"),
    (_GENERATORS, "keep a list of its items, or the function that makes it"),
    ((threading.Thread, Executor), "start it where it is first used, or leave it out in __getstate__"),
    ((socket.socket,), "connect where it is first used (once per process), and keep only the address"),
    ((weakref.ref,), "keep the object itself, or leave it out in __getstate__"),
    ((torch.jit.ScriptFunction,), "use the Python function that it was made from"),
]


def refusal_in(model: torch.nn.Module, name: str) -> str | None:
    """Say which module or tensor of a model is refused, by its name, and why; None where none is. Without pickling, so that a plan can say it."""
    parts = itertools.chain(model.named_modules(), model.named_parameters(), model.named_buffers())
    for path, part in parts:
        if (reason := _module(part) if isinstance(part, torch.nn.Module) else _tensor(part)) is not None:
            where = "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in path.split(".") if step)
            return f"{name}{where}: {reason}"
    return None


def explain(obj: object, error: BaseException) -> str:
    """Say what pickle refused, for a type without a rule of its own."""
    reason = str(error) or type(error).__name__
    return f"{type_name(obj)} {_ELSEWHERE} ({reason}); create it where it is first used (once per process), or leave it out in __getstate__"


def _file(obj: io.IOBase) -> str | None:
    if type(obj).__module__ not in _FILE_MODULES:
        try:
            obj.fileno()
        except (OSError, ValueError, AttributeError):
            return None  # no file behind it: its own attributes decide
    name = getattr(obj, "name", None)
    which = f" ({name!r})" if isinstance(name, str) else ""
    return f"an open file{which} {_ELSEWHERE}; open it in __getitem__ (once per process), and keep only its path"


def _function(function: types.FunctionType) -> str | None:
    attributes = vars(function)
    if "_torchdynamo_orig_callable" in attributes and not attributes.get("_torchdynamo_disable") and not is_importable(function):
        return f"a function made by torch.compile {_ELSEWHERE}; use the function that it was made from"
    return None


def _module(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return f"a ScriptModule {_ELSEWHERE}; use the Python module that it was made from"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return f"{type(module).__name__} has no shapes yet, and every rank would make up its own; run one batch through it first"
    return None


def _tensor(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "a parameter without a shape yet, which every rank would make up by itself; run one batch through its module first"
    if tensor.is_meta:
        return "a tensor on the meta device holds no data; build it on the CPU, or use to_empty(device='cpu') and initialise it"
    return None


def in_graph(tensor: torch.Tensor) -> str:
    """Say why a tensor that an operation recorded by autograd made is refused: its history would be lost without a word."""
    how = tensor.grad_fn.name() if tensor.grad_fn is not None else "autograd"
    return f"a tensor that is part of an autograd graph ({how}) {_ELSEWHERE}; keep it detached: .detach()"


def _is_h5py(cls: type) -> bool:
    """Whether objects of the type hold an HDF5 handle. A subclass that says how to pickle it, as h5pickle's, is taken at its word."""
    if cls.__name__ == "Empty" or not any(_from_h5py(base) for base in cls.__mro__):
        return False
    own = [vars(base).keys() for base in cls.__mro__ if not _from_h5py(base) and base is not object]
    return not any(names & {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"} for names in own)


def _from_h5py(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "h5py"
