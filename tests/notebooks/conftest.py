"""A kernel with data and a model that the tests of one module share, since a kernel of its own for each of them would take seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from support import processes
from support.kernel import Notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_ENDS_S = 5.0

# `fit` is the loop that a user would write for one process: in order, SGD, no nbddp.
SETUP = """
%load_ext nbddp
import collections, copy, dataclasses, json, os, sys, time
import numpy as np, torch, nbddp
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

torch.manual_seed(7)
X = torch.randn(64, 4)
Y = X @ torch.randn(4, 2) + 1
train_set = TensorDataset(X, Y)
BY_HAND = "-n 2 --batch-size 16 --shuffle false --optimizer sgd --lr 0.05"

def fit(model, step, batches, epochs=1, lr=0.05):
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
    return model

def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def run_files(root="nbddp_runs"):
    "What a run leaves there; the folder's own .gitignore, data and data/.lock are no run's."
    own = {Path(root, name) for name in (".gitignore", "data", "data/.lock")}
    return sorted(str(path) for path in set(Path(root).rglob("*")) - own)

def standby_pid():
    from nbddp.launch.local import standby
    return standby.template and standby.template.process.pid

def in_order(*tensors, size=16):
    return list(zip(*(tensor.split(size) for tensor in tensors)))

def apart(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
"""


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel for the tests of one module, in a folder of its own, with nbddp loaded and the names of `SETUP`."""
    with Notebook(tmp_path_factory.mktemp("notebook"), tmp_path_factory.mktemp("kernel")) as nb:
        nb.run(SETUP, check=True)
        yield nb


@pytest.fixture
def nb(shared_kernel: Notebook) -> Iterator[Notebook]:
    """The module's kernel; fails a test whose runs leave a process behind. The standby may be there."""
    yield shared_kernel
    left = processes.gone(lambda: shared_kernel.processes() - _at_rest(shared_kernel), RUN_ENDS_S)
    assert not left, f"a run left behind\n{processes.describe(left)}"


def _at_rest(nb: Notebook) -> processes.Processes:
    """The kernel itself, and its standby; a supervisor that the standby forked is not at rest."""
    found = {psutil.Process(nb.kernel_pid)}
    standby = nb.eval("standby_pid()")
    if standby is not None and psutil.pid_exists(standby):
        found.add(psutil.Process(standby))
    return found
