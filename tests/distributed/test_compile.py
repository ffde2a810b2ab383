"""Steps through torch.compile on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

pytestmark = pytest.mark.distributed

N, FEATURES = 48, 5


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One folder for all tests: what one has compiled, the next finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(N, FEATURES), torch.randn(N, 2)
    return net, TensorDataset(x, y), TensorDataset(x[:13], y[:13])


def mse(model, batch):
    x, y = batch
    output = model(x)
    return {"loss": nn.functional.mse_loss(output, y), "output": output, "target": y, "largest": (output - y).abs().max()}


def run(training, nproc, step=mse, model=make, hooks=None, **options):
    options = {"epochs": 2, "batch_size": 12, "lr": 0.05, **options}
    return training(nproc, model, {"training_step": step, **(hooks or {})}, timeout=110, **options)


def assert_alike(one, other, rtol=1e-4):
    np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=rtol)
    assert list(one.weights[0]) == list(other.weights[0])
    for weights in other.weights:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, other.weights[0][name], err_msg=name)
            np.testing.assert_allclose(value, one.weights[0][name], rtol=rtol * 10, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_curve_is_the_eager_one(training, nproc):
    eager = run(training, nproc)
    compiled = run(training, nproc, compile=True)
    assert_alike(eager, compiled)
    np.testing.assert_allclose(compiled.history["largest"], eager.history["largest"], rtol=1e-4)
    np.testing.assert_allclose(compiled.epochs["val_loss"], eager.epochs["val_loss"], rtol=1e-4)
    print([(e.rank, e.kind, e.data) for e in compiled.events if e.kind in ("phase", "message")])
