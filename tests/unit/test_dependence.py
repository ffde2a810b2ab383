"""Which outputs depend on which inputs: true for networks whose structure is known, without a trace in the model."""

from __future__ import annotations

import copy
import random
import threading
from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import zuko
from nflows.flows import MaskedAutoregressiveFlow
from nflows.transforms.made import MADE
from torch import nn
from torch.nn.utils import prune

from nbddp.errors import ConfigError
from nbddp.norm.dependence import Gain, calls, dependencies, gained
from nbddp.norm.masked import networks
from nbddp.norm.probe import MOST_OUTPUTS

WIDTH = 16


def norm_and_relu():
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU())


def swapped(model, make):
    """A copy with `make(features)` in place of each BatchNorm."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, make(module.num_features))
    return model


def gain(model, make, example):
    return gained(dependencies(model, example), dependencies(swapped(model, make), example))


def hyper(**options):
    return zuko.flows.MAF(5, hidden_features=(WIDTH, WIDTH), activation=norm_and_relu, **options).transform.transforms[0].hyper


def test_an_autoregressive_network_depends_on_what_the_masks_show():
    table = dependencies(hyper(), torch.randn(20, 5)).table
    assert torch.equal(table, torch.ones(5, 5).tril(-1).bool().repeat_interleave(2, 0))


def test_layer_norm_in_an_autoregressive_network_gains_a_pair_that_is_one():
    found = gain(hyper(), nn.LayerNorm, torch.randn(20, 5))
    assert isinstance(found, Gain)
    output, inside = int(found.output.removeprefix("output ")), int(found.input.removeprefix("input "))
    assert inside >= output // 2  # two outputs for each feature
    assert str(found) == f"output {output} would depend on input {inside}"


def test_layer_norm_in_coupling_by_masks_gains_nothing():
    assert gain(hyper(passes=2), nn.LayerNorm, torch.randn(20, 5)) is None


def test_context_beside_coupling_by_masks_gains():
    net = zuko.flows.MAF(4, 3, passes=2, hidden_features=(WIDTH,), activation=norm_and_relu).transform.transforms[0].hyper
    assert gain(net, nn.LayerNorm, torch.randn(4, 7)) == Gain("output 0", "input 0")


@pytest.mark.parametrize("residual", [False, True])
def test_nflows_made(residual):
    made = MADE(4, WIDTH, use_batch_norm=True, use_residual_blocks=residual)
    x = torch.randn(6, 4)
    assert torch.equal(dependencies(made, x).table, torch.ones(4, 4).tril(-1).bool())
    assert gain(made, nn.LayerNorm, x) is not None
    assert gain(made, lambda _: nn.Identity(), x) is None


def test_nflows_transforms_return_two_tensors():
    flow = MaskedAutoregressiveFlow(4, WIDTH, 1, 1, use_random_permutations=False, batch_norm_within_layers=True)
    transform = flow._transform
    found = dependencies(transform, torch.randn(6, 4))
    assert [leaf.path for leaf in found.outputs] == ["[0]", "[1]"]
    assert found.table.shape == (5, 4)
    assert found.table[4].tolist() == [False, True, True, True]  # the log-determinant; the last feature, reversed, is no condition of any
    assert gained(found, dependencies(swapped(transform, nn.LayerNorm), torch.randn(6, 4))).output.endswith(" of output[0]")


class Block(nn.Module):
    """A causal transformer block over (N, L, C), with a norm over the channels first."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.register_buffer("mask", torch.ones(5, 5).triu(1).bool())

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        return x + self.feed(x)


