"""Names of run directories: when a run was made, what it is called, and four characters that are its own.

Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_TAIL = "23456789abcdefghijkmnpqrstuvwxyz"
"""In the order in which characters sort: an id ends with two for the millisecond, and two at random."""
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-(.+)-[a-z0-9]{4}")
_LETTERS = 32

_last_millisecond = 0


def _next_millisecond() -> int:
    """Now in unix milliseconds, but never the same twice in this process: names of runs sort in the order of their making."""
    global _last_millisecond
    _last_millisecond = max(time.time_ns() // 1_000_000, _last_millisecond + 1)
    return _last_millisecond


def new_folder(root: Path, name: str) -> Path:
    """Make the folder of a new run; in plain letters where the file system, or the locale, takes no others.

    Raises:
        OSError: where it can't be made.
    """
    try:
        return _made(root, slug(name))
    except (UnicodeEncodeError, OSError) as error:
        if not (isinstance(error, UnicodeEncodeError) or error.errno in (errno.EILSEQ, errno.EINVAL)):
            raise
        return _made(root, slug(name.encode("ascii", "ignore").decode()))


def slug(name: str) -> str:
    """A name as part of a folder's: letters, marks and digits of any script, and underscores."""
    plain = unicodedata.normalize("NFC", name.lower())
    kept = "".join(letter if _of_a_word(letter) else "_" for letter in plain)
    return re.sub("_+", "_", kept).strip("_")[:_LETTERS].rstrip("_") or "run"


def _of_a_word(letter: str) -> bool:
    return letter.isalnum() or unicodedata.category(letter).startswith("M")


def is_id(name: str) -> bool:
    """Whether a folder is named as runs are."""
    found = _ID.fullmatch(name)
    return found is not None and all(map(_of_a_word, re.sub("[-_]", "", found[1])))


def _made(root: Path, slug: str) -> Path:
    """A new folder of that name."""
    while True:
        second, milliseconds = divmod(_next_millisecond(), 1000)
        tail = _TAIL[milliseconds // 32] + _TAIL[milliseconds % 32] + secrets.choice(_TAIL) + secrets.choice(_TAIL)
        path = root / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(second))}-{slug}-{tail}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
