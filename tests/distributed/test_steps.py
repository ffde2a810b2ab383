"""What steps, hooks and models may be, on real ranks: which train alike on one rank and on several, and which are refused in words."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from nbddp.errors import ConfigError
from nbddp.evaluation.errors import StepError
from support.ranks import RankError

pytestmark = pytest.mark.distributed

N, FEATURES = 48, 5


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), y.to(dtype))


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return net, data(), TensorDataset(*data()[:13])


def mse(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def run(training, nproc, step=mse, model=make, hooks=None, **options):
    options = {"epochs": 2, "batch_size": 12, "lr": 0.05, **options}
    return training(nproc, model, {"training_step": step, **(hooks or {})}, **options)


def assert_alike(one, *others, rtol=1e-10):
    """The same curve, the same weights, and on each run all replicas the same bits."""
    for other in others:
        np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=rtol, atol=1e-13)
    for result in (one, *others):
        for weights in result.weights:
            for name, value in weights.items():
                np.testing.assert_array_equal(value, result.weights[0][name], err_msg=name)
                np.testing.assert_allclose(value, one.weights[0][name], rtol=rtol * 100, atol=1e-11, err_msg=name)


def assert_trained(result, make=make):
    before = {name: value.detach().numpy() for name, value in make()[0].state_dict().items()}
    assert any((value != before[name]).any() for name, value in result.weights[0].items())
    assert np.isfinite(result.history["loss"]).all()


# -- what a step returns


def test_a_step_returns_the_loss_or_a_dict_with_more(training):
    def verbose(model, batch):
        x, y = batch
        output = model(x)
        errors = ((output - y) ** 2).mean(dim=1)
        return {"loss": errors.mean(), "weight": len(x), "output": output, "target": y, "largest": errors.max(), "count": len(x), "flag": True}

    plain = run(training, 2)
    result = run(training, 2, verbose)
    assert_alike(plain, result)
    assert result.history["flag"].tolist() == [1.0] * 8
    assert result.history["count"].tolist() == [6.0] * 8  # weighted means over ranks
    assert (result.history["largest"] > result.history["loss"]).all()
    assert {"val_loss", "val_largest", "val_count", "val_flag"} <= set(result.epochs)
    assert not {"output", "target", "weight"} & {*result.history, *result.epochs}


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda loss: None, "training_step returned NoneType: it returns the scalar loss, or a dict with 'loss'"),
        (lambda loss: (loss, loss), "training_step returned tuple"),
        (lambda loss: {"output": loss}, "training_step returned a dict without 'loss': output"),
        (lambda loss: {}, "a dict without 'loss': it is empty"),
        (lambda loss: loss.reshape(1).expand(3), r"a loss of shape \(3,\): it must be a scalar, the mean over the samples; .mean\(\) makes one"),
        (lambda loss: {"loss": loss.item()}, "a loss of type float: it must be a scalar tensor"),
        (lambda loss: loss.long(), "a loss of dtype torch.int64: it must be a real floating-point scalar"),
        (lambda loss: loss.to(torch.complex128), "a loss of dtype torch.complex128"),
        (lambda loss: loss.detach(), r"a loss without a gradient: compute it from the model's output, without detach\(\) or no_grad\(\)"),
        (lambda loss: {"loss": loss, "label": "cat"}, "training_step returned label: str; beside loss, weight, output and target a step returns real scalars"),
        (lambda loss: {"loss": loss, "grid": torch.zeros(2, 3)}, r"returned grid: a tensor of shape \(2, 3\), torch.float32"),
        (lambda loss: {"loss": loss, "weight": torch.ones(6)}, r"returned weight: a tensor of shape \(6,\)"),
        (lambda loss: {"loss": loss, "lr": 0.1}, "returned a scalar lr, which is recorded of every step already: give it another name"),
    ],
)
def test_a_wrong_return_is_refused_in_words(training, returned, message):
    with pytest.raises(StepError, match=message):
        run(training, 2, lambda model, batch: returned(mse(model, batch)))


def test_a_loss_of_shape_one_is_a_scalar(training):
    assert_alike(run(training, 1), run(training, 2, lambda model, batch: mse(model, batch).reshape(1)))


class Calls:
    """A step that does something else in a call of its own choosing."""

    def __init__(self, at, otherwise):
        self.at, self.otherwise, self.calls = at, otherwise, 0

    def __call__(self, model, batch):
        self.calls += 1
        loss = mse(model, batch)
        return self.otherwise(loss) if self.calls == self.at else {"loss": loss, "a": 1.0, "b": 2.0}


@pytest.mark.parametrize("at", [2, 4])
def test_scalars_whose_names_change_between_steps_are_named(training, at):
    with pytest.raises(StepError, match="training_step returned the scalars a, and before that the scalars a, b: it returns the same names in every step"):
        run(training, 2, Calls(at, lambda loss: {"loss": loss, "a": 1.0}), accumulate=2)


def test_a_weight_that_comes_later_is_named(training):
    with pytest.raises(StepError, match="returned the scalars a, b, weight, and before that the scalars a, b"):
        run(training, 2, Calls(3, lambda loss: {"loss": loss, "a": 1.0, "b": 2.0, "weight": 6}))


def by_rank(*steps):
    def step(model, batch):
        return steps[torch.distributed.get_rank()](mse(model, batch))

    return step


def test_scalars_whose_names_differ_between_ranks_are_named(training):
    step = by_rank(lambda loss: {"loss": loss, "a": 1.0}, lambda loss: {"loss": loss, "weight": 1})
    with pytest.raises(StepError, match="returned the scalars a on rank 0 and the scalars weight on rank 1: it returns the same names on every rank"):
        run(training, 2, step)


def test_scalars_in_another_order_on_another_rank_are_not_mixed_up(training):
    step = by_rank(lambda loss: {"loss": loss, "a": 1.0, "b": 2.0}, lambda loss: {"loss": loss, "b": 2.0, "a": 1.0})
    result = run(training, 2, step)
    assert result.history["a"].tolist() == [1.0] * 8
    assert result.history["b"].tolist() == [2.0] * 8


def test_validation_scalars_that_differ_between_ranks_are_named(training):
    step = by_rank(lambda loss: {"loss": loss, "a": 1.0}, lambda loss: {"loss": loss})
    with pytest.raises(StepError, match="validation_step returned other scalars on other ranks"):
        run(training, 2, hooks={"validation_step": step})


# -- batches


class Fields(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "s"


class Shaped(Dataset):
    """The same samples in another shape."""

    def __init__(self, of):
        self.data, self.of = data(), of

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.of(*self.data[index])


@pytest.mark.parametrize(
    "of, take",
    [
        (lambda x, y: {"x": x, "more": {"y": y}}, lambda b: (b["x"], b["more"]["y"])),
        (lambda x, y: (x, (y, "word")), lambda b: (b[0], b[1][0])),
        (lambda x, y: Fields(x, y), lambda b: (b.x, b.y)),
        (lambda x, y: Sample(x, y), lambda b: (b.x, b.y)),
        (lambda x, y: {"nested": [Sample(x, y)]}, lambda b: (b["nested"][0].x, b["nested"][0].y)),
    ],
    ids=["dict", "nested tuple with strings", "namedtuple", "dataclass", "dataclass in a list in a dict"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_any_structure(training, of, take, workers):
    def make_shaped():
        return make()[0], Shaped(of), None

    def step(model, batch):
        return mse(model, take(batch))

    assert_alike(run(training, 1), run(training, 2, step, make_shaped, num_workers=workers))


def test_the_loss_hook_wants_inputs_and_target(training):
    def make_dicts():
        return make()[0], Shaped(lambda x, y: {"x": x, "y": y}), None

    with pytest.raises(StepError, match=r"loss\(output, target\) needs batches \(\*inputs, target\), and this data gives a dict: write training_step"):
        training(2, make_dicts, {"loss": nn.functional.mse_loss}, batch_size=12)


def test_the_loss_hook_passes_several_inputs(training):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make()[0]

        def forward(self, x, shift):
            return self.net(x) + shift

    def make_two():
        return Two(), Shaped(lambda x, y: (x, y * 0, y)), None

    result = training(2, make_two, {"loss": nn.functional.mse_loss}, epochs=2, batch_size=12, lr=0.05)
    np.testing.assert_allclose(result.history["loss"], run(training, 1).history["loss"], rtol=1e-10)


def test_a_share_set_aside_is_validated_on_and_never_trained_on(training):
    """SGD with lr 1 moves the row of every sample that is trained on; the loss of validation is the mean of the numbers set aside."""

    class Numbers(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return index

    def make_rows():
        return nn.Embedding.from_pretrained(torch.zeros(40, 1, dtype=torch.float64), freeze=False), Numbers(), None

    def validation_step(model, batch):
        return {"loss": batch.double().mean(), "moved": (model(batch) != 0).double().mean()}

    def split(nproc):
        hooks = {"validation_step": validation_step}
        step = {"val_split": 0.3, "optimizer": "sgd", "lr": 1.0, "batch_size": 6, "drop_last": False}
        result = run(training, nproc, lambda model, batch: model(batch).mean(), make_rows, hooks, **step)
        return result.weights[0]["weight"][:, 0] == 0, result

    (aside, one), (again, three) = split(1), split(3)
    assert aside.sum() == 12
    np.testing.assert_array_equal(aside, again)
    for result in (one, three):
        assert result.epochs["val_moved"].tolist() == [0.0, 0.0]
        assert result.epochs["val_loss"].tolist() == pytest.approx([np.flatnonzero(aside).mean()] * 2, rel=1e-12)


# -- models


class LogProb(nn.Module):
    """A density without a forward."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
        self.net = make()[0]

    def log_prob(self, x):
        return -((x - self.mean) ** 2).sum(dim=1) - self.net(x).square().sum(dim=1)


