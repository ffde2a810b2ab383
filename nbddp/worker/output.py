"""A rank's standard output and error go to its log file, whatever writes them: Python, C++ or a child process."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path


def redirect(path: Path) -> None:
    """Point file descriptors 0, 1 and 2 away from the supervisor's; Python's streams write whole lines."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc, assignment]  # final for those who do not redirect


def _stream(fd: int) -> TextIO:
    return os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
