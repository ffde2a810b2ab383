"""Optimizers by option and by hook: what is passed on, what is refused, what a checkpoint brings back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.evaluation.errors import StepError
from nbddp.worker.optim import make_optimizer, needs_closure
from nbddp.worker.schedule import Scheduler

CLASSES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "lbfgs": torch.optim.LBFGS,
}


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def made(model=None, hook=None, lr=None, **options):
    return make_optimizer(net() if model is None else model, TrainConfig(**options), lr=lr, hook=hook)


@pytest.mark.parametrize("name", CLASSES)
def test_options_name_torchs_optimizers_with_torchs_defaults(name):
    optimizer = made(optimizer=name)
    assert type(optimizer) is CLASSES[name]
    assert optimizer.defaults == CLASSES[name](net().parameters()).defaults


@pytest.mark.parametrize("name", CLASSES)
def test_the_rate_in_effect_is_the_one_given(name):
    assert made(optimizer=name, lr=0.25).param_groups[0]["lr"] == 0.25


def test_each_option_reaches_the_optimizer():
    assert made(optimizer="adam", weight_decay=0.5).defaults["weight_decay"] == 0.5
    assert made(optimizer="adamw", weight_decay=0).defaults["weight_decay"] == 0
    assert made(optimizer="sgd", momentum=0.9, weight_decay=0.1).defaults["momentum"] == 0.9
    assert made(optimizer="rmsprop", momentum=0.9).defaults["momentum"] == 0.9
    assert made(optimizer="adagrad", fused=True).defaults["fused"] is True


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd"])
def test_fused_kernels_step(name):
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = made(model, optimizer=name, fused=True, lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd"])
def test_fused_kernels_step_on_a_gpu(name):
    model = net().cuda()
    before = copy.deepcopy(model.state_dict())
    optimizer = made(model, optimizer=name, fused=True, lr=0.1)
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_parameters_that_do_not_require_a_gradient_are_left_out():
    model = net()
    model[0].requires_grad_(False)
    assert [tuple(p.shape) for p in made(model).param_groups[0]["params"]] == [(2, 6), (2,)]


class WithPhases(nn.Module):
    def __init__(self):
        super().__init__()
        self.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    "make, what",
    [
        pytest.param(WithPhases, "phases is complex64", id="complex"),
        pytest.param(lambda: nn.Sequential(nn.Linear(2, 2), nn.EmbeddingBag(4, 2, sparse=True)), "1.weight has sparse gradients", id="sparse"),
    ],
)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_is_refused_where_torch_would_refuse_the_first_step(make, what, name):
    model = make()
    with pytest.raises(StepError, match=f"adam, adamw, adagrad, sgd have fused kernels for dense gradients of real numbers, and {what}: leave fused out"):
        made(model, optimizer=name, fused=True)
    model.requires_grad_(False)
    model.add_module("head", nn.Linear(2, 2))
    made(model, optimizer=name, fused=True)  # what is frozen has no say


def test_what_an_optimizer_does_not_have_is_refused_here_too():
    def unchecked(**options):
        return TrainConfig.model_construct(**{**dict(TrainConfig()), **options})

    for options, message in [
        ({"optimizer": "rmsprop", "fused": True}, "adam, adamw, adagrad, sgd have fused kernels, rmsprop has none"),
        ({"optimizer": "lbfgs", "fused": True}, "lbfgs has none"),
        ({"optimizer": "lbfgs", "weight_decay": 0.1}, "weight_decay=0.1: lbfgs has no weight_decay"),
        ({"optimizer": "adam", "momentum": 0.1}, "momentum=0.1: adam has no momentum"),
    ]:
        with pytest.raises(StepError, match=message):
            make_optimizer(net(), unchecked(**options), lr=None, hook=None)


# -- hooks


def test_a_hook_may_return_groups_with_rates_of_their_own_and_frozen_parameters():
    def grouped(model):
        model[0].weight.requires_grad_(False)
        return torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1)

    optimizer = made(hook=grouped)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_a_hook_returns_an_optimizer_of_the_model_it_was_given():
    with pytest.raises(StepError, match=r"optimizer\(model\) returned NoneType"):
        made(hook=lambda model: None)
    with pytest.raises(StepError, match=r"holds 4 parameters that are not the model's \(the first of shape \(6, 4\)\)"):
        made(hook=lambda model: torch.optim.SGD(net().parameters(), lr=0.1))


def test_a_hook_returns_an_optimizer_with_something_to_train():
    def frozen(model):
        return torch.optim.SGD(model.requires_grad_(False).parameters(), lr=0.1)

    with pytest.raises(StepError, match="SGD over parameters of which none requires a gradient: nothing would train"):
        made(hook=frozen)


def test_which_optimizers_need_a_closure():
    assert needs_closure(made(optimizer="lbfgs"))
    assert not any(needs_closure(made(optimizer=name)) for name in CLASSES if name != "lbfgs")


def test_a_scheduler_hides_no_need_of_a_closure():
    optimizer = made(optimizer="lbfgs")
    Scheduler(optimizer, TrainConfig(), lambda o: torch.optim.lr_scheduler.StepLR(o, 1), total_steps=None)
    assert needs_closure(optimizer)


def test_a_search_needs_gradients_that_do_not_depend_on_those_before():
    with pytest.raises(StepError, match=r"grad_compression=powersgd gives another gradient .* LBFGS compares them: use bf16 or fp16"):
        made(hook=searching, grad_compression="powersgd")
    made(hook=searching, grad_compression="bf16")
    with pytest.raises(ConfigError, match=r"grad_compression=powersgd gives another gradient .* lbfgs compares them: bf16, fp16 or none"):
        made(optimizer="lbfgs", grad_compression="powersgd")
    made(optimizer="lbfgs", grad_compression="bf16")


# -- over a checkpoint


def train(model, optimizer, first, last):
    for step in range(first, last + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=model[0].weight.dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def in_groups(model):
    return torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.1, "betas": (0.5, 0.9)}, {"params": model[2].parameters()}], lr=0.01, amsgrad=True)


def searching(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2, line_search_fn="strong_wolfe")


CASES = [pytest.param(None, {"optimizer": name}, id=name) for name in CLASSES]
CASES += [pytest.param(None, {"optimizer": name, "fused": True}, id=f"{name} fused") for name in ("adam", "adamw", "adagrad", "sgd")]
CASES += [
    pytest.param(None, {"optimizer": "sgd", "momentum": 0.9}, id="momentum"),
    pytest.param(None, {"optimizer": "rmsprop", "momentum": 0.9}, id="rmsprop momentum"),
]
CASES += [pytest.param(in_groups, {}, id="groups"), pytest.param(searching, {}, id="line search")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hook, options", CASES)
def test_five_steps_a_checkpoint_and_five_steps_are_ten_steps(hook, options, dtype, tmp_path):
    lr = None if hook else 0.05
    whole, half, resumed = net(dtype), net(dtype), net(dtype)
    train(whole, made(whole, hook, lr, **options), 1, 10)

    optimizer = made(half, hook, lr, **options)
    train(half, optimizer, 1, 5)
    checkpoint.write(tmp_path / "last.pt", {"model": checkpoint.model_state(half), "optimizer": checkpoint.plain(optimizer.state_dict(), "optimizer")})
    content = checkpoint.read(tmp_path / "last.pt")
    optimizer = made(resumed, hook, lr, **options)
    resumed.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    train(resumed, optimizer, 6, 10)

    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
