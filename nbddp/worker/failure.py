"""What a rank writes down about the exception that ends it."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nbddp.worker.errors import ReplicasDiffer, StepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbddp.bundle import CellSource

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_COLLECTIVE = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|Connection (closed|reset) by peer|Broken pipe|Timed out waiting|Socket Timeout", re.IGNORECASE)
_WORKER_LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_MAX_TENSORS = 12
_MAX_FRAMES = 12


def failure_record(error: BaseException, cells: Mapping[str, CellSource], phase: str) -> dict[str, Any]:
    """The data of a `failed` event: type, message, traceback without our frames, cell and line, and what kind of failure it is."""
    file, cell, line = _place(error, cells)
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "traceback": render(error, cells),
        "cell": cell,
        "line": line,
        "file": file,
        "phase": phase,
        "collective": is_collective(error),
        "oom": isinstance(error, torch.OutOfMemoryError),
        "replicas": isinstance(error, ReplicasDiffer),
        "about_rank": error.rank if isinstance(error, ReplicasDiffer) else None,
        "exit_code": _exit_code(error),
    }


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the step called sys.exit({'' if error.code is None else repr(error.code)})"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{error}{_memory()}"
    return str(error)


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
    """Whether the exception says that another rank is gone rather than that this one is wrong."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, ReplicasDiffer) and bool(_COLLECTIVE.search(str(error)))


def _frames(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def _foreign(frame: FrameType) -> bool:
    """Not ours and not torch's: the user's own code, or a library that the user called."""
    name = frame.f_code.co_filename
    return not name.startswith((_OURS, _TORCH)) and not name.startswith("<frozen")


def _place(error: BaseException, cells: Mapping[str, CellSource]) -> tuple[str | None, int | None, int | None]:
    """File, cell and line of the failure: the innermost line of a cell, else the innermost line of the user's code."""
    places = [(frame.f_code.co_filename, line) for frame, line in _frames(error.__traceback__) if _foreign(frame)]
    places += [(match["file"], int(match["line"])) for match in _WORKER_LINE.finditer(str(error)) if "DataLoader worker" in str(error)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append((error.filename, error.lineno or 1))
    for file, line in reversed(places):
        if file in cells:
            return file, cells[file].cell, line
    return (places[-1][0], None, places[-1][1]) if places else (None, None, None)


def render(error: BaseException, cells: Mapping[str, CellSource]) -> str:
    """The traceback in the manner of IPython, with causes first and the tensors of the failing frame last."""
    parts = []
    if (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None and not isinstance(error, StepError):
        parts += [render(cause, cells), "", "The above exception led to:", ""]
    frames = list(_frames(error.__traceback__))
    first = next((index for index, (frame, _) in enumerate(frames) if _foreign(frame)), len(frames))
    shown = frames[first:]
    shown = [(frame, line) for frame, line in shown if _foreign(frame) or frame is frames[-1][0]]
    for frame, line in shown[-_MAX_FRAMES:]:
        parts += _frame_lines(frame, line, cells)
    parts += traceback.format_exception_only(type(error), error)
    user = [frame for frame, _ in shown if _foreign(frame)]
    if user and (tensors := _tensors(user[-1])):
        parts += ["", f"tensors in {user[-1].f_code.co_name}:", *tensors]
    return "\n".join(part.rstrip("\n") for part in parts)


def _frame_lines(frame: FrameType, line: int, cells: Mapping[str, CellSource]) -> list[str]:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file not in cells:
        return [f"File {file}:{line}, in {name}", f"     {line:4d} {linecache.getline(file, line).rstrip()}"]
    cell = cells[file]
    lines = cell.source.splitlines()
    label = "Cell" if cell.cell is None else f"Cell In[{cell.cell}]"
    around = range(max(1, line - 2), min(len(lines), line + 2) + 1)
    return [f"{label}, line {line}, in {name}", *(f"{'---->' if number == line else '     '} {number:3d} {lines[number - 1]}" for number in around)]


def _tensors(frame: FrameType) -> list[str]:
    """Shapes, dtypes and devices of the tensors among a frame's variables."""
    found = []
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.Tensor):
            found.append(f"    {name}: {_described(value)}")
        elif isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
            found.append(f"    {name}: [{', '.join(_described(item) for item in value[:4])}{', ...' if len(value) > 4 else ''}]")
    return found[:_MAX_TENSORS]


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
