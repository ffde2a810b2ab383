"""A guarded process ends with its parent, and one whose parent is gone already ends at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nbddp
from nbddp.process import ProcessId
from support import processes

PARENT_AND_CHILD = """
import os, signal, sys
from nbddp.deathguard import die_with_parent
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    die_with_parent({parent})
    os.write(writer, b"guarded")
    signal.pause()
os.close(writer)
guarded = os.read(reader, 7) == b"guarded"
print(child, guarded, flush=True)
{then}
"""


def start(parent: str, then: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(nbddp.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", PARENT_AND_CHILD.format(parent=parent, then=then)], stdout=subprocess.PIPE, text=True, env=environment)


def read(process: subprocess.Popen[str]) -> tuple[int, bool]:
    assert process.stdout is not None
    pid, guarded = process.stdout.readline().split()
    return int(pid), guarded == "True"


@pytest.mark.parametrize("parent", ["", "os.getppid()"], ids=["parent not named", "parent named"])
def test_a_killed_parent_takes_it_along(parent: str) -> None:
    with start(parent, "signal.pause()") as process:
        pid, guarded = read(process)
        child = ProcessId.of(pid)
        assert guarded
        assert child is not None
        assert child.alive()
        process.kill()
    assert not processes.gone(lambda: processes.alive(found for found in processes.of_session(os.getsid(0)) if found.pid == pid), 1.0)
    assert not child.alive()


def test_a_parent_that_is_gone_already() -> None:
    """The pid that it was told is not that of its parent."""
    with start("1 << 22", "os.waitpid(child, 0)") as process:
        _, guarded = read(process)
        assert not guarded
        assert process.wait(10) == 0


def test_the_guarded_process_is_the_parent_of_what_it_forks() -> None:
    """As a rank is of its loader workers: where the rank is gone before the worker looks, the worker ends."""
    program = """
import os
from nbddp.deathguard import die_with_parent
die_with_parent()
reader, writer = os.pipe()
if os.fork() == 0:
    die_with_parent()
    os.write(writer, b"direct")
    os._exit(0)
os.wait()
if os.fork() == 0:
    if os.fork() == 0:  # its parent is not the process that was guarded last
        die_with_parent()
        os.write(writer, b" grandchild")
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
print(os.read(reader, 99).decode())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(nbddp.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=30)
    assert done.stdout == "direct\n"
