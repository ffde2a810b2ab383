"""What a rank writes down about the exception that ends it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbddp.contents import MESSAGE_LETTERS, MESSAGE_LINES, TRACEBACK_LETTERS, TRACEBACK_LINES
from nbddp.visible import excerpt
from nbddp.worker.errors import ReplicasDiffer
from nbddp.worker.trace import Place, error_places, message_of, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbddp.bundle import CellSource

_TRANSPORT = re.compile(r"\bgloo/|\bProcessGroup(Gloo|NCCL|Wrapper)?\b|\bNCCL error\b|\bTCPStore\b|c10d")
_WORKER_GONE = re.compile(r"DataLoader worker \(pid.+\) (is killed by signal|exited unexpectedly)")
"""torch notices a loader worker's end by a signal, and raises wherever the rank is at that moment."""
_LOST = re.compile(r"Connection (was )?(closed|reset|refused) by peer|Broken pipe|Timed out waiting|Socket Timeout|timeout caused pair closure", re.IGNORECASE)


NAME_LETTERS = 150
MARGIN = 400
"""Letters that may come to a message, such as the words for its rank, until it is shown."""


def failure_record(error: BaseException, cells: Mapping[str, CellSource], phase: str) -> dict[str, Any]:
    """The data of a `failed` event: type, message, traceback without our frames, cell and line, and what kind of failure it is."""
    place = _place(error, cells)
    cell = None if place is None or place.file not in cells else cells[place.file].cell
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "traceback": render(error, cells),
        "cell": cell,
        "line": None if place is None else place.line,
        "file": None if place is None else place.file,
        "phase": phase,
        "collective": is_collective(error),
        "oom": isinstance(error, torch.OutOfMemoryError),
        "replicas": isinstance(error, ReplicasDiffer),
        "about_rank": error.rank if isinstance(error, ReplicasDiffer) else None,
        "exit_code": _exit_code(error),
    }


def shortened(record: dict[str, Any], log: Path) -> dict[str, Any]:
    """The record with head and tail of what is long in it: a message may be of any length, and is repeated in results, cards and notebooks."""
    whole = f"{log.parent.name}/{log.name}"
    return {
        **record,
        "type": excerpt(record["type"], letters=NAME_LETTERS, lines=2),
        "message": excerpt(record["message"], letters=MESSAGE_LETTERS - MARGIN, lines=MESSAGE_LINES - 2, whole=whole),
        "traceback": excerpt(record["traceback"], letters=TRACEBACK_LETTERS - MARGIN, lines=TRACEBACK_LINES - 2, whole=whole),
    }


def _message(error: BaseException) -> str:
    if _WORKER_GONE.search(text := message_of(error)):
        return f"{text.rstrip('. ')}; if memory was short, the kernel's out-of-memory killer did it: fewer loader workers, or a smaller prefetch_factor"
    if isinstance(error, SystemExit):
        return f"the step called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{error}{_memory()}"
    return message_of(error)


def _memory() -> str:
    """Figures that say how much memory was there, and what to change."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    return (
        f"\nthis rank's peak {peak / 2**30:.1f} GiB, free {free / 2**30:.1f} of {total / 2**30:.1f} GiB: "
        "a smaller --batch-size, or the same batch with --accumulate 2, or more ranks"
    )


def _exit_code(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def is_collective(error: BaseException) -> bool:
    """Whether the exception says that another rank is gone rather than that this one is wrong.

    An error of a transport library names it; one that only says that a connection was lost counts where torch raised it, not the user's code.
    """
    if isinstance(error, torch.distributed.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, ReplicasDiffer):
        return False
    text = message_of(error)
    places = error_places(error)
    in_user_code = bool(places) and places[-1].foreign
    return bool(_TRANSPORT.search(text)) if in_user_code else bool(_TRANSPORT.search(text) or _LOST.search(text))


def _place(error: BaseException, cells: Mapping[str, CellSource]) -> Place | None:
    """Where the failure is: the innermost line of a cell, else the innermost line of the user's code."""
    if _WORKER_GONE.search(message_of(error)):
        return None
    places = [place for place in error_places(error) if place.foreign]
    if not places and error.__cause__ is not None:  # StopIteration reaches us as what a generator made of it
        return _place(error.__cause__, cells)
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append(Place(error.filename, error.lineno or 1, Path(error.filename).name))
    best = [place for place in places if place.file in cells] or places
    return best[-1] if best else None
