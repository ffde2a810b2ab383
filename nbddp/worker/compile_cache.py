"""Where compiled code is kept: a folder for each rank, on a disk of this machine, that only this user can write to.

One for each rank, since ranks that compile at once would lock each other out of a common one; kept between runs, so that the next run finds it warm.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from nbddp.evaluation.errors import StepError

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "lustre", "gpfs", "beegfs", "pvfs2", "orangefs", "panfs", "ocfs2", "gfs2", "ceph"),
        *("glusterfs", "wekafs", "fhgfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs", "fuse.s3fs", "fuse.rclone", "fuse.weka"),
    }
)
"""Types of file systems, as /proc/self/mountinfo names them, whose files lie on other machines."""


def rank_folder(given: Path | None, rank: int) -> Path:
    """Make the folder of a rank.

    Args:
        given: `compile_cache_dir`; None is the folder that TORCHINDUCTOR_CACHE_DIR names, else one of this user under the temporary folder.
        rank: of the run.

    Raises:
        StepError: where `given` can't be written to.
    """
    named = given or (Path(variable) if (variable := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) else None)
    if named is None:
        folder = _own_folder(_temporary() / f"nbddp-compiled-{os.getuid()}") / f"rank-{rank}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    folder = named.expanduser().absolute() / f"rank-{rank}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        message = f"compile_cache_dir={named}: {error.strerror or error}; it must be a folder that can be written to, or leave it out"
        raise StepError(message) from error
    return folder


def _temporary() -> Path:
    """The user's temporary folder: tempfile's own is one of this run in ranks, and goes with it."""
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return next((Path(place) for place in (*named, "/tmp", "/var/tmp") if os.access(place, os.W_OK | os.X_OK)), Path(tempfile.gettempdir()))


def _own_folder(wanted: Path) -> Path:
    """The folder if it is this user's alone, else a new one: code is run from it, and in a common temporary folder anybody could have made it."""
    wanted.mkdir(mode=0o700, exist_ok=True)
    status = wanted.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return wanted
    return Path(tempfile.mkdtemp(prefix=f"{wanted.name}-", dir=wanted.parent))


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that a path lies on, as in ``ext4``; empty where it can't be told.

    `mounts` is the text of /proc/self/mountinfo (see proc(5)).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return ""
    path = path.resolve()
    found, depth = "", -1
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(point) and len(point.parts) >= depth:  # of two at one point the later one lies on top
            found, depth = after.split()[0], len(point.parts)
    return found
