"""Lambdas, local functions and replaced classes on the queues between a rank and its loader workers.

Runs in the ranks, once, before anything is unpickled.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from nbddp.bundle.pickler import dumps_by_value, is_importable


def install_forking_reducer() -> None:
    """Let `multiprocessing` send by value the classes and functions that can't be found by name.

    `ForkingPickler.register` would not do: the C pickler skips it for classes and functions.
    """
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment] # the hook that the C pickler calls, with the pickler as self


def _reduce(_pickler: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, (type, FunctionType)) and obj.__module__ != "builtins" and not is_importable(obj):
        return pickle.loads, (dumps_by_value(obj),)
    return NotImplemented
