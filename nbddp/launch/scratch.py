"""The temporary folder of a supervisor: the sockets of multiprocessing, for the supervisor, its ranks and their loader workers.

Its name tells whose it is, so that whoever notices that a supervisor was killed can remove what it left. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from nbddp.process import ProcessId

_LONGEST_BASE = 50
"""The path of a Unix socket has at most 107 bytes, and names of ours and of multiprocessing's follow."""
_NAME = re.compile(r"^nbddp-(\d+)-(\d+)$")


def scratch(process: ProcessId) -> Path:
    """Where a supervisor keeps its temporary files."""
    base = tempfile.gettempdir()
    return Path(base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp") / f"nbddp-{process.pid}-{process.start}"


def make_scratch(process: ProcessId) -> Path:
    """Make the folder, and remove those of supervisors that are gone.

    Raises:
        FileExistsError: where the name is taken; nothing that another user put there is used.
    """
    folder = scratch(process)
    for path in folder.parent.glob("nbddp-*"):
        if (match := _NAME.match(path.name)) and not ProcessId(int(match[1]), int(match[2])).alive():
            remove_scratch(ProcessId(int(match[1]), int(match[2])))
    folder.mkdir(mode=0o700)
    return folder


def remove_scratch(process: ProcessId) -> None:
    """Remove the folder if it is there and ours."""
    shutil.rmtree(scratch(process), ignore_errors=True)
