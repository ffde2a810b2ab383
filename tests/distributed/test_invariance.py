"""The answer does not depend on the number of ranks: curves, weights, validation, and which samples were seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from nbddp.evaluation.errors import StepError

pytestmark = pytest.mark.distributed

N, FEATURES = 103, 6
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def regression():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    val = TensorDataset(x[:37] * 2, y[:37])
    return net, TensorDataset(x, y), val


def run(training, nproc, hooks=None, make=regression, **options):
    options = {"epochs": 3, "batch_size": 24, "lr": 0.02, "optimizer": "adamw", **options}
    return training(nproc, make, hooks or {"loss": nn.functional.mse_loss}, **options)


def assert_same(one, other):
    assert len(one.history["loss"]) == len(other.history["loss"]) > 0
    np.testing.assert_allclose(other.history["loss"], one.history["loss"], **TOLERANCE)
    for name, values in one.epochs.items():
        if name not in ("duration_s",):
            np.testing.assert_allclose(other.epochs[name], values, **TOLERANCE, err_msg=name)
    for weights in other.weights:
        for name, value in one.weights[0].items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
        {"accumulate": 2},
        {"accumulate": 4, "clip_norm": 0.05},
        {"clip_norm": 0.05, "on_nan": "skip"},
    ],
    ids=str,
)
def test_same_curve_at_1_2_and_3_ranks(training, drop_last, options):
    one = run(training, 1, drop_last=drop_last, **options)
    assert np.isfinite(one.epochs["val_loss"]).all()
    assert len(one.history["loss"]) == 3 * (4 if drop_last else 5)
    for nproc in (2, 3):
        assert_same(one, run(training, nproc, drop_last=drop_last, **options))


def test_accumulation_does_not_change_the_curve(training):
    assert_same(run(training, 2), run(training, 2, accumulate=3))


def test_accumulation_with_a_tail_does_not_change_the_curve(training):
    assert_same(run(training, 1, drop_last=False), run(training, 3, drop_last=False, accumulate=8))


def weighted_step(model, batch):
    x, y = batch
    keep = (x[:, 0] > 0).double()
    errors = ((model(x) - y) ** 2).mean(dim=1)
    return {"loss": (errors * keep).sum() / keep.sum().clamp(min=1), "weight": keep.sum(), "kept": keep.mean()}


@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"accumulate": 2}, {"batch_size": 6, "epochs": 1}], ids=str)
def test_a_loss_over_a_part_of_the_samples_is_exact_with_its_weight(training, options):
    one = run(training, 1, {"training_step": weighted_step}, **options)
    for nproc in (2, 3):
        other = run(training, nproc, {"training_step": weighted_step}, **options)
        np.testing.assert_allclose(other.history["loss"], one.history["loss"], **TOLERANCE)
        np.testing.assert_allclose(other.epochs["val_loss"], one.epochs["val_loss"], **TOLERANCE)


def test_the_same_loss_without_its_weight_is_not(training):
    def unweighted(model, batch):
        return weighted_step(model, batch)["loss"]

    curves = [run(training, nproc, {"training_step": unweighted}).history["loss"] for nproc in (1, 3)]
    assert not np.allclose(*curves, rtol=1e-6)


class Counted(Dataset):
    """Sample i is the number i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


def counting(n, n_val):
    def make():
        net = nn.Embedding(n, 1).double()
        nn.init.zeros_(net.weight)
        return net, Counted(n), Counted(n_val) if n_val else None

    return make


def pick(model, batch):
    return model(batch).mean()


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("n, batch, workers", [(30, 6, 0), (31, 12, 0), (25, 24, 0), (31, 6, 6)])
def test_every_sample_counts_once_in_an_epoch(training, nproc, n, batch, workers):
    """SGD with lr 1 moves the row of a sample by -1 / (samples of its step) each time it is used."""
    result = training(nproc, counting(n, 0), {"training_step": pick}, optimizer="sgd", lr=1.0, batch_size=batch, drop_last=False, num_workers=workers)
    sizes = result.history["samples"].tolist()
    assert sum(sizes) == n
    moved = -result.weights[0]["weight"][:, 0]
    expected = sorted(1 / size for size in sizes for _ in range(size))
    np.testing.assert_allclose(sorted(moved), expected, rtol=1e-12)


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("n_val", [1, 2, 7, 20])
def test_every_validation_sample_counts_once(training, nproc, n_val):
    """The mean of the numbers 0..n-1 is exact only if none is repeated or lost, also with fewer samples than ranks."""

    def step(model, batch):
        return {"loss": model(batch % 12).sum() * 0 + batch.double().mean(), "largest": batch.double().max()}

    result = training(nproc, counting(12, n_val), {"training_step": step}, batch_size=6, val_batch_size=6)
    assert result.epochs["val_loss"].tolist() == pytest.approx([(n_val - 1) / 2], rel=1e-12)


def test_the_order_of_samples_is_that_of_the_seed_alone(training):
    def order(nproc, **options):
        return run(training, nproc, epochs=2, **options).history["loss"]

    base = order(1)
    np.testing.assert_allclose(order(3), base, **TOLERANCE)
    assert not np.allclose(order(1, seed=1), base, rtol=1e-6)
    assert not np.allclose(order(1, shuffle=False), base, rtol=1e-6)


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_subset_of_a_subset_is_fetched_by_its_own_indices(training, nproc):
    def make():
        net, data, val = regression()
        return net, Subset(Subset(data, list(range(100, 20, -1))), list(range(0, 80, 2))), val

    one = run(training, 1, make=make, batch_size=12)
    assert_same(one, run(training, nproc, make=make, batch_size=12))


def test_lbfgs_from_the_hook_searches_the_same_line_on_all_ranks(training):
    hooks = {
        "loss": nn.functional.mse_loss,
        "optimizer": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    }
    one = training(1, regression, hooks, epochs=2, batch_size=102)
    for nproc in (2, 3):
        other = training(nproc, regression, hooks, epochs=2, batch_size=102)
        np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=1e-8)
    assert one.history["loss"][-1] < one.history["loss"][0]


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_in_which_nothing_counts_changes_nothing(training, nproc, dtype):
    """Its own loss is unknown, that of the others is not, and neither are the weights."""

    def make():
        torch.manual_seed(0)
        return nn.Linear(3, 1).to(dtype), TensorDataset(torch.randn(48, 3, dtype=dtype)), None

    def step(model, batch):
        keep = torch.zeros(()) if step.number == 1 else torch.ones(())
        step.number += 1
        return {"loss": model(batch[0]).square().mean() * keep, "weight": keep * len(batch[0])}

    step.number = 0
    result = training(nproc, make, {"training_step": step}, optimizer="sgd", lr=0.1, batch_size=12, shuffle=False)
    losses = result.history["loss"]
    assert np.isnan(losses).tolist() == [False, True, False, False]
    assert np.isfinite(result.weights[0]["weight"]).all()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_a_step_that_calls_backward_itself_is_refused(training, options):
    def step(model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(StepError, match="the step called backward\\(\\) itself, and its gradients would count twice"):
        run(training, 1, {"training_step": step}, **options)
