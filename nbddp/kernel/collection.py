"""Python's garbage collector, kept from stopping all threads of the kernel for what one of them does.

A full collection looks at everything that the kernel holds, a tenth of a second where torch is loaded, and nothing else runs meanwhile. One is due when
there are a quarter more objects than at the last, such as by an import. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BLOCKS = 5_000_000
"""Blocks of memory in use up to which a full collection takes a fraction of a second; beyond, one by itself is rare."""
_lock = threading.Lock()
_pausing = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """Collect nothing by itself meanwhile, in any thread; afterwards it is as it was."""
    global _pausing, _was_enabled
    with _lock:
        if _pausing == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pausing += 1
    try:
        yield
    finally:
        with _lock:
            _pausing -= 1
            if _pausing == 0 and _was_enabled:
                gc.enable()


def settle() -> None:
    """Count all objects as old ones, such as those of an import: they stay, and are no reason for a full collection."""
    if not gc.get_freeze_count():  # what somebody froze is to stay so
        gc.freeze()
        gc.unfreeze()


def ahead() -> None:
    """Do the full collection that may be due, such as after the user's imports, now that the main thread waits anyway, and not when a run is followed."""
    if gc.isenabled() and gc.get_count()[2] and sys.getallocatedblocks() < MOST_BLOCKS:
        gc.collect()
