"""Outputs of batches joined to those of all samples, and what of a batch is the model's input."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from nbddp.data import ValShares
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.hooks import Hooks
from nbddp.evaluation.outputs import Outputs
from nbddp.evaluation.predictor import model_output, predict

X = torch.arange(10.0).reshape(5, 2)


class Pair(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Output(OrderedDict):
    """Like the outputs of a well-known library: a dict with attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def joined(make, sizes=(2, 2, 1)):
    outputs, at = Outputs(sum(sizes), "validation_step"), 0
    for size in sizes:
        outputs.add(make(X[at : at + size]), size)
        at += size
    return outputs.whole


def test_tensors_are_joined_in_order_and_are_not_those_of_the_step():
    whole = joined(lambda x: x)
    assert torch.equal(whole, X)
    assert whole.data_ptr() != X.data_ptr()
    assert torch.equal(joined(lambda x: x[:, 0] > 3), X[:, 0] > 3)


@pytest.mark.parametrize(
    "dtype, after", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64), (torch.int8, torch.int8)]
)
def test_half_precision_is_widened(dtype, after):
    assert torch.equal(joined(lambda x: {"a": x.to(dtype)})["a"], X.to(after))


def test_structures_stay_what_they_are():
    whole = joined(lambda x: {"pair": Pair(x, x + 1), "list": [x, (x * 2,)], "none": None})
    assert type(whole["pair"]) is Pair
    assert torch.equal(whole["pair"].spread, X + 1)
    assert torch.equal(whole["list"][1][0], X * 2)
    assert whole["none"] is None

    answer = joined(lambda x: Answer(x, (x, x[:, 0])))
    assert type(answer) is Answer
    assert torch.equal(answer.hidden[1], X[:, 0])
    assert answer.loss is None

    output = joined(lambda x: Output(logits=x.half()))
    assert type(output) is Output
    assert torch.equal(output.logits, X)
    assert output["logits"] is output.logits

    counted = joined(lambda x: defaultdict(list, a=x))
    assert counted["other"] == []


def test_mappings_that_can_not_be_changed_are_made_anew():
    found = joined(lambda x: types.MappingProxyType({"a": x.half()}))
    assert type(found) is types.MappingProxyType
    assert found["a"].dtype is torch.float32


def test_gradients_and_views_do_not_hold_the_graph():
    assert not joined(lambda x: x.clone().requires_grad_() * 2).requires_grad


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: x.mean(), r"returned an output of shape \(\) for a batch of 2: its first dimension must be that of the samples"),
        (lambda x: {"a": x.T[:, :1]}, r"returned an output\['a'\] of shape \(2, 1\) for a batch of 1"),
        (lambda x: [x, Pair(x, x[:0])], r"returned an output\[1\]\.spread of shape \(0, 2\) for a batch of 2"),
        (lambda x: (x, 3.5), r"returned an output\[1\] that is a float: outputs are joined"),
        (lambda x: "words", "returned an output that is a str"),
        (lambda x: x[:, : len(x)], r"returned an output of \(1,\) float32 per sample, and before that of \(2,\) float32"),
        (lambda x: x if len(x) > 1 else x.double(), r"returned an output of \(2,\) float64 per sample, and before that of \(2,\) float32"),
        (lambda x: {"a": x} if len(x) > 1 else {"b": x}, r"returned output\['b'\], and before that output\['a'\]"),
        (lambda x: x.to_sparse(), r"returned an output that is no dense tensor: \.to_dense\(\)"),
        (lambda x: [], "returned an output without a tensor in it, a list: there is nothing to join"),
        (lambda x: {"a": (None, None)}, "returned an output without a tensor in it, a dict"),
        (lambda x: [x] * len(x), r"returned output\[0\], and before that output\[0\], output\[1\]"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(make, message):
    with pytest.raises(StepError, match=f"validation_step {message}"):
        joined(make)


# -- what the model is called with


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


ONE, TWO, OPTIONAL, MANY = (
    lambda x: (x,),
    lambda x, y: (x, y),
    lambda x, mask=None: (x, mask),
    lambda *parts: parts,
)


@pytest.mark.parametrize(
    "forward, batch, called_with",
    [
        (ONE, "x", ("x",)),
        (ONE, ["x"], ("x",)),
        (ONE, ["x", "t"], ("x",)),
        (ONE, {"x": 1}, ({"x": 1},)),
        (TWO, ["x", "y"], ("x", "y")),  # without a target
        (TWO, ("x", "y", "t"), ("x", "y")),
        (OPTIONAL, ["x", "t"], ("x", None)),
        (OPTIONAL, ["x", "mask", "t"], ("x", "mask")),
        (MANY, ["x", "y", "t"], ("x", "y")),
        (MANY, ["x"], ("x",)),
    ],
)
def test_the_last_part_of_a_batch_is_the_target_unless_the_model_needs_it(forward, batch, called_with):
    assert model_output(Model(forward), batch) == called_with


def test_a_forward_that_does_not_tell_what_it_takes_is_called_as_in_training():
    assert model_output(Model(max), [[3, 4], "t"]) == 4


# -- the two together


def predicted(forward, hooks):
    batches = ((X[micro.indices], micro) for micro in ValShares(5, 2, 1, 0, seed=0).epoch(0))
    model = Model(forward).train()
    try:
        return predict(model, Hooks.of(hooks), batches, 5, precision="fp32", device=torch.device("cpu"))
    finally:
        assert model.training


def no_loss(output, target):
    raise AssertionError("no loss is needed")


def test_with_a_loss_the_model_alone_is_called_without_gradients():
    scale = nn.Parameter(torch.tensor(2.0))
    assert torch.equal(predicted(lambda x: x * scale + float(torch.is_grad_enabled()), {"loss": no_loss}), X * 2)


@pytest.mark.parametrize(
    "forward, hooks, message",
    [
        (lambda x: None, {"loss": no_loss}, "the model returned no output, which is what is predicted: its forward returns one"),
        (ONE, {"training_step": lambda model, x: x.mean()}, "training_step returned no output, which is what is predicted: return {'loss': loss, 'output'"),
        (ONE, {"training_step": lambda model, x: {"output": x}}, "training_step returned a dict without 'loss'"),
    ],
)
def test_without_an_output_there_is_nothing_to_predict(forward, hooks, message):
    with pytest.raises(StepError, match=message):
        predicted(forward, hooks)