def two_forwards(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y) + 0.1 * model(x * 2).square().mean()


def sub_module(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model[2](torch.tanh(model[0](x))), y)


@pytest.mark.parametrize(
    "step, model",
    [
        (lambda model, batch: -model.log_prob(batch[0]).mean(), lambda: (LogProb(), data(), None)),
        (two_forwards, make),
        (sub_module, make),
    ],
    ids=["log_prob", "two forwards", "sub-module"],
)
def test_whatever_a_step_calls_is_synchronised(training, step, model):
    one = run(training, 1, step, model)
    assert_trained(one, model)
    assert_alike(one, run(training, 2, step, model), run(training, 3, step, model))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(FEATURES, FEATURES).double()
        self.b = nn.Linear(FEATURES, FEATURES).double()
        self.b.weight = self.a.weight
        self.last = nn.Linear(FEATURES, 2).double()

    def forward(self, x):
        return self.last(torch.tanh(self.b(torch.tanh(self.a(x)))))


def seeded(of):
    def make_model():
        torch.manual_seed(5)
        return of(), data(), None

    return make_model


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(*make()[0])
        self[0].requires_grad_(requires_grad=False)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 2, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def normed(norm):
    return lambda: nn.Sequential(norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize(
    "of, options",
    [
        (Tied, {}),
        (Frozen, {}),
        (Complex, {"optimizer": "sgd"}),
        (Complex, {"optimizer": "adam", "clip_norm": 0.05}),
        (normed(nn.utils.parametrizations.weight_norm), {}),
        (normed(nn.utils.parametrizations.spectral_norm), {}),
    ],
    ids=["tied", "frozen", "complex", "complex clipped", "weight_norm", "spectral_norm"],
)
def test_models_of_every_kind_train_alike(training, of, options):
    one = run(training, 1, model=seeded(of), **options)
    assert_trained(one, seeded(of))
    assert_alike(one, run(training, 2, model=seeded(of), **options), rtol=1e-9)


def test_tied_weights_stay_tied_and_frozen_ones_stay(training):
    tied = run(training, 2, model=seeded(Tied)).weights[1]
    np.testing.assert_array_equal(tied["a.weight"], tied["b.weight"])
    frozen = run(training, 2, model=seeded(Frozen), weight_decay=0.1).weights[1]
    np.testing.assert_array_equal(frozen["0.weight"], seeded(Frozen)()[0].state_dict()["0.weight"].numpy())


def test_sparse_gradients_train_alike(training):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 2, sparse=True).double()
            self.shift = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return self.embed(x[:, 0].abs().mul(5).long().clamp(max=19)) + self.shift

    options = {"optimizer": "sgd"}
    assert_alike(run(training, 1, model=seeded(Words), **options), run(training, 2, model=seeded(Words), **options))


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}], ids=str
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_options_of_ddp_do_not_change_the_answer(training, options, accumulate):
    assert_alike(run(training, 1), run(training, 3, accumulate=accumulate, **options))


