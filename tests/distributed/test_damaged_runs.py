"""What uses the weights of a run whose files are damaged: it raises our errors, or works; a new training beside such runs works."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nbddp
from nbddp.errors import NbddpError
from nbddp.kernel.run import Run
from support.damage import damage

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.distributed

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import nbddp

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
run = nbddp.train(net, data, data, loss=nn.CrossEntropyLoss(), nproc=2, batch_size=16, epochs=2, run_root=sys.argv[1])
assert run.state == "finished", run.error
"""


def trained(root: Path) -> Path:
    """Train in a process of its own; return the run's directory."""
    before = set(root.glob("2*"))
    done = subprocess.run([sys.executable, "-c", TRAIN, str(root)], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = set(root.glob("2*")) - before
    return made


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("good") / "runs")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    root.mkdir()
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(root))
    monkeypatch.setattr("nbddp.kernel.runs._known", {})
    return root


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore:the directory of run .* is gone")
def test_weights_of_damaged_runs(root: Path, good: Path, seed: int) -> None:
    damaged, sound = root / good.name, root / f"{good.name[:-4]}good"
    shutil.copytree(good, damaged)
    shutil.copytree(good, sound)
    done = damage(damaged, random.Random(1000 + seed))
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    uses: dict[str, Callable[[Run], object]] = {
        "load last": lambda run: run.load(net),
        "load best": lambda run: run.load(net, "best"),
        "load initial": lambda run: run.load(net, "initial"),
        "model": lambda run: run.model(),
        "evaluate": lambda run: run.evaluate(data),
        "predict": lambda run: run.predict(data),
        "diff": lambda run: repr(run.diff(str(sound))),
        "checkpoints": lambda run: repr(run.checkpoints),
        "resume": lambda run: nbddp.plan(net, data, loss=nn.CrossEntropyLoss(), resume=run.id, epochs=4),
        "init": lambda run: nbddp.plan(net, data, loss=nn.CrossEntropyLoss(), init=run.id, nproc=1),
        "view": lambda run: run.view(),
        "wait": lambda run: run.wait(5),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        for name, use in uses.items():
            with contextlib.suppress(NbddpError, TimeoutError):
                run = nbddp.attach(damaged)
                use(run)
            with contextlib.suppress(NbddpError):
                assert name != "diff" or nbddp.attach(sound).diff(damaged.name) is not None, done
        assert nbddp.attach(sound).load(net) is net
        nbddp.plan(net, data, loss=nn.CrossEntropyLoss(), resume=sound.name, epochs=4)
        with contextlib.suppress(NbddpError):
            nbddp.plan(net, data, loss=nn.CrossEntropyLoss(), resume="last", epochs=4)


def test_a_training_beside_damaged_runs(root: Path, good: Path) -> None:
    for seed in range(12):
        path = root / f"20260101-0000{seed:02d}-damaged-aaaa"
        shutil.copytree(good, path)
        damage(path, random.Random(seed))
    (root / "20260101-000099-empty-aaaa").mkdir()
    (root / "20260101-000098-loop-aaaa").symlink_to(".")
    os.mkfifo(root / "20260101-000097-pipe-aaaa")
    assert (trained(root) / "result.json").is_file()
    assert len(nbddp.runs()) == 15
