"""Tracebacks in the manner of IPython: the lines of cells with what is around them, and the tensors of the frame that failed."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nbddp.evaluation import step
from nbddp.evaluation.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from nbddp.bundle import CellSource

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_WORKER = re.compile(r"^Caught .+ in DataLoader worker process (?P<worker>\d+)\.$")
_WORKER_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_MAX_TENSORS = 12
_MAX_FRAMES = 12


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a traceback; `frame` is None where it was read from the words of a loader worker."""

    file: str
    line: int
    name: str
    frame: FrameType | None = None

    @property
    def foreign(self) -> bool:
        """Neither ours nor torch's: the user's own code, or a library that the user called."""
        return not self.file.startswith((_OURS, _TORCH)) and not self.file.startswith("<frozen")


def error_places(error: BaseException) -> list[Place]:
    """The lines of an exception's traceback, outermost first; of one from a loader worker, those in that worker come last."""
    places, tb = [], error.__traceback__
    while tb is not None:
        places.append(Place(tb.tb_frame.f_code.co_filename, tb.tb_lineno, tb.tb_frame.f_code.co_name, tb.tb_frame))
        tb = tb.tb_next
    return places + _in_worker(error)[1]


def message_of(error: BaseException) -> str:
    """What the exception says; of one from a loader worker, what it said there."""
    said = _in_worker(error)[0]
    return _text(error) if said is None else said


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the exception's own `__str__`, which is user code
        return f"<no text: __str__ of {type(error).__name__} fails>"


def _in_worker(error: BaseException) -> tuple[str | None, list[Place]]:
    """Message and lines of an exception that a loader worker raised: torch sends its traceback as the text of the message."""
    lines = _text(error).splitlines()
    if not lines or (caught := _WORKER.match(lines[0])) is None:
        return None, []
    found = [(index, match) for index, line in enumerate(lines) if (match := _WORKER_LINE.match(line))]
    if not found:
        return None, []
    places = [Place(match["file"], int(match["line"]), match["name"]) for _, match in found]
    rest = [line for line in lines[found[-1][0] + 1 :] if not line.startswith("    ")]
    said = "\n".join(rest).strip().removeprefix(f"{type(error).__name__}: ")
    return f"{said} (in loader worker {caught['worker']} of this rank)", places


def render(error: BaseException, cells: Mapping[str, CellSource]) -> str:
    """The traceback of an exception without our frames and torch's, causes first, the tensors of the failing frame last."""
    parts: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and not isinstance(error, StepError):
        parts += [render(cause, cells), "", "The above exception led to:", ""]
    places = error_places(error)
    shown = [place for place in places if place.foreign]
    if shown and not places[-1].foreign:
        shown.append(places[-1])  # where the library stood that the user's code called
    for place in shown[-_MAX_FRAMES:]:
        parts += _lines(place, cells)
    said = _in_worker(error)[0]
    parts += traceback.format_exception_only(type(error), error) if said is None else [f"{type(error).__name__}: {said}"]
    frames = [place.frame for place in shown if place.foreign and place.frame is not None]
    # A `loss` is called by a step of ours: where it meets shapes that it can't take, those are the step's.
    frames = frames or [place.frame for place in places if place.frame is not None and place.file == step.__file__]
    if frames and (tensors := _tensors(frames[-1])):
        parts += ["", f"tensors in {frames[-1].f_code.co_name}:", *tensors]
    return "\n".join(part.rstrip("\n") for part in parts)


def _lines(place: Place, cells: Mapping[str, CellSource]) -> list[str]:
    if place.file not in cells:
        return [f"File {_short(place.file)}:{place.line}, in {place.name}", f"     {place.line:4d} {linecache.getline(place.file, place.line).rstrip()}"]
    cell = cells[place.file]
    lines = cell.source.splitlines()
    label = "Cell" if cell.cell is None else f"Cell In[{cell.cell}]"
    around = range(max(1, place.line - 2), min(len(lines), place.line + 2) + 1)
    marked = (f"{'---->' if number == place.line else '     '} {number:3d} {lines[number - 1]}" for number in around)
    return [f"{label}, line {place.line}, in {place.name}", *marked]


def _short(file: str) -> str:
    """A path as it is imported or as it stands beside the notebook: a saved notebook tells nothing of the machine's folders."""
    folders = [folder for folder in {str(Path.cwd()), *sys.path} if folder and file.startswith(folder.rstrip("/") + "/")]
    return file[len(max(folders, key=len).rstrip("/")) + 1 :] if folders else file


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