# -- parameters without a gradient


class Spare(nn.Module):
    """Its second head is used while `used` says so."""

    def __init__(self, used):
        super().__init__()
        self.body, self.spare, self.used, self.calls = make()[0], nn.Linear(FEATURES, 2).double(), used, 0

    def forward(self, x):
        self.calls += self.training
        return self.body(x) + (self.spare(x) if self.used(self.calls) else 0)


def spare(used):
    return lambda: (Spare(used), data(), None)


@pytest.mark.parametrize("last", [0, 3, 7], ids=["from the first step on", "from a later step on", "in the last step alone"])
def test_parameters_without_a_gradient_are_named_with_the_option(training, last):
    with pytest.raises(StepError, match=r"the step does not use spare\.weight, spare\.bias: no gradient arrives there.*--find-unused-parameters"):
        run(training, 2, model=spare(lambda calls: calls <= last))


def test_parameters_used_in_a_first_micro_batch_alone_are_named(training):
    with pytest.raises(StepError, match=r"the step does not use spare\.weight, spare\.bias"):
        run(training, 2, model=spare(lambda calls: calls % 2 == 1), accumulate=2)


def test_parameters_that_one_rank_does_not_use_are_named_by_it(training):
    with pytest.raises(StepError, match=r"the step does not use spare\.weight"):
        run(training, 2, model=spare(lambda calls: calls < 3 or torch.distributed.get_rank() == 0))


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"find_unused_parameters": True, "accumulate": 2}], ids=str)
def test_with_the_option_they_train(training, options):
    used = spare(lambda calls: calls in (3, 5))
    assert_alike(run(training, 1, model=used, **options), run(training, 2, model=used, **options))


