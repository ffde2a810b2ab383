"""Reading a file onto the CPU, and saying in words what is wrong with one that is no checkpoint. Nothing that a file carries is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbddp.checkpoint.writing import FORMAT, VERSION, first_line
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    Raises:
        CheckpointError: where the file is missing, incomplete, foreign, or holds more than tensors and plain types.
    """
    try:
        with _opened(path) as same:
            problem = _problem(same)
            content = torch.load(same, map_location="cpu", weights_only=weights_only, mmap=_is_zip(same)) if problem is None else None
    except FileNotFoundError:
        near = [other.name for other in path.parent.glob("*.pt")] if path.parent.is_dir() else []
        has = f"; {path.parent} has {', '.join(sorted(near))}" if near else ""
        problem = f"no checkpoint {path}{has}"
        raise CheckpointError(problem) from None
    except pickle.UnpicklingError as error:
        problem = _pickled(error)
        message = f"{path} {problem}"
        raise CheckpointError(message) from error
    except OSError as error:
        message = f"{path} can't be read: {error.strerror}"
        raise CheckpointError(message) from error
    except Exception as error:  # whatever the bytes of a file make of torch's reader
        message = f"{path} is not a complete checkpoint ({first_line(error)[:200]})"
        raise CheckpointError(message) from error
    if problem is not None:
        message = f"{path} {problem}"
        raise CheckpointError(message)
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}, not a checkpoint or a state dict"
        raise CheckpointError(message)
    if content.get("format") == FORMAT and content.get("version") != VERSION:
        version = content.get("version")
        remedy = ": update nbddp" if isinstance(version, int) and version > VERSION else ""
        message = f"{path} has version {version!r} of the schema; this nbddp reads version {VERSION}{remedy}"
        raise CheckpointError(message)
    return content


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
    return f"can't be read: it is {_kind(head, size)}, not a checkpoint"


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
            return kind
    if not head.strip(b"\0"):
        return "zeros, as a machine that went down may leave"
    if int.from_bytes(head[:8], "little") < size and head[8:9] == b"{":
        return "a safetensors file (safetensors.torch.load_file reads it, and model.load_state_dict takes what it holds)"
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
    return f"can't be read: it holds pickled objects beside tensors{what}; weights_only=False runs what they say, for files that you trust"


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
