"""Where compiled code is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from nbddp.evaluation.errors import StepError
from nbddp.worker.compile_cache import NETWORK, file_system, rank_folder

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
24 23 0:22 / /home/with\040space rw - lustre 10.0.0.1@tcp:/scratch rw
25 22 0:23 / /tmp rw - tmpfs tmpfs rw
26 25 0:24 / /tmp rw - xfs /dev/sdb1 rw
27 22 0:25 / /mnt/data rw,nosuid shared:3 master:4 - fuse.sshfs me@host:/ rw
"""


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """A temporary folder for everybody, with nothing in it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of this run"))  # as in ranks
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/usr/lib", "ext4"),
        ("/home/me/cache", "nfs4"),
        ("/homes", "ext4"),
        ("/home/with space/cache", "lustre"),
        ("/tmp/nbddp", "xfs"),
        ("/mnt/data", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path(path, kind):
    assert file_system(Path(path), MOUNTS) == kind
    assert (kind in NETWORK) == (kind in ("nfs4", "lustre", "fuse.sshfs"))


def test_of_this_machine(tmp_path):
    assert file_system(tmp_path) not in ("", *NETWORK)
    assert file_system(tmp_path, "") == ""


def test_a_folder_of_this_user_alone_for_each_rank(tmp):
    folders = [rank_folder(None, rank) for rank in (0, 1)]
    assert [folder.name for folder in folders] == ["rank-0", "rank-1"]
    assert folders == [rank_folder(None, rank) for rank in (0, 1)]
    assert folders[0].parent.parent == tmp
    assert {folder.stat().st_mode & 0o777 for folder in (*folders, folders[0].parent)} == {0o700}


@pytest.mark.parametrize("how", ["others may write", "a link"])
def test_a_folder_that_is_not_this_user_s_alone_is_left(tmp, how):
    wanted = tmp / f"nbddp-compiled-{os.getuid()}"
    if how == "a link":
        (tmp / "elsewhere").mkdir(mode=0o700)
        wanted.symlink_to(tmp / "elsewhere")
    else:
        wanted.mkdir()
        wanted.chmod(0o777)
    folder = rank_folder(None, 0)
    assert folder.parent != wanted
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert list(wanted.iterdir()) == []


def test_the_folder_that_torch_is_told(tmp, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp / "mine"))
    assert rank_folder(None, 3) == tmp / "mine" / "rank-3"
    assert rank_folder(tmp / "given", 3) == tmp / "given" / "rank-3"


def test_a_folder_that_can_not_be_written_to_is_refused(tmp):
    (tmp / "file").write_text("")
    with pytest.raises(StepError, match=r"compile_cache_dir=.*/file: Not a directory; it must be a folder that can be written to, or leave it out"):
        rank_folder(tmp / "file", 0)