def test_on_one_rank_nobody_waits_for_a_gradient(training):
    assert_trained(run(training, 1, model=spare(lambda calls: False)), spare(lambda calls: False))


# -- optimizers and schedulers


def plain_loop(rank, optimizer, scheduler=None, clip=None, epochs=2, batch=12, accumulate=1):
    """What a hand would write for one process, over the same order of samples."""
    from nbddp.data import Shares

    net, train, _ = make()
    optimizer = optimizer(net.parameters())
    scheduler = scheduler and scheduler(optimizer)
    losses = []
    for epoch in range(1, epochs + 1):
        shares = Shares(N, batch, 1, 0, accumulate, drop_last=True, shuffle=True, seed=0)
        for number, micro in enumerate(shares.epoch(epoch)):
            x, y = train[torch.from_numpy(micro.indices)]
            loss = nn.functional.mse_loss(net(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if number % accumulate == accumulate - 1:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler:
                    scheduler.step()
    return np.array(losses).reshape(-1, accumulate).mean(axis=1), {name: value.numpy() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    "options, optimizer",
    [
        ({"optimizer": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
        ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p)),
        ({"optimizer": "adamw", "weight_decay": 0.3, "fused": True}, lambda p: torch.optim.AdamW(p, weight_decay=0.3, fused=True)),
        ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
        ({"optimizer": "sgd", "fused": True}, lambda p: torch.optim.SGD(p, fused=True)),
        ({"optimizer": "adagrad", "lr": 0.1, "fused": True}, lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True)),
        ({"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.5}, lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
    ],
    ids=str,
)
def test_one_rank_is_the_loop_that_a_hand_would_write_bit_for_bit(training, ranks, options, optimizer):
    ((losses, weights),) = ranks(1, plain_loop, optimizer)
    result = training(1, make, {"training_step": mse}, epochs=2, batch_size=12, **options)
    np.testing.assert_array_equal(result.history["loss"], losses)
    for name, value in weights.items():
        np.testing.assert_array_equal(result.weights[0][name], value, err_msg=name)


def test_two_ranks_with_accumulation_and_clipping_are_that_loop_too(training, ranks):
    ((losses, weights),) = ranks(1, plain_loop, lambda p: torch.optim.AdamW(p, lr=0.05), None, 0.1)
    result = run(training, 2, clip_norm=0.1, accumulate=3)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-11)
    for name, value in weights.items():
        np.testing.assert_allclose(result.weights[1][name], value, rtol=1e-9, err_msg=name)


def test_a_scheduler_advances_with_every_step(training, ranks):
    hooks = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)}
    result = training(2, make, {"training_step": mse, **hooks}, epochs=2, batch_size=12)
    ((losses, _),) = ranks(1, plain_loop, lambda p: torch.optim.SGD(p, lr=0.1), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    np.testing.assert_allclose(result.history["lr"], [0.1 * 0.5**step for step in range(8)], rtol=1e-12)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-11)


