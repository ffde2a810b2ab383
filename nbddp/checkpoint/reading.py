"""Reading a file onto the CPU, and saying in words what is wrong with one that is no checkpoint. Nothing that a file carries is run."""

from __future__ import annotations

import contextlib
import difflib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from nbddp.checkpoint import tensorfile
from nbddp.checkpoint.folder import SUFFIXES, part_of
from nbddp.checkpoint.misfit import readable
from nbddp.checkpoint.writing import FORMAT, VERSION, first_line
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LISTED = 8
_HEAD = 64
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_TORCH_BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that torch wrote before version 1.6."""
_KINDS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x93NUMPY": "a numpy array",
    b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched: git lfs pull",
}


def read(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU; its tensors are mapped, and read from the disk when they are used.

    Args:
        path: a file of torch or of safetensors, whatever its name.
        weights_only: refuse files that hold more than tensors and plain types; False runs whatever code the file carries.

    Returns:
        what the file holds; of safetensors a dict with `format`, `metadata` and `tensors`; of a pickled module its state dict.

    Raises:
        CheckpointError: where the file is missing, incomplete, foreign, or holds more than tensors and plain types.
    """
    try:
        with _opened(path) as same:
            problem = _problem(same)
            content = _content(same, weights_only=weights_only) if problem is None else None
    except FileNotFoundError:
        raise CheckpointError(_missing(path)) from None
    except pickle.UnpicklingError as error:
        problem = _pickled(error)
        message = f"{path} {problem}"
        raise CheckpointError(message) from error
    except SafetensorError as error:
        said = first_line(error).removeprefix("Error while deserializing header: ")
        message = f"{path} is not a complete checkpoint: it is a safetensors file that was cut off or damaged ({said[:120]})"
        raise CheckpointError(message) from error
    except OSError as error:
        message = f"{readable(path)} can't be read: {error.strerror}"
        raise CheckpointError(message) from error
    except Exception as error:  # whatever the bytes of a file make of torch's reader
        message = f"{path} is not a complete checkpoint ({first_line(error)[:200]})"
        raise CheckpointError(message) from error
    if problem is not None:
        parts = part_of(path) if "it is a text" in problem else ""
        message = f"{path} {problem}" + (f"; {parts}" if parts else "")
        raise CheckpointError(message)
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}, not a checkpoint or a state dict"
        raise CheckpointError(message)
    if content.get("format") == FORMAT and content.get("version") != VERSION:
        version = content.get("version")
        remedy = ": update nbddp" if isinstance(version, int) and version > VERSION else ""
        message = f"{path} has version {version!r} of the schema; this nbddp reads version {VERSION}{remedy}"
        raise CheckpointError(message)
    return content


def _content(path: Path, *, weights_only: bool) -> Any:
    if tensorfile.is_one(path):
        return tensorfile.read(path)
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=_is_zip(path))


def _missing(path: Path) -> str:
    """That a file is not there, and which checkpoints are where it was looked for, the nearest names first."""
    folder = path.parent
    names = sorted(other.name for other in _files(folder) if other.suffix in SUFFIXES and other.is_file())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.55) if len(names) > _LISTED else []
    listed = [*near, *(name for name in names if name not in near)]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"no checkpoint {path}" + (f"; {'the working directory' if folder == Path() else folder} has {', '.join(listed[:_LISTED])}{more}" if listed else "")


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not there, no folder, or not to be looked into
        return []


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Path]:
    """The file that the path names now: torch opens it a second time to map the tensors, and by then a run may have put the next one there."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for a writer
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _is_zip(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return zipfile.is_zipfile(path)
    return False


def _problem(path: Path) -> str | None:
    """What is wrong with a file that torch would not read, as far as its outside tells."""
    if not path.is_file():
        return "can't be read: it is not a file"
    size = path.stat().st_size
    if size == 0:
        return "is not a complete checkpoint: the file is empty"
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(_ZIP):
        return _zip_problem(path, size)
    if head.startswith(_TORCH_BEFORE_ZIP):
        return None
    return tensorfile.problem(head, size) if tensorfile.looks_like_one(head) else f"can't be read: it is {_kind(head, size)}"


def _zip_problem(path: Path, size: int) -> str | None:
    if not _is_zip(path):
        return f"is not a complete checkpoint: it is cut off after {size} bytes"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return "is not a complete checkpoint: the archive's directory is damaged"
    if not any(name.endswith("/data.pkl") for name in names):
        return f"can't be read: it is a zip archive that torch did not write ({', '.join(names[:3])}), not a checkpoint"
    if any("/code/" in name for name in names):
        return "can't be read: it is a program of TorchScript, not a checkpoint"
    return None


def _kind(head: bytes, size: int) -> str:
    for start, kind in _KINDS.items():
        if head.startswith(start):
            return kind if ":" in kind else f"{kind}, not a checkpoint"
    return f"{_unknown(head, size)}, not a checkpoint"


def _unknown(head: bytes, size: int) -> str:
    if not head.strip(b"\0"):
        return "zeros, as a machine that went down may leave"
    if head.startswith(_PICKLE):
        return "a pickle that torch did not write"
    with contextlib.suppress(UnicodeDecodeError):
        text = head.decode("utf-8") if size <= _HEAD else head[: _HEAD - 4].decode("utf-8")
        if all(character.isprintable() or character.isspace() for character in text):
            return f"a text that begins {text[:24]!r}"
    return f"something else, beginning with the bytes {head[:8].hex(' ')}"


def _pickled(error: pickle.UnpicklingError) -> str:
    text = str(error)
    if "truncated" in text:
        return "is not a complete checkpoint: its pickle is cut off"
    named = re.search(r"GLOBAL ([\w.]+)", text)
    what = f" ({named[1]})" if named else ""
    remedy = "nbddp.load_checkpoint(FILE, weights_only=False) runs what they say, for files that you trust"
    return f"can't be read: it holds pickled objects beside tensors{what}; {remedy}"


def check_bytes(path: Path) -> None:
    """Read all of a file and compare with the sums that were written along: a disk may lose what was complete once. Takes as long as reading takes.

    Raises:
        CheckpointError: names the first entry that is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # noqa: BLE001 - whatever damaged headers make of the reader: names, methods and sizes are read from them
        damaged = first_line(error)
    if damaged is not None:
        message = f"{path} is damaged: the bytes of {damaged} are not those that were written"
        raise CheckpointError(message)
