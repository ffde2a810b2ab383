"""Whether what is to be written fits on the disk, asked before the first byte.

Runs in the kernel.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# For events, logs and the file system's own needs.
MARGIN = 64 << 20


def disk_free(folder: Path) -> int:
    """Free bytes on the file system of ``folder``."""
    return shutil.disk_usage(folder).free


def require_space(needs: Iterable[tuple[str, Path, int]], free: Callable[[Path], int] = disk_free) -> None:
    """Raise BundleError unless all of ``needs`` (what, folder, bytes) fit, with a margin; folders need not exist yet."""
    wanted: dict[int, list[tuple[str, Path, int]]] = {}
    for what, folder, nbytes in needs:
        wanted.setdefault(_existing(folder).stat().st_dev, []).append((what, folder, nbytes))
    for entries in wanted.values():
        total = sum(nbytes for _, _, nbytes in entries) + MARGIN
        folder = entries[0][1]
        available = free(_existing(folder))
        if available < total:
            names = ", ".join(what for what, _, _ in entries)
            message = (
                f"{names}: needs {_size(total)} in {folder}, {_size(available)} free; free some with nbddp.prune(), or choose another place with --run-root"
            )
            raise BundleError(message)


def _existing(folder: Path) -> Path:
    absolute = Path(folder).absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 0.1 * 2**30 else f"{nbytes / 2**20:.1f} MiB"