def test_a_scheduler_advances_with_every_epoch(training):
    hooks = {"scheduler": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2], gamma=0.1)}
    result = run(training, 2, hooks=hooks, epochs=3, scheduler_interval="epoch")
    np.testing.assert_allclose(result.history["lr"], np.repeat([0.05, 0.005, 0.0005], 4))


def test_a_plateau_is_told_by_the_validation(training):
    def validation_step(model, batch):
        return {"loss": mse(model, batch) * 0 + 1.0}

    plateau = {"scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=1, threshold=0)}
    hooks = {"validation_step": validation_step, **plateau}
    every = run(training, 2, hooks=hooks, epochs=5, scheduler_interval="epoch")
    np.testing.assert_allclose(every.history["lr"], np.repeat([0.05, 0.05, 0.05, 0.005, 0.005], 4))
    second = run(training, 2, hooks=hooks, epochs=8, scheduler_interval="epoch", val_every=2)
    np.testing.assert_allclose(second.history["lr"], np.repeat([0.05] * 6 + [0.005] * 2, 4), err_msg="an epoch without a validation counts neither way")


@pytest.mark.parametrize(
    "hooks, options, message",
    [
        ({"optimizer": lambda model: "adam"}, {}, r"optimizer\(model\) returned str: it must be a torch.optim.Optimizer"),
        (
            {"optimizer": lambda model: torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)},
            {},
            r"holds 1 parameters that are not the model's.*shape \(3,\)",
        ),
        ({"scheduler": lambda optimizer: optimizer}, {}, r"scheduler\(optimizer\) returned AdamW: it must be a torch.optim.lr_scheduler"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, {}, "ReduceLROnPlateau advances by the value of an epoch: set --scheduler-interval epoch"),
        ({"optimizer": lambda model: torch.optim.LBFGS(model.parameters())}, {"on_nan": "skip"}, "on_nan=skip can't undo a step of LBFGS.*--on-nan warn"),
    ],
    ids=["wrong optimizer", "foreign parameters", "wrong scheduler", "plateau per step", "lbfgs and skip"],
)
def test_wrong_hooks_are_refused(training, hooks, options, message):
    with pytest.raises(StepError, match=message):
        training(2, make, {"training_step": mse, **hooks}, batch_size=12, **options)


def test_parameters_that_the_optimizer_leaves_out_gather_no_gradients(training):
    """Their gradients count in the norm of every step, which must not grow with the steps before."""
    hooks = {"optimizer": lambda model: torch.optim.SGD(model[2].parameters(), lr=0.05)}

    def step(model, batch):
        assert all(parameter.grad is None for parameter in model.parameters())
        return mse(model, batch)

    one = training(1, make, {"training_step": step, **hooks}, batch_size=12, clip_norm=0.1)
    assert_alike(one, training(2, make, {"training_step": step, **hooks}, batch_size=12, clip_norm=0.1))


