"""The runs that a call or a line names, in whichever way: runs, ids, directories, tables of runs.

Runs in the kernel; imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbddp.errors import ConfigError
from nbddp.kernel.entry import RunEntry
from nbddp.kernel.run import Run
from nbddp.kernel.table import RunTable
from nbddp.rundir import RunDir, find_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def chosen(given: Iterable[object], root: Path, *, by: str) -> dict[Path, RunDir]:
    """Each run once, by its directory, in the order in which they were given.

    Args:
        given: runs, their ids (or a part of one) or directories, entries and tables of runs, or lists of these.
        root: where ids are looked for.
        by: who asks, for the message.

    Raises:
        ConfigError: for what names no run, or several.
    """
    return {run.path.resolve(): run for run in _each(given, root, by)}


def _each(given: Iterable[object], root: Path, by: str) -> Iterator[RunDir]:
    for item in given:
        if isinstance(item, list | tuple | RunTable):
            yield from _each(item, root, by)
        elif isinstance(item, Run):
            yield item.files
        elif isinstance(item, RunEntry):
            yield RunDir(item.dir)
        elif isinstance(item, str | Path):
            yield find_run(item, root)
        else:
            message = f"{by} takes runs, ids and directories of runs, and tables of runs, not a {type(item).__name__}"
            raise ConfigError(message)