class OverChannels(nn.Module):
    """A norm of (N, C, L) for (N, L, C)."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.mT).mT


def test_a_causal_transformer_block():
    x = torch.randn(3, 5, 4)
    plain = dependencies(Block(OverChannels(nn.BatchNorm1d(4))), x)
    seen = plain.table.reshape(5, 4, 5, 4).any(3).any(1)
    assert torch.equal(seen, torch.ones(5, 5).tril().bool())
    assert gained(plain, dependencies(Block(nn.LayerNorm(4)), x)) is None
    assert gained(plain, dependencies(Block(OverChannels(nn.GroupNorm(1, 4))), x)) == Gain("output (0, 0)", "input (1, 0)")


def test_a_masked_convolution():
    class Masked(nn.Conv2d):
        def __init__(self, before, after, first):
            super().__init__(before, after, 3, padding=1)
            self.register_buffer("mask", torch.ones(3, 3))
            self.mask[1, 2 - first :] = 0
            self.mask[2:] = 0

        def forward(self, x):
            return nn.functional.conv2d(x, self.weight * self.mask, self.bias, padding=1)

    model = nn.Sequential(Masked(1, 8, True), nn.BatchNorm2d(8), nn.ReLU(), Masked(8, 1, False))
    x = torch.rand(2, 1, 4, 4)
    assert not dependencies(model, x).table.triu().any()
    assert gain(model, lambda features: nn.GroupNorm(1, features), x) == Gain("output (0, 0, 0)", "input (0, 0, 0)")


@pytest.mark.parametrize("make", [nn.LayerNorm, lambda features: nn.GroupNorm(4, features)])
def test_a_dense_network_has_nothing_to_gain(make):
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    assert dependencies(model, torch.randn(9, 5)).table.all()
    assert gain(model, make, torch.randn(9, 5)) is None


def test_layers_that_start_at_zero_hide_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert dependencies(model, torch.zeros(1, 3)).table.all()


@pytest.mark.parametrize("depth", [3, 6])
def test_narrow_chains_of_relus_hide_nothing(depth):
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(1, 1), nn.BatchNorm1d(1), nn.ReLU())])
    assert dependencies(model, torch.randn(1, 1)).table.all()


def test_an_lstm_is_causal():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 3, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    seen = dependencies(Last(), torch.randn(4, 5, 2)).table.reshape(5, 3, 5, 2)
    assert torch.equal(seen.all(3).all(1), torch.ones(5, 5).tril().bool())
    assert torch.equal(seen.any(3).any(1), torch.ones(5, 5).tril().bool())


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "result"


@pytest.mark.parametrize(
    "wrap, paths",
    [
        (lambda a, b: {"a": a, "rest": [b, None]}, ["['a']", "['rest'][0]"]),
        (Pair, [".first", ".second"]),
        (Result, [".loss", ".logits"]),
    ],
)
def test_outputs_of_many_kinds(wrap, paths):
    class Model(nn.Module):
        def forward(self, x):
            return wrap(x[:, :1], x[:, 1:] * 2)

    found = dependencies(Model(), torch.randn(3, 3))
    assert [leaf.path for leaf in found.outputs] == paths
    assert torch.equal(found.table, torch.eye(3).bool())


def test_inputs_by_position_and_by_name():
    class Model(nn.Module):
        def forward(self, x, ids, scale=None):
            out = x + nn.functional.one_hot(ids, 2)
            return out if scale is None else out * scale

    x, ids = torch.randn(3, 2), torch.zeros(3, dtype=torch.long)
    assert torch.equal(dependencies(Model(), (x, ids)).table, torch.eye(2).bool())
    named = dependencies(Model(), {"x": x, "ids": ids, "scale": torch.randn(3, 1)})
    assert torch.equal(named.table, torch.tensor([[1, 0, 1], [0, 1, 1]]).bool())
    assert [leaf.path for leaf in named.inputs] == ["['x']", "['scale']"]
    nothing = dependencies(Model(), {"x": x, "ids": ids, "scale": torch.randn(3, 1)}).table
    assert torch.equal(nothing, named.table)


def test_pairs_of_many_tensors_are_named_in_full():
    class Model(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            self.mixes = mixes

        def forward(self, x, context):
            return {"out": x, "other": context + (x.sum(1, keepdim=True) if self.mixes else 0)}

    example = {"x": torch.randn(3, 2), "context": torch.randn(3, 2)}
    found = gained(dependencies(Model(False), example), dependencies(Model(True), example))
    assert found == Gain("entry 0 of output['other']", "entry 0 of input['x']")


def test_outputs_without_samples():
    class Model(nn.Module):
        def forward(self, x):
            return x[:, 0].mean(), x[:, 1].pow(2).sum()

    found = dependencies(Model(), torch.randn(5, 3))
    assert torch.equal(found.table, torch.tensor([[1, 0, 0], [0, 1, 0]]).bool())


def test_an_input_without_samples():
    class Model(nn.Module):
        def forward(self, x, shift):
            return x + shift

    found = dependencies(Model(), (torch.randn(5, 2), torch.randn(2)))
    assert torch.equal(found.table, torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]]).bool())


def test_complex_and_constant_outputs():
    class Model(nn.Module):
        def forward(self, x):
            return torch.complex(x[:, 0], x[:, 1]), torch.zeros(len(x), 1), torch.arange(len(x))

    assert torch.equal(dependencies(Model(), torch.randn(4, 2)).table, torch.tensor([[1, 1], [0, 0]]).bool())


def test_a_gradient_that_is_nan_counts():
    class Model(nn.Module):
        def forward(self, x):
            return (x - x).pow(2).sum(1).sqrt()

    assert dependencies(Model(), torch.randn(4, 2)).table.all()


def test_many_outputs_are_sampled():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
    found = dependencies(model, torch.rand(2, 1, 16, 16))
    assert len(found.rows) == MOST_OUTPUTS == len(found.rows.unique())
    assert (int(found.rows[0]), int(found.rows[-1])) == (0, 4 * 256 - 1)
    assert found.checked == "256 of 1024 outputs (a seeded choice)"
    at = [divmod(int(row) % 256, 16) for row in found.rows]
    near = torch.tensor([[abs(i - y) <= 1 and abs(j - x) <= 1 for i in range(16) for j in range(16)] for y, x in at])
    assert torch.equal(found.table, near)
    assert dependencies(model, torch.rand(2, 1, 2, 2)).checked == "all 16 outputs"
    assert dependencies(model, torch.rand(2, 1, 40, 40)).checked == "64 of 6400 outputs (a seeded choice)"


class ByHand(torch.autograd.Function):
    """Without a rule for batched gradients."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if not torch.isfinite(grad).all():
            raise AssertionError
        return grad * 2