def test_a_loss_with_parameters_of_its_own_is_refused(training):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()))

    with pytest.raises(StepError, match=r"loss \(Learned\) has parameters of its own, log_scale: make it a part of the model"):
        training(2, make, {"loss": Learned()}, batch_size=12)


def test_a_model_without_anything_to_train_is_refused(training):
    def make_frozen():
        net, train, val = make()
        return net.requires_grad_(requires_grad=False), train, val

    with pytest.raises(StepError, match="the model has no parameter that requires a gradient: there is nothing to train"):
        run(training, 2, model=make_frozen)


# -- modes and buffers


class Noted(nn.Module):
    """Notes in which mode it is called."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        return x


class Moded(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.whole, self.part = make()[0], Noted(), Noted()
        self.part.eval()

    def forward(self, x):
        return self.net(self.whole(self.part(x)))


def test_validation_is_in_eval_mode_and_modes_come_back(training):
    def validation_step(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return mse(model, batch)

    def step(model, batch):
        loss = mse(model, batch)
        return {"loss": loss, "whole": model.whole.modes[-1], "part": model.part.modes[-1], "top": model.training}

    def moded():
        return Moded(), data(), TensorDataset(*data()[:13])

    history = run(training, 2, step, moded, {"validation_step": validation_step}, val_every="2 steps").history
    assert history["whole"].tolist() == history["top"].tolist() == [1.0] * 8
    assert history["part"].tolist() == [0.0] * 8, "a sub-module that the user put into eval mode stays in it"


def test_a_model_in_eval_mode_is_trained_in_train_mode(training):
    def make_eval():
        net, train, val = make()
        return net.eval(), train, val

    def step(model, batch):
        return {"loss": mse(model, batch), "mode": model.training}

    result = run(training, 1, step, make_eval)
    assert result.history["mode"].tolist() == [1.0] * 8
    assert result.epochs["val_mode"].tolist() == [0.0] * 2


def test_batchnorm_validates_and_saves_the_buffers_of_rank_0(training):
    def make_bn():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double(), data(), TensorDataset(*data()[:13])

    def validation_step(model, batch):
        return {"loss": mse(model, batch), "mean": model[1].running_mean.sum()}

    result = run(training, 2, model=make_bn, hooks={"validation_step": validation_step}, epochs=1)
    saved = torch.load(result.run.checkpoints / "last.pt", weights_only=True)["model"]
    assert saved["1.num_batches_tracked"] == 4
    for weights in result.weights:
        for name, value in saved.items():
            np.testing.assert_array_equal(weights[name], value.numpy(), err_msg=name)
    net = make_bn()[0]
    net.load_state_dict(saved)
    with torch.no_grad():
        x, y = data()[:13]
        expected = nn.functional.mse_loss(net.eval()(x), y).item()
    assert result.epochs["val_loss"].tolist() == pytest.approx([expected], rel=1e-12)
    assert result.epochs["val_mean"].tolist() == pytest.approx([saved["1.running_mean"].sum().item()], rel=1e-12)


def test_buffers_of_every_dtype_are_broadcast(training):
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make()[0]
            for number, dtype in enumerate([torch.bool, torch.int64, torch.uint8, torch.float16, torch.complex64]):
                self.register_buffer(f"b{number}", torch.zeros(3, dtype=dtype))
            self.register_buffer("transposed", torch.zeros(3, 2).T)
            self.register_buffer("empty", torch.zeros(0))

        def forward(self, x):
            return self.net(x)

    def step(model, batch):
        for name, buffer in model.named_buffers():
            buffer.fill_(1 if torch.distributed.get_rank() == 0 else 0)
            assert buffer.numel() or name == "empty"
        return mse(model, batch)

    result = run(training, 2, step, lambda: (Buffers(), data(), None), epochs=1)
    saved = torch.load(result.run.checkpoints / "last.pt", weights_only=True)["model"]
    assert all((value == 1).all() for name, value in saved.items() if not name.startswith("net"))


# -- what is not finite


def poisoned(how, at=3, rank=1):
    """A step that goes wrong in its third call, on rank 1 (or on the only one)."""
    calls = []

    def step(model, batch):
        calls.extend([1] * model.training)
        loss = mse(model, batch)
        here = torch.distributed.get_rank() == min(rank, torch.distributed.get_world_size() - 1)
        return how(loss, model) if len(calls) == at and here and model.training else loss

    return step


POISONS = {
    "nan": lambda loss, model: loss * math.nan,
    "nan added, gradient finite": lambda loss, model: loss + math.nan,
    "inf": lambda loss, model: loss * math.inf,
    "inf added, gradient finite": lambda loss, model: loss + math.inf,
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("nproc", [1, 2])
def test_skip_leaves_out_the_step_on_all_ranks(training, poison, nproc):
    bn_free = run(training, nproc, poisoned(POISONS[poison]), on_nan="skip", epochs=1)
    losses = bn_free.history["loss"]
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [2]
    assert all(np.isfinite(value).all() for weights in bn_free.weights for value in weights.values())
    assert np.isfinite(bn_free.epochs["loss"]).all(), "an epoch's mean is over the steps that count"
    assert np.isfinite(bn_free.epochs["val_loss"]).all()
    (message,) = bn_free.of_kind("message")
    assert message.data["level"] == "warning"
    assert message.data["text"] == f"step 3: the loss of rank {nproc - 1} is not finite; the step is skipped"
    clean = run(training, nproc, epochs=1)
    np.testing.assert_array_equal(losses[:2], clean.history["loss"][:2])


def test_a_skipped_step_is_as_if_it_had_not_been(training, ranks):
    """Weights, optimizer, scheduler and running statistics are those that the same steps without it give."""

    def bn():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)).double(), data(), None

    def skipping(model, batch):
        x, y = batch
        bad = (x == data()[0][0]).all(dim=1).any()  # the batch with sample 0
        return nn.functional.mse_loss(model(x * math.nan if bad else x), y)

    hooks = {"scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)}
    result = run(training, 1, skipping, bn, hooks, epochs=1, on_nan="skip")
    (skipped,) = np.flatnonzero(~np.isfinite(result.history["loss"]))

    def without_it(rank):
        from nbddp.data import Shares

        net, train, _ = bn()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        lr = []
        for number, micro in enumerate(Shares(N, 12, 1, 0, 1, drop_last=True, shuffle=True, seed=0).epoch(1)):
            lr.append(optimizer.param_groups[0]["lr"])
            if number == skipped:
                continue
            x, y = train[torch.from_numpy(micro.indices)]
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
        return lr, {name: value.numpy() for name, value in net.state_dict().items()}

    ((lr, weights),) = ranks(1, without_it)
    np.testing.assert_allclose(result.history["lr"], lr, rtol=1e-12)
    for name, value in weights.items():
        np.testing.assert_array_equal(result.weights[0][name], value, err_msg=name)


def test_a_gradient_that_is_not_finite_is_skipped_and_said(training):
    def step(loss, model):
        return loss + torch.sqrt(model[0].weight * 0).sum() * 0  # finite itself, its gradient 0 * inf

    result = run(training, 2, poisoned(step), on_nan="skip", epochs=1)
    assert np.isfinite(result.history["loss"]).all()
    assert all(np.isfinite(value).all() for value in result.weights[0].values())
    assert [event.data["text"] for event in result.of_kind("message")] == ["step 3: a gradient is not finite, though the loss is; the step is skipped"]


def test_stop_leaves_with_the_weights_before(training):
    before = run(training, 2, max_steps=2)
    result = run(training, 2, poisoned(POISONS["nan added, gradient finite"]), on_nan="stop")
    assert result.progress == [(3, 1, True, "on_nan")] * 2
    assert_alike_weights(before, result)
    assert not result.of_kind("validation")
    assert torch.load(result.run.checkpoints / "last.pt", weights_only=True)["finite"] is True
    assert "the weights are those before this step" in result.of_kind("stopping")[0].data["text"]


def assert_alike_weights(one, other):
    for weights in other.weights:
        for name, value in one.weights[0].items():
            np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_warn_goes_on_and_such_weights_are_never_the_best(training):
    result = run(training, 2, poisoned(POISONS["nan"], at=6), epochs=3)
    assert len(result.history["loss"]) == 12
    assert np.isnan(result.history["loss"][6:]).all()
    (message,) = result.of_kind("message")
    assert message.data["text"] == "step 6: the loss of rank 1 is not finite; training goes on; --on-nan skip or stop keeps the weights finite"
    assert torch.load(result.run.checkpoints / "last.pt", weights_only=True)["finite"] is False
    best = torch.load(result.run.checkpoints / "best.pt", weights_only=True)
    assert (best["epoch"], best["finite"]) == (1, True)
    assert np.isfinite(best["value"])


def ignoring(model, batch):
    """The loss is nan where every target is ignored."""
    x, y = batch
    target = torch.where(x[:, 0] > 0.8, (y[:, 0] > 0).long(), -100)
    return {"loss": nn.functional.cross_entropy(model(x), target), "weight": (target >= 0).sum()}


@pytest.mark.parametrize("on_nan", ["warn", "skip"])
@pytest.mark.parametrize("options", [{"batch_size": 6}, {"batch_size": 6, "drop_last": False, "accumulate": 2}], ids=str)
def test_what_has_weight_0_contributes_nothing(training, on_nan, options):
    def finite_alone(model, batch):
        result = ignoring(model, batch)
        return {**result, "loss": result["loss"] if result["weight"] else model(batch[0]).sum() * 0}  # as a hand would guard it

    one = run(training, 1, finite_alone, on_nan=on_nan, **options)
    several = [run(training, nproc, ignoring, on_nan=on_nan, **options) for nproc in (1, 3)]
    for other in several:
        np.testing.assert_allclose(other.history["loss"], one.history["loss"], rtol=1e-10)
        assert not other.of_kind("message")
        for name, value in other.weights[0].items():
            np.testing.assert_allclose(value, one.weights[0][name], rtol=1e-8, err_msg=name)


# -- replicas


@pytest.mark.parametrize("where", ["parameter", "frozen"])
def test_replicas_that_differ_are_an_error(training, where):
    def step(model, batch):
        loss = mse(model, batch)
        with torch.no_grad():
            model[0].bias[1] += 1e-9 * torch.distributed.get_rank()
        return loss

    def model():
        net, train, val = make()
        net[0].bias.requires_grad_(requires_grad=where == "parameter")
        return net, train, val

    with pytest.raises(RankError, match=r"the replicas of the model differ: 1 parameter of rank 1 \(0\.bias\) are not those of rank 0"):
        run(training, 2, step, model)


def test_one_monitored_name_that_is_not_recorded_lists_those_that_are(training):
    with pytest.raises(StepError, match="monitor=val_acc is not recorded; recorded are loss, val_loss, val_error"):
        run(training, 2, hooks={"validation_step": lambda model, batch: {"loss": mse(model, batch), "error": 1.0}}, monitor="val_acc")


def test_options_are_not_confused(training):
    with pytest.raises(ConfigError):
        run(training, 2, static_graph=True, find_unused_parameters=True)


def test_a_model_and_its_copy_train_alike(training):
    assert_alike(run(training, 1), run(training, 1, model=lambda: (copy.deepcopy(make()[0]), *make()[1:])))


def sparse_make(*, sparse):
    def made():
        torch.manual_seed(1)
        table = nn.EmbeddingBag(20, 6, sparse=sparse, mode="sum").double()
        rows = torch.randint(0, 20, (64, 3), generator=torch.Generator().manual_seed(2))
        return nn.Sequential(table, nn.Linear(6, 1).double()), TensorDataset(rows, rows.double().sum(1, keepdim=True)), None

    return made


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"on_nan": "skip"}, {"clip_norm": 0.5, "on_nan": "stop"}])
def test_sparse_gradients_are_clipped_and_looked_at_like_dense_ones(training, options):
    options = {"optimizer": "sgd", "lr": 0.1, "batch_size": 16, "epochs": 2, **options}
    one, other = (training(2, sparse_make(sparse=sparse), {"loss": nn.functional.mse_loss}, **options) for sparse in (True, False))
    for name, value in one.weights[0].items():
        np.testing.assert_allclose(value, other.weights[0][name], rtol=1e-10)
