"""What is trained in every benchmark, here and in the peers' scripts: a small MLP on random vectors, with steps of a few milliseconds."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

FEATURES, HIDDEN, CLASSES = 128, 256, 10
SAMPLES, BATCH, RANKS = 25_600, 256, 2
LR = 1e-3


def make_model() -> nn.Module:
    """A three-layer MLP with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_data(samples: int = SAMPLES) -> TensorDataset:
    """Random inputs whose label is the largest of their first entries."""
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))
