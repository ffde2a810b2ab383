"""Files that are complete whenever they are there: a temporary name, fsync, rename. Whoever is killed while writing leaves the file before."""

from __future__ import annotations

import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import torch

from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "nbddp.checkpoint"
VERSION = 1


def write(path: Path, content: dict[str, Any]) -> int:
    """Write a checkpoint so that `path` always holds a complete one; return its size in bytes.

    Raises:
        CheckpointError: where it can't be written; says why, and what was there stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):  # torch's writer makes a RuntimeError of a full disk
            message = f"the checkpoint {path} can't be written: {first_line(error)}; what was written before stays"
            raise CheckpointError(message) from error
        raise
    return size


def first_line(error: BaseException) -> str:
    """What an error says, without the traces that torch appends."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def link(source: Path, target: Path) -> None:
    """Let `target` be the same file as `source`, replacing what was there; copied where links are not to be had."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            temporary.touch(0o600)
            shutil.copyfile(source, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_unfinished(folder: Path) -> None:
    """Delete what writers left behind that were killed while they wrote."""
    for path in folder.glob(".*.pt.*"):
        path.unlink(missing_ok=True)
