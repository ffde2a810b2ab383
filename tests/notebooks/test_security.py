"""What other users of the machine can see of a run: nothing. No open port, no readable file, no environment on disk."""

from __future__ import annotations

import ipaddress
import secrets
import stat
import subprocess
import time
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from support.example import ALONE, ENDLESS, EXAMPLE, start

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


def open_to_others(folder: Path) -> list[str]:
    """What in a folder, itself included, anyone but its owner may read, write or enter."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            found.append(f"{path.relative_to(folder)}: {mode:o}")
    return found


def test_run_directories_are_the_owners_whatever_the_umask(nb, tmp_path):
    nb.run("net = make_net()", check=True)
    root = tmp_path / "runs"
    nb.run("earlier = os.umask(0)\nfrom nbddp.launch.local import standby\nstandby.close()", check=True)  # the next supervisor has this umask as well
    try:
        start(nb, f"net samples {ENDLESS} --num-workers 2 --keep-last 2 --checkpoint-every '2 steps' --run-root {root}", timeout=60)
        during = open_to_others(root)
        nb.interrupt()
        nb.wait()
        assert nb.eval("run.state") == "stopped"
        nb.run("run.stacks()", check=True)
        assert (during, open_to_others(root)) == ([], [])
        assert stat.S_IMODE(next(root.glob("2*")).stat().st_mode) == 0o700
        assert {path.suffix for path in root.rglob("*") if path.is_file()} >= {".json", ".jsonl", ".log", ".pt", ".html"}
    finally:
        nb.run("os.umask(earlier)\nstandby.close()", check=True)


def test_values_of_the_environment_are_on_no_disk(notebook, tmp_path):
    secret, since = secrets.token_hex(16), time.time() - 1
    nb = notebook(env={"INHERITED_TOKEN": secret})
    nb.run(ALONE, check=True)
    word = secrets.token_hex(8)
    nb.run(f"os.environ['SECRET_TOKEN'] = '{word}' * 2", check=True)  # the whole value stands in no source
    value = word * 2
    check = "assert len(os.environ['SECRET_TOKEN']) == len(os.environ['INHERITED_TOKEN']) == 32"
    body = f"def training_step(model, batch):\n    {check}\n    return step(model, batch)"
    start(nb, f"net samples {ENDLESS} --checkpoint-every '2 steps'", body)
    places = [nb.folder, Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")]
    assert holding(value, places, since) == holding(secret, places, since) == []
    nb.interrupt()
    nb.wait()
    assert nb.eval("run.state") == "stopped"
    nb.run(f"%%ddp_train net samples {ENDLESS}\ndef training_step(model, batch):\n    raise KeyError(len(os.environ['SECRET_TOKEN']))")
    assert "KeyError: 32" in nb.cells[-1].error.traceback
    assert holding(value, places, since) == holding(secret, places, since) == []


def holding(text: str, places: list[Path], since: float) -> list[str]:
    """Files written since then that hold a text; those of other tests' temporary folders come and go meanwhile."""
    search = ["find", *map(str, places), "-type", "f", "-newermt", f"@{since}", "-exec", "grep", "-laF", text, "{}", "+"]
    return subprocess.run(search, capture_output=True, text=True, check=False).stdout.splitlines()


def test_nothing_of_a_run_listens_beyond_loopback(nb):
    nb.run("net = make_net()", check=True)
    start(nb, f"net samples {ENDLESS} --num-workers 2")
    ours = {process for process in nb.processes() if process.pid != nb.kernel_pid}  # the kernel's own ports are Jupyter's
    sockets = [socket for process in ours for socket in process.net_connections(kind="inet")]
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr)}
    assert listening  # the store of the process group, at least
    assert [ip for ip in listening if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback] == []
    nb.interrupt()
    nb.wait()
    assert nb.eval("run.state") == "stopped"
