"""Finds the path from a name in the notebook to an object inside: ``train_set.transforms[2].lock``.

Runs in the kernel, after pickling failed. Standard library and torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Mapping, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ATOMS = (str, bytes, bytearray, int, float, complex, type(None), CodeType, ModuleType, BuiltinFunctionType, torch.dtype, torch.device)
LIMIT = 2_000_000
LONGEST = 120


def find_path(names: Mapping[str, object], wanted: Sequence[object]) -> str:
    """Return the shortest path to the last object of ``wanted``; if that was made on the fly, to the latest before it that can be reached, or the first name.

    ``wanted`` is in the order of pickling, in which a class and its methods come between an object and its parts: they stand in for nothing.
    """
    last = len(wanted) - 1
    rank = {id(obj): position for position, obj in enumerate(wanted) if position == last or not isinstance(obj, (type, FunctionType))}
    best, path = -1, next(iter(names), "bundle")
    seen: dict[int, object] = {}
    queue: deque[tuple[str, object]] = deque(names.items())
    while queue and len(seen) < LIMIT:
        where, obj = queue.popleft()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        position = rank.get(id(obj), -1)
        if position > best:
            best, path = position, where
            if position == last:
                break
        queue.extend((_join(where, step), child) for step, child in _children(obj) if not isinstance(child, ATOMS))
    return path if len(path) <= LONGEST else f"{path[: LONGEST - 30]}...{path[-30:]}"


def _join(where: str, step: str) -> str:
    return where + step if step.startswith((".", "[", " ", "(")) or not step else f"{where}.{step}"


def _children(obj: object) -> Iterator[tuple[str, object]]:
    """The steps that lead on from an object, by what a user would write; " -> name" for what functions and classes refer to."""
    if isinstance(obj, Mapping):
        with contextlib.suppress(RuntimeError):
            yield from ((f"[{key!r}]", value) for key, value in list(obj.items()))
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        yield from zip(obj._fields, obj, strict=False)
    elif isinstance(obj, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(obj))
    elif isinstance(obj, Set):
        yield from (("[...]", item) for item in obj)
    elif isinstance(obj, np.ndarray) and obj.dtype == object:
        yield from ((f"[{', '.join(map(str, index))}]", item) for index, item in np.ndenumerate(obj))
    if isinstance(obj, FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, MethodType):
        yield from ((".__self__", obj.__self__), ("", obj.__func__))
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, type):
        yield from _of_class(obj)
    elif isinstance(obj, (property, classmethod, staticmethod)):
        yield from (("", getattr(obj, name, None)) for name in ("fget", "fset", "fdel", "__func__"))
    else:
        yield from _of_instance(obj)


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    with contextlib.suppress(ValueError):  # a closure variable that is not set yet
        variables = inspect.getclosurevars(function)
        for found in (variables.nonlocals, variables.globals):
            yield from ((f" -> {name}", value) for name, value in found.items())
    for code in _nested_code(function.__code__):
        yield from ((f" -> {name}", function.__globals__[name]) for name in code.co_names if name in function.__globals__)
    yield from ((f".{name}", value) for name, value in vars(function).items())
    names = list(inspect.signature(function).parameters.values()) if function.__defaults__ or function.__kwdefaults__ else []
    yield from ((f"({parameter.name}=...)", parameter.default) for parameter in names if parameter.default is not parameter.empty)


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_code(constant)


def _of_class(cls: type) -> Iterator[tuple[str, object]]:
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        yield from ((f".{name}", value) for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__"))
        yield from (("", base) for base in cls.__bases__)


def _of_instance(obj: object) -> Iterator[tuple[str, object]]:
    attributes: dict[str, Any] = getattr(obj, "__dict__", None) or {}
    if isinstance(obj, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            yield from ((f"[{name}]" if name.isdigit() else f".{name}", value) for name, value in attributes.get(group, {}).items())
    yield from ((f".{name}", value) for name, value in list(attributes.items()))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield f".{name}", getattr(obj, name)
    if type(obj).__module__ == "__main__" or "<locals>" in type(obj).__qualname__:
        yield f" -> {type(obj).__name__}", type(obj)
    if not attributes and not isinstance(obj, (torch.Tensor, np.ndarray, Mapping, list, tuple, Set)):
        # Objects of extension types show their parts in what pickle makes of them.
        with contextlib.suppress(Exception):
            reduced = obj.__reduce_ex__(4)
            if isinstance(reduced, tuple):
                yield from (("", part) for part in reduced[1:3])