def test_operations_that_cannot_be_batched():
    class Model(nn.Module):
        def forward(self, x):
            return ByHand.apply(x).flip(1), x[:, :1] * 0 + 1

    expected = torch.cat([torch.eye(3).bool().flip(1), torch.zeros(1, 3).bool()])
    assert torch.equal(dependencies(Model(), torch.randn(4, 3)).table, expected)


def test_models_that_are_particular():
    class Single(nn.Module):  # computes in float32, whatever comes
        def __init__(self):
            super().__init__()
            self.weight = torch.ones(2, 2)

        def forward(self, x):
            return x @ self.weight

    class OfFour(nn.Module):  # wants just that many samples
        def forward(self, x):
            return x.view(2, 2, 3).view(4, 3)

    class Writes(nn.Module):  # into what it is given
        def forward(self, x):
            return x.add_(1)

    class MakesTensors(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x + torch.zeros(2)) @ torch.ones(2, 2)

    assert dependencies(Single(), torch.randn(4, 2)).table.all()
    assert torch.equal(dependencies(OfFour(), torch.randn(4, 3)).table, torch.eye(3).bool())
    assert torch.equal(dependencies(Writes(), torch.randn(4, 3)).table, torch.eye(3).bool())
    assert dependencies(MakesTensors(), torch.randn(4, 2)).table.all()


