"""The kernel goes away in the middle of a cell: what it had started ends in order, and what was trained is kept."""

from __future__ import annotations

import json
import os
import signal

import pytest

from support import processes
from support.example import ALONE, ENDLESS, STEP, run_folders, start

pytestmark = pytest.mark.kernel

KERNEL_S = 10.0


@pytest.fixture
def alone(notebook):
    nb = notebook()
    nb.run(ALONE, check=True)
    return nb


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "restart"])
def test_in_a_run_the_ranks_stop_with_a_checkpoint(alone, how):
    nb = alone
    start(nb, f"net samples {ENDLESS}")
    if how == "restart":
        nb.close()  # as a server does it: ask, wait, terminate, kill; asserts that everything is gone
    else:
        os.kill(nb.kernel_pid, getattr(signal, how))
        left = processes.gone(nb.processes, KERNEL_S)
        assert not left, processes.describe(left)
    (folder,) = run_folders(nb)
    result = json.loads((folder / "result.json").read_text())
    assert (result["state"], result["error"]) == ("stopped", None)
    assert result["step"] > 0
    assert (folder / "checkpoints/last.pt").is_file()
    assert not list((nb.folder / "nbddp_runs/data").glob("*.pt"))  # nobody needs it any more


def test_while_the_data_is_packed_nothing_goes_on(alone, notebook):
    nb = alone
    nb.run(
        "class Slow(TensorDataset):\n    def __getstate__(self):\n        Path('packing').touch()\n        time.sleep(60)\nslow = Slow(features)", check=True
    )
    start(nb, f"net slow {ENDLESS}", until="packing")
    os.kill(nb.kernel_pid, signal.SIGKILL)
    left = processes.gone(nb.processes, KERNEL_S)
    assert not left, processes.describe(left)
    (folder,) = run_folders(nb)
    later = notebook(folder=nb.folder, env={"NBDDP_WARM": "0"})
    later.run("%load_ext nbddp\nimport nbddp", check=True)
    assert "failed" in later.run("%ddp_runs", check=True).shown()[0]
    error = later.run(f"nbddp.attach({folder.name!r}).wait(10)").error
    assert (error.ename, error.evalue) == ("LaunchError", "the kernel ended before the run was launched")


def test_a_background_run_that_is_to_stop_with_its_kernel_does(alone):
    nb = alone
    nb.run(f"%%ddp_train net samples {ENDLESS} --background --on-kernel-exit stop\n{STEP}", check=True)
    nb.until(lambda: (nb.folder / "stepped").exists())
    os.kill(nb.kernel_pid, signal.SIGKILL)
    left = processes.gone(nb.processes, KERNEL_S)
    assert not left, processes.describe(left)
    (folder,) = run_folders(nb)
    assert json.loads((folder / "result.json").read_text())["state"] == "stopped"


def test_a_blocking_run_that_is_to_go_on_does(alone, notebook):
    nb = alone
    start(nb, f"net samples {ENDLESS} --on-kernel-exit continue")
    os.kill(nb.kernel_pid, signal.SIGKILL)
    (folder,) = run_folders(nb)
    later = notebook(folder=nb.folder, env={"NBDDP_WARM": "0"})
    later.run(f"%load_ext nbddp\nimport nbddp\nrun = nbddp.attach({folder.name!r})\nseen = run.follower.state.step", check=True)
    later.run("import time\nwhile run.follower.state.step <= seen: time.sleep(0.05)", timeout=20, check=True)
    assert later.eval("run.state") == "running"
    later.run("run.stop()\nrun.wait(10)", check=True)
    assert later.eval("run.state") == "stopped"
    left = processes.gone(nb.processes, KERNEL_S)
    assert not left, processes.describe(left)
