"""What the notebook tests of whole runs train: a small classifier on samples that exist only in the kernel, and steps that say how far they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from support.kernel import Cell, Notebook

# Builds on the names that the kernel of tests/notebooks/conftest.py has. `stepped` and `validating` are touched in the notebook's folder.
EXAMPLE = """
torch.manual_seed(1)
features = torch.randn(512, 8)
labels = features[:, :4].argmax(1)
samples, held_out = TensorDataset(features, labels), TensorDataset(features[:128], labels[:128])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)

make_net = Net

def accuracy(model):
    with torch.no_grad():
        return float((model(features).argmax(1) == labels).float().mean())

def step(model, batch):
    Path("stepped").touch()
    x, y = batch
    return F.cross_entropy(model(x), y)

def rank():
    return int(os.environ["RANK"])

def weights(model):
    return copy.deepcopy(model.state_dict())

def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)

net = make_net()
"""

ALONE = (
    """
%load_ext nbddp
import collections, copy, os, sys, time
import torch, nbddp
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
"""
    + EXAMPLE
)
"""The same for a kernel of a test's own."""

ENDLESS = "-n 2 --batch-size 64 --max-time 100"
BRIEF = "-n 2 --batch-size 64 --max-steps 3"
STEP = "training_step = step"


def start(nb: Notebook, line: str, body: str = STEP, *, until: str | None = "stepped", timeout: float = 30) -> Cell:
    """Start a cell with %%ddp_train and wait until its ranks have touched a file of the notebook's folder."""
    if until is not None:
        (nb.folder / until).unlink(missing_ok=True)
    cell = nb.start(f"%%ddp_train {line}\n{body}")
    if until is not None:
        nb.until(lambda: cell.done or (nb.folder / until).exists(), timeout)
        assert not cell.done, f"it ended before it came to {until!r}: {cell.text}\n{cell.error}"
    return cell


def run_folders(nb: Notebook) -> list[Path]:
    """The run directories beside the notebook, oldest first."""
    root = nb.folder / "nbddp_runs"
    found = [path for path in root.iterdir() if path.name[0] == "2"] if root.is_dir() else []
    return sorted(found, key=lambda path: (path.name[:15], path.name[-4:]))