def test_random_weights_that_a_model_refuses_are_left_out():
    class Positive(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            if (self.scale < 0).any():
                message = "scales are positive"
                raise ValueError(message)
            return x * self.scale

    found = dependencies(Positive(), torch.randn(4, 2))
    assert torch.equal(found.table, torch.eye(2).bool())
    assert any(draw is None for draw in found.draws)


class Draws(nn.Module):
    """Takes from every stream of random numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x))) + torch.randn(3) + random.random() + np.random.rand()


def test_the_model_and_the_random_streams_are_left_alone():
    model = Draws().train()
    x = torch.randn(4, 3)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with torch.no_grad():
        found = dependencies(model, x)
        assert not torch.is_grad_enabled()
    after = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert after == (random.random(), np.random.rand(), torch.rand(1).item())
    assert found.table.all()
    assert model.training
    assert torch.get_default_dtype() is torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not x.requires_grad


def test_the_same_question_has_the_same_answer():
    model, x = hyper(), torch.randn(6, 5)
    one, other = dependencies(model, x), dependencies(model, x)
    assert all(torch.equal(a, b) for a, b in zip(one.draws, other.draws, strict=True))
    assert gained(one, other) is None


def test_wrappers_are_taken_off(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # which torch.compile would set
    inner = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.BatchNorm1d(3))
    assert dependencies(nn.DataParallel(inner), torch.randn(4, 3)).table.all()


def test_a_distribution_is_no_output():
    flow = zuko.flows.MAF(5, 2, hidden_features=(WIDTH,), activation=norm_and_relu)
    with pytest.raises(ConfigError, match=r"returns no floating-point tensors but a NormalizingFlow.*swap_norm\(model\.transform\.transforms\[0\]\.hyper, "):
        dependencies(flow, torch.randn(3, 2))


def test_a_model_that_raises_is_told_with_its_error():
    flow = MaskedAutoregressiveFlow(4, WIDTH, 1, 1, batch_norm_within_layers=True)
    with pytest.raises(ConfigError, match=r"raises RuntimeError with this example: Forward method.*\.autoregressive_net, ") as caught:
        dependencies(flow, torch.randn(3, 4))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ConfigError, match=r"mat1 and mat2 .* \(3x4 and 5x2\).*pass the sub-module that is one$"):
        dependencies(nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)), torch.randn(3, 4))


def test_a_model_that_cannot_be_copied():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(ConfigError, match="Linear cannot be copied, and example= works on a copy: TypeError") as caught:
        dependencies(model, torch.randn(3, 2))
    assert caught.value.__cause__ is not None


def test_weights_that_a_hook_makes_are_copied_without_their_history():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    prune.custom_from_mask(net[0], "weight", torch.eye(3))
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(net[2])
    net(torch.randn(2, 3))
    assert not net[0].weight.is_leaf
    assert not net[2].weight.is_leaf
    assert dependencies(net, torch.randn(4, 3)).table.all()
    assert dependencies(net[0], torch.randn(4, 3)).table.equal(torch.eye(3).bool())
    net.cached = net(torch.randn(1, 3))
    assert dependencies(net, torch.randn(4, 3)).table.all()


def frozen_mask(rows):
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(*rows.shape[::-1])
            self.mask = nn.Parameter(rows, requires_grad=False)

        def forward(self, x):
            return nn.functional.linear(x, self.weight * self.mask, self.bias)

    return Layer()


def masked_at_first(rows):
    """Zeros that its gradient keeps."""
    layer = nn.Linear(*rows.shape[::-1])
    layer.register_buffer("mask", rows)
    layer.weight.data *= rows
    layer.weight.register_hook(lambda grad: grad * rows)
    return layer


def masked_by_a_hook(rows):
    def mask(layer, _):
        layer.weight.data.mul_(layer.mask)

    layer = nn.Linear(*rows.shape[::-1])
    layer.register_buffer("mask", rows)
    layer.register_forward_pre_hook(mask)
    return layer


@pytest.mark.parametrize("make", [frozen_mask, masked_at_first, masked_by_a_hook])
def test_random_weights_are_masked_however_the_own_ones_are(make):
    rows = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    net = nn.Sequential(make(rows), nn.BatchNorm1d(4), nn.Tanh(), make(torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1]])))
    assert dependencies(net, torch.randn(4, 3)).table.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert str(gain(net, nn.LayerNorm, torch.randn(4, 3))) == "output 1 would depend on input 1"


def test_frozen_weights_of_zeros_and_others_are_no_masks():
    layer = nn.Linear(3, 3).requires_grad_(False)
    layer.weight.zero_()
    assert dependencies(layer, torch.randn(4, 3)).table.all()


@pytest.mark.parametrize("example", [torch.zeros(3, 2, dtype=torch.long), torch.tensor(1.0), torch.zeros(0, 2), (), "x"])
def test_examples_without_samples_to_differentiate(example):
    with pytest.raises(ConfigError, match="it must hold samples in the first dimension of a floating-point tensor"):
        dependencies(nn.Linear(2, 2), example)


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def test_outputs_that_are_never_finite():
    with pytest.raises(ConfigError, match="Scaled gives no finite outputs with this example"):
        dependencies(Scaled(float("inf")), torch.randn(3, 2))
    before = dependencies(Scaled(1.0), torch.randn(3, 2))
    after = replace(before, draws=(None,) * len(before.draws))
    with pytest.raises(ConfigError, match="the changed model gives no finite outputs"):
        gained(before, after)


def test_networks_within_a_flow_get_examples_of_their_own():
    # All outputs of two transforms depend on all inputs, whatever stands in them: what each of them sees is what counts.
    flow = MaskedAutoregressiveFlow(4, WIDTH, 2, 1, batch_norm_within_layers=True)._transform
    x = torch.randn(6, 4)
    examples = calls(flow, x, networks(flow, [name for name, module in flow.named_modules() if isinstance(module, nn.BatchNorm1d)]))
    assert list(examples) == ["_transforms.1.autoregressive_net", "_transforms.3.autoregressive_net"]
    for name, example in examples.items():
        net = flow.get_submodule(name)
        assert torch.equal(dependencies(net, example).table, torch.ones(4, 4).tril(-1).bool().repeat_interleave(2, 0))
        assert gain(net, nn.LayerNorm, example) is not None
    assert flow.training
    assert not any(module._forward_pre_hooks for module in flow.modules())


def test_examples_of_sub_modules():
    class Inner(nn.Module):
        def forward(self, x, scale=1, *, shift=None):
            return x * scale + shift

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.first, self.idle = Inner(), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(self.first(x), 2, shift=x) + self.inner(x, shift=x)

    model, x = Outer(), torch.randn(3, 2)
    found = calls(model, x, ["inner", "first", "idle"])
    assert list(found) == ["first", "inner"]
    assert list(found["inner"]) == ["x", "scale", "shift"]
    assert torch.equal(found["inner"]["x"], model.first(x))
    assert dependencies(model.inner, found["inner"]).table.shape == (2, 4)
    with pytest.raises(ConfigError, match="Outer raises RuntimeError with this example"):
        calls(model, torch.randn(3, 5), ["inner"])
