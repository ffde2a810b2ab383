from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

import pytest

from nbddp.errors import ConfigError
from nbddp.process import ProcessId
from nbddp.rundir import RunDir, find_run, private_folder, run_dirs
from nbddp.staged import data_lock, release_data

DIGEST = "0123456789" * 4


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "nbddp_runs"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277], ids=oct)
def test_everything_is_the_owners_whatever_the_umask(root, umask):
    before = os.umask(umask)
    try:
        run = RunDir.create(root, "My Net!")
        run.write_spec({"config": {}})
        run.ask("stop")
        with data_lock(run.data):
            pass
    finally:
        os.umask(before)
    assert {mode(path) for path in [root, *root.rglob("*")] if path.is_dir()} == {0o700}
    assert {mode(path) for path in root.rglob("*") if path.is_file()} <= {0o600, 0o400}
    assert (root / ".gitignore").read_text() == "*\n"
    assert [found.path for found in run_dirs(root)] == [run.path]
    assert run.id.split("-")[2] == "my_net"


def test_a_folder_of_the_users_keeps_its_mode_and_gets_no_gitignore(tmp_path):
    tmp_path.chmod(0o755)
    RunDir.create(tmp_path, "net")
    assert mode(tmp_path) == 0o755
    assert not (tmp_path / ".gitignore").exists()
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o755)
    assert mode(private_folder(tmp_path / "data")) == 0o755


def test_an_interrupt_while_a_run_is_made_leaves_nothing(root, monkeypatch):
    made = []

    def interrupted(path):
        if path.name == "logs":
            raise KeyboardInterrupt
        made.append(path)
        return private_folder(path)

    monkeypatch.setattr("nbddp.rundir.private_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunDir.create(root, "net")
    assert made[-1].name == "events"
    assert run_dirs(root) == []


def test_a_folder_that_can_not_be_made_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"can't be written to .*/file/runs: Not a directory; choose another folder with --run-root"):
        RunDir.create(tmp_path / "file" / "runs", "net")


def test_only_what_was_staged_is_released(root):
    run = RunDir.create(root, "net")
    run.write_spec({"data": [{"hash": DIGEST}], "kernel": ProcessId.current().to_json(), "host": os.uname().nodename})
    private_folder(run.data)
    names = [f"{DIGEST}.pt", f"{DIGEST[::-1]}.pt", "mnist.pt", ".fresh.pt.1-a.tmp", ".old.pt.1-a.tmp", "notes.txt"]
    for name in names:
        (run.data / name).touch()
    os.utime(run.data / ".old.pt.1-a.tmp", (0, time.time() - 7200))
    assert [path.name for path in release_data(root)] == [f"{DIGEST[::-1]}.pt"]
    assert {path.name for path in run.data.iterdir()} == {f"{DIGEST}.pt", "mnist.pt", ".fresh.pt.1-a.tmp", "notes.txt", ".lock"}


def test_a_kernel_that_ends_needs_nothing_any_more(root):
    run = RunDir.create(root, "net")
    run.write_spec({"data": [{"hash": DIGEST}], "kernel": ProcessId.current().to_json(), "host": os.uname().nodename})
    run.write_result({"state": "finished"})
    staged = private_folder(run.data) / f"{DIGEST}.pt"
    staged.touch()
    assert release_data(root) == []
    assert release_data(root, leaving=ProcessId.current()) == [staged]


def test_nothing_is_released_while_another_kernel_stages(root):
    data = private_folder(root / "data")
    (data / f"{DIGEST}.pt").touch()
    with data_lock(data):
        with pytest.raises(BlockingIOError), data_lock(data, wait=False):
            pass
        assert release_data(root, wait=False) == []
    assert release_data(root, wait=False) == [data / f"{DIGEST}.pt"]


@pytest.mark.parametrize("number, works", [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_file_system_without_locks_does_without(root, monkeypatch, number, works):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    outcome = contextlib.nullcontext() if works else pytest.raises(OSError, match="Input/output error")
    with outcome, data_lock(root / "data"):
        pass


def test_runs_are_listed_in_the_order_in_which_they_were_made(root):
    made = []
    for index in range(20):
        made.append(RunDir.create(root, f"net {19 - index}").id)
        began = time.time_ns()
        while time.time_ns() - began < 1_000_000:  # an id tells milliseconds
            pass
    assert [run.id for run in run_dirs(root)] == made
    assert made != sorted(made)


def test_the_first_result_stands(root):
    run = RunDir.create(root, "net")
    assert run.write_result({"state": "finished", "time": 1.0}) is True
    assert run.write_result({"state": "failed", "time": 2.0}) is False
    assert run.read_result() == {"state": "finished", "time": 1.0}
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["result.json"]


def test_runs_are_found_by_a_part_of_their_id_that_is_theirs_alone(root):
    one, two = RunDir.create(root, "one"), RunDir.create(root, "two")
    one.write_spec({})
    assert find_run(one.id, root).path == find_run(one.id[-4:], root).path == find_run("-one-", root).path == find_run(str(one.path), root).path == one.path
    with pytest.raises(ConfigError, match=f"2 runs match {one.id[:6]}: .*{two.id}; %ddp_runs lists them"):
        find_run(one.id[:6], root)
    with pytest.raises(ConfigError, match="no run nowhere in "):
        find_run("nowhere", root)
    for nothing in ("", "x" * 300, "~nobody-of-this-name"):
        with pytest.raises(ConfigError, match=f"no run {nothing} in"):
            find_run(nothing, root)


@pytest.mark.parametrize(
    "name, slug",
    [
        ("My Net!", "my_net"),
        ("Модель 2", "модель_2"),
        ("实验", "实验"),
        ("Ελληνικά/../x", "ελληνικά_x"),
        ("हिन्दी", "हिन्दी"),
        ("e\u0301te\u0301", "été"),
        ("a-b.c", "a_b_c"),
        ("☃ \x1b[2J\u202e", "2j"),
        ("///", "run"),
        ("数" * 100, "数" * 32),
    ],
)
def test_names_of_any_script_are_those_of_runs(root, name, slug):
    run = RunDir.create(root, name)
    assert run.id.split("-")[2] == slug
    assert [found.path for found in run_dirs(root)] == [run.path]
    assert find_run(slug, root).path == run.path
    assert find_run(run.id.encode().decode(), root).path == run.path


@pytest.mark.parametrize("error", [OSError(errno.EILSEQ, "Illegal byte sequence"), UnicodeEncodeError("ascii", "é", 0, 1, "no")])
def test_where_a_file_system_takes_plain_letters_alone_names_are_of_these(root, monkeypatch, error):
    make = type(root).mkdir

    def mkdir(path, *args, **kwargs):
        if not path.name.isascii():
            raise error
        make(path, *args, **kwargs)

    monkeypatch.setattr(type(root), "mkdir", mkdir)
    assert RunDir.create(root, "été net").id.split("-")[2] == "t_net"
    assert RunDir.create(root, "实验").id.split("-")[2] == "run"


def test_folders_that_are_not_named_as_runs_are_are_none(root):
    root.mkdir()
    for name in ("data", "20261130-000000--aaaa", "20261130-000000-a b-aaaa", "20261130-000000-<b>-aaaa", "20261130-000000-x-AAAA", "x-20261130-000000-x-aaaa"):
        (root / name).mkdir()
    assert run_dirs(root) == []
