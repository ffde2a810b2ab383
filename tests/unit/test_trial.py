"""What was run for trial leaves nothing behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from nbddp.worker.trial import trial


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls, self.seen = nn.BatchNorm1d(3), 0, []

    def forward(self, x):
        self.calls += 1
        return self.norm(x + torch.randn_like(x) * random.random() * np.random.rand())


def draws():
    return torch.rand(2).tolist(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("fails", [False, True])
def test_streams_buffers_gradients_and_counters_are_as_they_were(fails):
    net = Counting()
    net(torch.ones(4, 3)).sum().backward()
    gradient, before = net.norm.weight.grad, {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = draws()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    try:
        with trial(torch.device("cpu"), net, len):  # what is no module is passed over
            assert net.norm.weight.grad is None
            net(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
            assert (net.calls, int(net.norm.num_batches_tracked)) == (2, 2)
            if fails:
                raise KeyError("in the trial")
    except KeyError:
        assert fails
    assert net.calls == 1
    assert net.norm.weight.grad is gradient
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert draws() == expected
