"""The parts of a step that need no other rank: what it returned, what is not finite, digests of replicas, random streams, cadences."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nbddp import rng
from nbddp.config import TrainConfig
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.step import Signature, StepResult, read_result
from nbddp.state import PHASES
from nbddp.worker.errors import ReplicasDiffer
from nbddp.worker.guard import Guard
from nbddp.worker.progress import Best, Progress
from nbddp.worker.report import log_line
from nbddp.worker.saver import Every

LOSS = torch.ones((), requires_grad=True) * 2


def result(*names, weight=None):
    return StepResult(LOSS, weight, scalars={name: float(ord(name[0])) for name in names})


def test_what_a_step_returned_is_taken_apart():
    returned = {"loss": LOSS, "weight": 3, "output": "o", "target": "t", "a": torch.tensor([2]), "b": np.float32(1.5), "c": True}
    read = read_result(returned, "step", training=True)
    assert (read.loss, read.weight, read.output, read.target) == (LOSS, 3.0, "o", "t")
    assert {name: float(value) for name, value in read.scalars.items()} == {"a": 2.0, "b": 1.5, "c": 1.0}
    assert read_result(LOSS, "step", training=True).scalars == {}
    assert not read_result({"loss": LOSS, "same": LOSS}, "step", training=True).scalars["same"].requires_grad


def test_without_training_a_loss_needs_no_gradient():
    assert read_result(torch.tensor(1.0), "validation_step", training=False).loss == 1


@pytest.mark.parametrize("name", ["step", "epoch", "stage", "lr", "samples", "wait_s", "slowest_rank", *(f"{phase}_s" for phase in PHASES)])
def test_scalars_do_not_take_the_names_of_recorded_columns(name):
    with pytest.raises(StepError, match=f"returned a scalar {name}, which is recorded of every step already"):
        read_result({"loss": LOSS, name: 1.0}, "training_step", training=True)


def test_the_order_of_names_is_that_of_rank_0():
    here, first = Signature("training_step"), result("b", "a")
    assert here.check(first)
    here.agree([(("a", "b"), False), here.describe()])
    here.order(first)
    assert list(first.scalars.items()) == [("a", 97.0), ("b", 98.0)]
    later = result("b", "a")
    assert not here.check(later)
    assert list(later.scalars) == ["a", "b"]


@pytest.mark.parametrize("other", [result("a"), result("a", "b", "c"), result("a", "c"), result(), result("a", "b", weight=1)])
def test_names_that_change_are_an_error(other):
    signature = Signature("training_step")
    signature.check(result("a", "b"))
    with pytest.raises(StepError, match="and before that the scalars a, b: it returns the same names in every step"):
        signature.check(other)


def test_names_of_another_rank_are_an_error_with_its_number():
    signature = Signature("training_step")
    signature.check(result("a"))
    with pytest.raises(StepError, match="returned the scalars a on rank 0 and the loss alone on rank 2"):
        signature.agree([(("a",), False), (("a",), False), ((), False)])


# -- what is not finite


def guarded(net, **options):
    guard = Guard(TrainConfig(**options), net, list(net.parameters()))
    guard.begin()
    return guard


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"on_nan": "skip"}, {"on_nan": "stop", "clip_norm": 1.0}])
def test_a_step_is_refused_and_buffers_are_as_before(bad, options):
    net = nn.BatchNorm1d(2)
    guard = guarded(net, **options)
    net(torch.full((3, 2), bad)).sum().backward()
    assert not net.running_mean.isfinite().all()
    net.weight.grad[0] = bad
    assert not guard.judge().applied
    assert net.running_mean.tolist() == [0.0, 0.0]
    assert net.num_batches_tracked == 0


def test_a_step_that_is_finite_is_clipped_and_its_buffers_stay():
    net = nn.BatchNorm1d(2)
    guard = guarded(net, on_nan="skip", clip_norm=0.5)
    net(torch.randn(3, 2)).pow(3).sum().backward()
    net.weight.grad[:] = 30.0
    assert guard.judge().applied
    assert float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])) == pytest.approx(0.5, rel=1e-5)
    assert net.num_batches_tracked == 1


def test_where_training_goes_on_nothing_is_refused():
    net = nn.Linear(1, 1)
    guard = guarded(net, on_nan="warn")
    net.weight.grad = torch.full_like(net.weight, float("nan"))
    assert guard.judge().applied


def test_the_error_names_rank_and_parameters():
    error = ReplicasDiffer(2, "a.weight, b", 2)
    assert error.rank == 2
    assert "2 parameters of rank 2 (a.weight, b) are not those of rank 0" in str(error)


# -- random streams


def draw():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(2).tolist(), np.random.normal()


def test_a_captured_state_is_restored_whole(tmp_path):
    rng.seed_rank(0, 1)
    draw()
    np.random.normal()  # the second normal deviate is kept for the next call
    torch.save(rng.capture(torch.device("cpu")), tmp_path / "state.pt")
    expected = draw()
    rng.restore(torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu"))
    assert draw() == expected


@given(st.integers(0, 2**40), st.integers(0, 64))
def test_every_rank_has_streams_of_its_own(seed, rank):
    rng.seed_rank(seed, rank)
    one = draw()
    rng.seed_rank(seed, rank + 1)
    assert draw() != one
    rng.seed_rank(seed, rank)
    assert draw() == one


# -- cadences, the best, the log line


@pytest.mark.parametrize(
    "text, steps, epochs",
    [("1 epoch", [], [1, 2, 3, 4]), ("2 epochs", [], [2, 4]), ("1 step", [1, 2, 3, 4], []), ("3 steps", [3], []), ("10 min", [], [])],
)
def test_cadences(text, steps, epochs):
    every = Every.parse(TrainConfig(checkpoint_every=text).checkpoint_every)
    assert [number for number in range(1, 5) if every.at_step(number)] == steps
    assert [number for number in range(1, 5) if every.at_epoch(number)] == epochs


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1), st.sampled_from(["min", "max"]))
def test_the_best_is_the_first_of_the_best_finite_values(values, mode):
    best = Best("val_loss", mode, 0.0)
    for number, value in enumerate(values):
        best.update(value, Progress(epoch=number))
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        assert best.value is None
    else:
        target = min(finite) if mode == "min" else max(finite)
        assert best.value == target
        assert best.epoch == values.index(target)


REPORT = {
    "epoch": 1,
    "samples": 4096,
    "samples_per_epoch": 4750000,
    "loss": -2.771,
    "epoch_loss": -2.799,
    **{"data_s": 0.018, "mean_data_s": 0.018, "network_s": 0.7, "mean_network_s": 0.7, "aggregation_s": 0.002, "mean_aggregation_s": 0.002},
}


def test_the_log_line_in_full():
    line = "Train Epoch: 1 [4096/4750000 (0%)]   Loss: -2.771 (-2.799)   Time Dataloader: 0.018 (0.018)   Time Network: 0.700 (0.700)"
    assert log_line(REPORT, world_size=1) == line
    assert log_line(REPORT, world_size=2) == line + "   Time Loss Aggregation: 0.002 (0.002)"
    assert "[4750000/4750000 (100%)]" in log_line({**REPORT, "samples": 4750000}, world_size=1)
    assert "Loss: nan (inf)" in log_line({**REPORT, "loss": float("nan"), "epoch_loss": float("inf")}, world_size=1)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(-0.5)], ids=str)
def test_a_weight_is_finite_and_not_negative(weight):
    returned = {"loss": torch.ones((), requires_grad=True), "weight": weight}
    with pytest.raises(StepError, match=r"training_step returned weight .*: it is the number of samples .*, finite and at least 0"):
        read_result(returned, "training_step", training=True)
