"""Loss scaling, and what the guard makes of gradients that are not finite, without other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbddp.config import TrainConfig
from nbddp.evaluation.errors import StepError
from nbddp.precision import autocast_context
from nbddp.worker.guard import TAKEN, TOO_LARGE, Guard, Verdict
from nbddp.worker.scaler import LossScaler

CPU = torch.device("cpu")
REFUSED = {"warn": Verdict(applied=False), "skip": Verdict(applied=False), "stop": Verdict(applied=False, stop=True)}


class Case:
    """A guarded model whose loss is scaled from 8 down, or from `scale`."""

    def __init__(self, net, scale=8.0, **options):
        self.net, self.scaler = net, LossScaler(net.named_parameters(), CPU)
        self.scaler.load({**self.scaler.state(), "scale": scale, "growth_interval": 3})
        self.guard = Guard(TrainConfig(precision="fp16", **options), net, list(net.parameters()), scaler=self.scaler)

    def backward(self, loss):
        self.net.zero_grad()
        self.scaler.scaled(loss).backward()


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_gradients_come_back_as_they_would_be_unscaled():
    net, x = linear(), torch.randn(4, 3)
    case = Case(net, scale=2.0**16)
    net(x).square().sum().backward()
    expected = net.weight.grad.clone()
    case.backward(net(x).square().sum())
    assert torch.equal(net.weight.grad, expected * 2**16)
    assert case.guard.judge() is TAKEN
    assert torch.equal(net.weight.grad, expected)


def test_clipping_follows_unscaling():
    net, x = linear(), torch.randn(4, 3)
    plain = Guard(TrainConfig(clip_norm=0.1), net, list(net.parameters()))
    net(x).square().sum().backward()
    assert plain.judge() is TAKEN
    expected = net.weight.grad.clone()
    case = Case(net, scale=2.0**16, clip_norm=0.1)
    case.backward(net(x).square().sum())
    assert case.guard.judge() is TAKEN
    torch.testing.assert_close(net.weight.grad, expected)


def test_parameters_that_no_optimizer_holds_are_unscaled_too():
    net, x = nn.Sequential(linear(), nn.Linear(2, 2)), torch.ones(1, 3)
    case = Case(net, scale=2.0**10)
    case.backward(net(x).sum())
    case.guard.judge()
    assert float(net[1].bias.grad[0]) == 1.0


def test_complex_and_sparse_gradients_are_unscaled():
    net = nn.Module()
    net.phase, net.table = nn.Parameter(torch.tensor([1 + 2j, 3j])), nn.Embedding(4, 2, sparse=True)
    case = Case(net, scale=4.0)
    case.backward((net.phase * (1 - 1j)).sum().real + net.table(torch.tensor([1, 1])).sum())
    assert case.guard.judge() is TAKEN
    assert net.phase.grad.tolist() == [1 + 1j, 1 + 1j]
    assert net.table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    case.backward((net.phase * torch.tensor([1, float("inf")])).sum().real)
    assert case.guard.judge(1.0) is TOO_LARGE


@pytest.mark.parametrize("on_nan", REFUSED)
def test_an_overflow_is_left_to_the_scaler_under_every_policy(on_nan):
    net = nn.BatchNorm1d(2)
    case = Case(net, on_nan=on_nan)
    case.backward(net(torch.randn(3, 2)).square().sum())
    net.weight.grad[0] = float("inf")
    assert case.guard.judge(1.0) is TOO_LARGE
    assert case.scaler.scale == 4.0
    assert net.num_batches_tracked == 1


@pytest.mark.parametrize("on_nan", REFUSED)
def test_a_loss_that_is_not_finite_follows_the_policy_and_the_scale_stays(on_nan):
    net = nn.BatchNorm1d(2)
    case = Case(net, on_nan=on_nan)
    case.guard.begin()
    loss = net(torch.full((3, 2), float("nan"))).sum()
    case.backward(loss)
    assert case.guard.judge(float(loss.detach())) == REFUSED[on_nan]
    assert case.scaler.scale == 8.0
    assert net.running_mean.tolist() == [0.0, 0.0]
    assert net.num_batches_tracked == 0


@pytest.mark.parametrize("on_nan", REFUSED)
def test_gradients_that_are_not_finite_at_any_scale_follow_the_policy(on_nan):
    net, verdicts, scales = linear(), [], []
    case = Case(net, on_nan=on_nan)
    for _ in range(6):
        case.backward(net(torch.zeros(1, 3)).sum())
        net.bias.grad[0] = float("nan")
        verdicts.append(case.guard.judge(1.0))
        scales.append(case.scaler.scale)
    assert verdicts == [TOO_LARGE] * 4 + [REFUSED[on_nan]] * 2
    assert scales == [4.0, 2.0, 1.0, 0.5, 0.5, 0.5]


def test_the_scale_grows_after_steps_that_were_finite():
    net, scales = linear(), []
    case = Case(net)
    for _ in range(6):
        case.backward(net(torch.ones(1, 3)).sum())
        assert case.guard.judge() is TAKEN
        scales.append(case.scaler.scale)
    assert scales == [8, 8, 16, 16, 16, 32]


def test_steps_without_any_gradient_leave_the_scaler_as_it_is():
    net = linear()
    case = Case(net)
    for _ in range(4):
        case.scaler.scaled(torch.ones((), requires_grad=True))
        assert case.guard.judge() is TAKEN
    assert case.scaler.scale == 8.0


def test_a_loaded_scaler_goes_on():
    net = linear()
    first, second = Case(net), Case(net, scale=1.0)
    for case in (first, first):
        case.backward(net(torch.ones(1, 3)).sum())
        case.guard.judge()
    second.scaler.load(first.scaler.state())
    for case in (first, second):
        case.backward(net(torch.ones(1, 3)).sum())
        case.guard.judge()
        assert case.scaler.state() == {"scale": 16.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 0}


def test_a_loss_in_float16_is_scaled_in_float32():
    case = Case(linear(), scale=2.0**20)
    scaled = case.scaler.scaled(torch.ones((1,), dtype=torch.float16, requires_grad=True))
    assert (scaled.dtype, float(scaled.detach())) == (torch.float32, 2.0**20)


def test_parameters_in_float16_are_refused_by_name():
    net = nn.Sequential(linear(), linear().half())
    with pytest.raises(StepError, match=r"precision=fp16 keeps the parameters in float32 .* 1.weight, 1.bias are float16 already: model.float\(\)"):
        LossScaler(net.named_parameters(), CPU)
    frozen = net.requires_grad_(False)
    frozen[0].requires_grad_(True)
    LossScaler(frozen.named_parameters(), CPU)


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_by_name(precision, dtype):
    with autocast_context(precision, CPU):
        assert linear()(torch.ones(1, 3)).dtype is dtype
        assert linear().double()(torch.ones(1, 3).double()).dtype is torch.float64


@pytest.mark.parametrize("precision", ["auto", "fp8", "16-mixed"])
def test_a_precision_that_is_not_resolved_is_refused(precision):
    with pytest.raises(ValueError, match=f"precision={precision} is not one of fp32, bf16, fp16"):
        autocast_context(precision, CPU)
