"""The ``__main__`` of a rank: classes and functions of the notebook are bound there, as they are in the kernel.

Runs in the ranks (in the kernel too, where a run's model is rebuilt, with a namespace of its own). Pickles name the functions of this module, so they
keep their names. Standard library only.
"""

from __future__ import annotations

import builtins
import enum
import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_target: ModuleType | None = None
_GIVEN = {"__module__", "__doc__", "__qualname__", "__abstractmethods__", "_abc_impl"}


def new_main() -> ModuleType:
    """Return an empty module named ``__main__``, without the file and spec that would make a child process import them again."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    return module


def install_main() -> ModuleType:
    """Make a fresh module this process' ``__main__``; the one before was the launcher's, none of the user's business."""
    module = sys.modules["__main__"] = new_main()
    bind_into(module)
    return module


def bind_into(module: ModuleType | None) -> None:
    """Choose the module that unpickled classes and functions of the notebook are bound in; None: the process' ``__main__``."""
    global _target
    _target = module


def main_globals() -> dict[str, Any]:
    """Return the global namespace of the notebook's functions."""
    return (_target or sys.modules["__main__"]).__dict__


def main_module() -> ModuleType:
    """Return the module that stands for the notebook's ``__main__``."""
    return _target or sys.modules["__main__"]


def define(obj: Any, state: tuple[str | None, str, object, Callable[[Any, Any], object], Any]) -> None:
    """Complete a class or function rebuilt by value, and bind it to its name.

    ``state`` is (name in ``__main__`` or None, qualified name, the top-level class that a nested one belongs to, the setter, its argument).
    """
    name, qualified, _owner, setter, inner = state
    if name is not None:
        main_globals()[name] = obj
    if isinstance(obj, type):
        if _is_complete(obj, inner[0]):
            return
        obj.__qualname__ = qualified  # cloudpickle makes classes by their short name
    setter(obj, inner)


def cached_function(function: Callable[..., Any], parameters: dict[str, Any], name: str | None) -> Callable[..., Any]:
    """Rebuild a function decorated with `functools.lru_cache`, with an empty cache."""
    wrapper: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    if name is not None:
        main_globals()[name] = wrapper
    return wrapper


def cached_attribute(kind: type[functools.cached_property[Any]], function: Callable[[Any], Any], name: str) -> functools.cached_property[Any]:
    """Rebuild a `functools.cached_property`, which holds a lock until Python 3.12."""
    rebuilt = kind(function)
    rebuilt.__set_name__(object, name)
    return rebuilt


def _is_complete(cls: type, attributes: dict[str, object]) -> bool:
    """Whether ``cls`` was defined here before: a class that two archives hold, or the notebook's own in its kernel, is not to be overwritten."""
    own = attributes.keys() - _GIVEN
    return bool(own) and not issubclass(cls, enum.Enum) and own <= cls.__dict__.keys()
