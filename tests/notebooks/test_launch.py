"""The supervisor that waits for a cell, and what happens where there is none, or one that does not come far enough."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from support import processes
from support.example import ALONE, BRIEF, ENDLESS, STEP

pytestmark = pytest.mark.kernel

AT_ONCE_S = 5.0
SUPERVISOR = "nbddp.supervisor"


def supervisors(nb):
    """Supervisor processes of a kernel, their fork servers left out."""
    return {process for process in nb.processes() if SUPERVISOR in process.cmdline() and process.ppid() == nb.kernel_pid}


@pytest.fixture
def cold(notebook):
    nb = notebook(env={"NBDDP_WARM": "0"})
    nb.run(ALONE, check=True)
    return nb


def test_without_a_standby_a_cell_starts_its_own_supervisor(cold):
    assert supervisors(cold) == set()
    cold.run(f"%%ddp_train net samples {BRIEF}\n{STEP}", check=True)
    assert cold.eval("run.state") == "finished"
    assert processes.gone(lambda: supervisors(cold), AT_ONCE_S) == set()


def test_a_supervisor_that_is_killed_before_it_took_the_run_over(cold):
    cell = cold.start(f"%%ddp_train net samples {ENDLESS}\n{STEP}")
    cold.until(lambda: supervisors(cold))
    (supervisor,) = supervisors(cold)
    began = time.monotonic()
    supervisor.send_signal(signal.SIGKILL)
    cold.wait(20)
    assert time.monotonic() - began < AT_ONCE_S
    assert cell.error.ename == "LaunchError"
    assert "the standby ended with exit code -9 before it started the run" in cell.error.traceback
    assert cold.eval("run.state") == "failed"


def test_a_supervisor_that_can_not_import_says_why(cold):
    (cold.folder / "broken").mkdir()
    (cold.folder / "broken" / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    cell = cold.run(f"os.environ['PYTHONPATH'] = str(Path('broken').resolve())\n%ddp_train net samples {ENDLESS} --loss F.cross_entropy")
    assert cell.error.ename == "LaunchError"
    assert "ImportError: this torch is broken" in cell.error.traceback
    assert cell.error.traceback.startswith("LaunchError: ")  # none of our frames
    cold.run(f"del os.environ['PYTHONPATH']\n%ddp_train net samples {BRIEF} --loss F.cross_entropy", check=True)
    assert cold.eval("run.state") == "finished"


def test_an_interrupt_while_the_supervisor_is_still_importing(cold):
    cell = cold.start(f"%%ddp_train net samples {ENDLESS}\n{STEP}")
    cold.until(lambda: supervisors(cold))
    cold.interrupt()
    cold.wait(20)
    assert (cell.error, cold.eval("run.state")) == (None, "stopped")


def test_a_standby_that_is_gone_is_replaced(notebook):
    nb = notebook()
    nb.run(ALONE, check=True)
    (waiting,) = supervisors(nb)
    waiting.send_signal(signal.SIGKILL)
    psutil.wait_procs([waiting], timeout=5)
    nb.run(f"%%ddp_train net samples {BRIEF}\n{STEP}", check=True)
    assert nb.eval("run.state") == "finished"
    nb.until(lambda: supervisors(nb))
    (next_one,) = supervisors(nb)
    os.kill(next_one.pid, signal.SIGSTOP)  # it neither carries an order out nor ends: interrupts get the cell back
    cell = nb.start(f"%%ddp_train net samples {ENDLESS}\n{STEP}")
    nb.until(lambda: "2 x CPU ranks" in cell.text)
    for _ in range(3):
        nb.interrupt()
        time.sleep(0.1)  # between two presses of a key: signals that wait to be delivered merge
    nb.wait(10)
    assert cell.error is None
    assert nb.eval("run.state") == "stopped"


BACKGROUND = """
import torch
from torch import nn
import nbddp

net, x = nn.Linear(4, 1), torch.randn(64, 4)
fit = nbddp.train(net, torch.utils.data.TensorDataset(x, x[:, :1]), loss=nn.MSELoss(), nproc=1, batch_size=32, epochs=2, background=True)
fit.wait()
"""


def test_a_run_in_the_background_of_a_terminal_says_what_was_started_and_how_to_wait(tmp_path):
    (tmp_path / "fit.py").write_text(BACKGROUND)
    done = subprocess.run([sys.executable, "fit.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("note: ")]
    assert re.fullmatch(r"linear-\w{4}: 1 x CPU rank · 32 = 1 x 32 · 2 steps/epoch · .* · in the background: run\.wait\(\) waits for it", lines[0]), lines[0]
    assert lines[1].startswith("net: epoch 2 ")
    assert done.stderr == ""
