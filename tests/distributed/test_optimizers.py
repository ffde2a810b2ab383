"""Optimizers and schedules in the loop on real ranks: the same training at 1, 2 and 3 ranks, and what torch alone would do with the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, and that sets a variable of the environment
from torch import nn
from torch.utils.data import TensorDataset

from nbddp.data import epoch_order

pytestmark = pytest.mark.distributed

N, BATCH, EPOCHS = 60, 12, 2


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return net, TensorDataset(x, y), None


def mse(output, target):
    return nn.functional.mse_loss(output, target)


def train(training, nproc, *, hooks=None, **options):
    return training(nproc, make, {"loss": mse, **(hooks or {})}, **{"epochs": EPOCHS, "batch_size": BATCH, **options})


def alone(optimizer_of, *, scheduler_of=None, batch=BATCH, epochs=EPOCHS):
    """Plain torch in one process, each step with the whole batch."""
    net, data, _ = make()
    optimizer = optimizer_of(net)
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    losses = []
    for epoch in range(1, epochs + 1):
        for indices in epoch_order(N, seed=0, stage=0, epoch=epoch, shuffle=True).split(batch):
            x, y = data[indices]

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse(net(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
            if scheduler is not None:
                scheduler.step()
    return losses, {name: value.numpy() for name, value in net.state_dict().items()}


def assert_same(result, losses, weights, rtol=1e-9):
    np.testing.assert_allclose(result.history["loss"], losses, rtol=rtol)
    for rank in result.weights:
        for name, value in rank.items():
            np.testing.assert_array_equal(value, result.weights[0][name], err_msg=name)
            np.testing.assert_allclose(value, weights[name], rtol=rtol * 100, atol=1e-10, err_msg=name)


OPTIONS = {
    "adam": ({"optimizer": "adam", "weight_decay": 0.1}, lambda net: torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=0.1)),
    "adamw fused": ({"optimizer": "adamw", "fused": True}, lambda net: torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)),
    "sgd": ({"optimizer": "sgd", "momentum": 0.9}, lambda net: torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)),
    "adagrad fused": ({"optimizer": "adagrad", "fused": True}, lambda net: torch.optim.Adagrad(net.parameters(), lr=0.02, fused=True)),
    "rmsprop": ({"optimizer": "rmsprop", "momentum": 0.5}, lambda net: torch.optim.RMSprop(net.parameters(), lr=0.02, momentum=0.5)),
}


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_optimizer_by_option_trains_as_torch_does_with_the_whole_batch(training, name, nproc):
    options, optimizer_of = OPTIONS[name]
    assert_same(train(training, nproc, lr=0.02, **options), *alone(optimizer_of))


# LBFGS takes the whole data in each step, as it is meant to: with batches it wanders, and whatever the last bits differ by grows.
WHOLE = {"batch_size": N, "epochs": 6}
CLOSE = 1e-6


def assert_lower(result):
    assert result.history["loss"][-1] < 0.8 * result.history["loss"][0]


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_lbfgs_searches_the_same_way_on_every_number_of_ranks(training, nproc):
    result = train(training, nproc, optimizer="lbfgs", lr=0.1, **WHOLE)
    assert_same(result, *alone(lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1), batch=N, epochs=6), rtol=CLOSE)
    assert_lower(result)


def searching(net):
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_lbfgs_with_a_line_search_by_hook(training, nproc):
    result = train(training, nproc, hooks={"optimizer": searching}, **WHOLE)
    assert_same(result, *alone(searching, batch=N, epochs=6), rtol=CLOSE)
    assert_lower(result)


def test_lbfgs_with_accumulation_and_a_schedule(training):
    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def plain(net):
        return torch.optim.LBFGS(net.parameters(), lr=0.1)

    result = train(training, 2, optimizer="lbfgs", lr=0.1, accumulate=3, hooks={"scheduler": halving}, **WHOLE)
    assert_same(result, *alone(plain, scheduler_of=halving, batch=N, epochs=6), rtol=CLOSE)
    np.testing.assert_allclose(result.history["lr"], 0.1 * 0.5 ** np.arange(6))


def test_lbfgs_with_a_share_that_does_not_divide(training):
    results = [train(training, nproc, optimizer="lbfgs", lr=0.1, batch_size=60, epochs=6, drop_last=False, val_split=0.15) for nproc in (1, 2)]
    assert results[0].history["samples"].tolist() == results[1].history["samples"].tolist() == [51] * 6
    np.testing.assert_allclose(results[0].history["loss"], results[1].history["loss"], rtol=CLOSE)


def test_lbfgs_with_the_steps_own_weights(training):
    def weighted(model, batch):
        x, y = batch
        weights = x[:, 0].abs()
        errors = (model(x) - y).square().mean(dim=1)
        return {"loss": (errors * weights).sum() / weights.sum(), "weight": weights.sum()}

    results = [training(nproc, make, {"training_step": weighted}, optimizer="lbfgs", lr=0.1, **WHOLE) for nproc in (1, 2)]
    np.testing.assert_allclose(results[0].history["loss"], results[1].history["loss"], rtol=CLOSE)
    assert_lower(results[1])


def in_groups(net):
    net[0].bias.requires_grad_(False)
    return torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.2}, {"params": net[2].parameters()}], lr=0.05, momentum=0.9)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_groups_of_a_hook_keep_their_rates_and_their_ratio_under_a_schedule(training, nproc):
    def falling(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)

    # The same freezing happens before the model is replicated, where a model with parameters that never get a gradient belongs.
    def frozen():
        net, train_data, val_data = make()
        net[0].bias.requires_grad_(False)
        return net, train_data, val_data

    result = training(nproc, frozen, {"loss": mse, "optimizer": in_groups}, epochs=EPOCHS, batch_size=BATCH, schedule="linear")
    assert_same(result, *alone(in_groups, scheduler_of=falling))
    np.testing.assert_allclose(result.history["lr"], 0.2 * (1 - np.arange(10) / 10))
    np.testing.assert_array_equal(result.weights[0]["0.bias"], make()[0][0].bias.detach().numpy())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_goes_from_the_warm_up_to_the_last_step_of_the_run(training, schedule):
    rates = train(training, 2, schedule=schedule, warmup_steps=4, lr=0.4, optimizer="sgd").history["lr"]
    np.testing.assert_allclose(rates[:4], [0.1, 0.2, 0.3, 0.4])
    assert (np.diff(rates[3:]) < 0).all()
    assert 0 < rates[-1] < 0.06


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_plateau_is_fed_with_the_value_that_is_monitored(training, monitor):
    def stuck(model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y) * 0 + 1.0

    data = {"val_split": 0.2} if monitor == "val_loss" else {}
    result = training(
        2, make, {"training_step": stuck}, epochs=5, batch_size=12, schedule="plateau", patience=3, monitor=monitor, lr=1.0, optimizer="sgd", **data
    )
    by_epoch = [result.history["lr"][result.history["epoch"] == epoch][0] for epoch in np.unique(result.history["epoch"])]
    assert by_epoch[:4] == pytest.approx([1.0, 1.0, 1.0, 0.1])
