"""Stages on real ranks: what trains and what stays bit for bit, whose options hold, where a stage ends, and what is written down of it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, and that sets a variable of the environment
from torch import nn
from torch.utils.data import TensorDataset

from nbddp import Stage
from nbddp.evaluation.errors import StepError

pytestmark = pytest.mark.distributed

N, FEATURES = 64, 5
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def data(dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, FEATURES, generator=generator, dtype=dtype)
    return x, torch.sin(x @ torch.randn(FEATURES, 2, generator=generator, dtype=dtype))


def network(dtype=torch.float64, *, norm=False):
    torch.manual_seed(5)
    backbone = [nn.Linear(FEATURES, 12), *([nn.BatchNorm1d(12)] if norm else []), nn.Tanh()]
    return nn.Sequential(OrderedDict(backbone=nn.Sequential(*backbone), head=nn.Linear(12, 2))).to(dtype)


def regression():
    x, y = data(torch.float64)
    return network(), TensorDataset(x, y), TensorDataset(x[:19] * 2, y[:19])


def in_single():
    x, y = data(torch.float32)
    return network(torch.float32), TensorDataset(x, y), None


def with_batch_norm():
    x, y = data(torch.float32)
    return network(torch.float32, norm=True), TensorDataset(x, y), TensorDataset(x[:19] * 2 + 3, y[:19])


def train(training, nproc, stages, make=regression, hooks=None, **options):
    given = {"loss": nn.functional.mse_loss, **(hooks or {}), "stages": tuple(stages)}
    return training(nproc, make, given, **{"batch_size": 12, "optimizer": "adamw", "lr": 0.02, **options})


def file(result, name):
    return torch.load(result.run.checkpoints / f"{name}.pt", weights_only=True)


def model_of(result, name):
    return {key: value.numpy() for key, value in file(result, name)["model"].items()}


def part(weights, prefix):
    return {name: value for name, value in weights.items() if name.startswith(prefix)}


def assert_equal(one, other):
    assert one.keys() == other.keys() != set()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def assert_all_differ(one, other):
    assert one.keys() == other.keys() != set()
    for name, value in one.items():
        assert not np.array_equal(value, other[name]), name


def initial(make=regression):
    return {name: value.numpy() for name, value in make()[0].state_dict().items()}


HEAD_THEN_ALL = (
    Stage("head", freeze="backbone.*", epochs=2, lr=0.05),
    Stage("bias", train_only="*.bias", max_steps=4, batch_size=24, optimizer="sgd", momentum=0.9),
    Stage("all", epochs=2, per_rank_batch_size=None, batch_size=18, accumulate=3, drop_last=False, clip_norm=0.05, schedule="cosine", warmup_steps=2),
)


# -- the same at any number of ranks


def test_same_curve_at_1_2_and_3_ranks(training):
    one = train(training, 1, HEAD_THEN_ALL)
    assert len(one.history["loss"]) == 2 * 5 + 4 + 2 * 4
    assert np.isfinite(one.history["loss"]).all()
    for nproc in (2, 3):
        other = train(training, nproc, HEAD_THEN_ALL)
        for name in ("loss", "lr", "step", "epoch", "stage", "samples"):
            np.testing.assert_allclose(other.history[name], one.history[name], **TOLERANCE, err_msg=name)
        np.testing.assert_allclose(other.epochs["val_loss"], one.epochs["val_loss"], **TOLERANCE)
        for weights in other.weights:
            for name, value in one.weights[0].items():
                np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


def by_hand(batch_sizes, make_optimizers, steps):
    """Loops that a user would write for one process, one after the other, over the samples in order."""
    net, dataset, _ = regression()
    x, y = dataset.tensors
    losses = []
    for size, make_optimizer, count in zip(batch_sizes, make_optimizers, steps, strict=True):
        optimizer = make_optimizer(net)
        batches = [slice(first, first + size) for first in range(0, N - size + 1, size)]
        for step in range(count):
            rows = batches[step % len(batches)]
            loss = nn.functional.mse_loss(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in net.state_dict().items()}


def test_a_run_of_stages_is_what_loops_one_after_the_other_would_do(training):
    def sgd(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)

    stages = [Stage("a", epochs=2, lr=0.01), Stage("b", optimizer=sgd, batch_size=16, max_steps=6), Stage("c", optimizer="adagrad", lr=0.03, epochs=1)]
    result = train(training, 2, stages, shuffle=False)
    made = [lambda net: torch.optim.AdamW(net.parameters(), lr=0.01), sgd, lambda net: torch.optim.Adagrad(net.parameters(), lr=0.03)]
    losses, weights = by_hand([12, 16, 12], made, [10, 6, 5])
    np.testing.assert_allclose(result.history["loss"], losses, **TOLERANCE)
    for name, value in weights.items():
        np.testing.assert_allclose(result.weights[1][name], value, rtol=1e-9, atol=1e-11, err_msg=name)
    assert result.history["samples"].tolist() == [12] * 10 + [16] * 6 + [12] * 5


# -- what trains


def adamw_over_everything(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("hooks", [{}, {"optimizer": adamw_over_everything}], ids=["options", "hook"])
def test_what_is_frozen_stays_bit_for_bit(training, nproc, hooks):
    stages = [Stage("head", freeze="backbone.*", epochs=2), Stage("backbone", train_only="backbone.*", epochs=2), Stage("all")]
    options = {} if hooks else {"weight_decay": 0.5}
    result = train(training, nproc, stages, hooks=hooks, **options)
    begin, head, backbone, end = initial(), model_of(result, "stage-0"), model_of(result, "stage-1"), model_of(result, "last")
    assert_equal(part(head, "backbone."), part(begin, "backbone."))
    assert_all_differ(part(head, "head."), part(begin, "head."))
    assert_equal(part(backbone, "head."), part(head, "head."))
    assert_all_differ(part(backbone, "backbone."), part(head, "backbone."))
    assert_all_differ(end, backbone)
    for weights in result.weights:
        assert_equal(weights, end)


def test_replicas_stay_equal_after_what_was_frozen_trains_again(training):
    """Without DDP around it anew, each rank would follow gradients of its own."""
    result = train(training, 3, [Stage("head", freeze="backbone.*", epochs=2), Stage("all", epochs=3)], make=in_single)
    assert_all_differ(part(result.weights[0], "backbone."), part(initial(in_single), "backbone."))
    for weights in result.weights[1:]:
        assert_equal(weights, result.weights[0])


@pytest.mark.parametrize("hold", [True, False])
def test_batch_norm_of_a_frozen_part_holds_still_or_follows_the_data(training, hold):
    stages = [Stage("head", freeze="backbone.*", freeze_batch_norm=hold, epochs=3), Stage("all")]
    result = train(training, 2, stages, make=with_batch_norm, norm="keep")
    statistics = "backbone.1.running_mean", "backbone.1.running_var", "backbone.1.num_batches_tracked"
    begin, head, end = initial(with_batch_norm), model_of(result, "stage-0"), model_of(result, "last")
    assert_equal(part(head, "backbone.1.weight"), part(begin, "backbone.1.weight"))
    for name in statistics:
        assert np.array_equal(head[name], begin[name]) is hold, name
        assert not np.array_equal(end[name], head[name]), "it follows the data again in the next stage"


# -- whose options hold


def test_each_stage_has_optimizer_schedule_rate_batch_and_precision_of_its_own(training):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    stages = [
        Stage("a", epochs=1, lr=0.1, schedule="linear"),
        Stage("b", max_steps=6, batch_size=16, optimizer=sgd, scheduler=halving, precision="bf16"),
        Stage("c", epochs=2, batch_size=32, scheduler=halving, scheduler_interval="epoch", lr_scale="linear", base_batch_size=16),
        Stage("d", epochs=1),
    ]
    result = train(training, 2, stages, make=in_single, lr=0.02, warmup_steps=0)
    rates = result.history["lr"]
    np.testing.assert_allclose(rates[:5], 0.1 * np.array([1, 0.8, 0.6, 0.4, 0.2]))
    np.testing.assert_allclose(rates[5:11], [0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(rates[11:15], [0.04] * 4)
    np.testing.assert_allclose(rates[15:], [0.02] * 5)
    assert result.history["samples"].tolist() == [12] * 5 + [16] * 6 + [32] * 4 + [12] * 5
    entered = [event.data for event in result.of_kind("stage")]
    assert [(each["stage"], each["name"], each["step"]) for each in entered] == [(0, "a", 0), (1, "b", 5), (2, "c", 11), (3, "d", 15)]
    assert [each["precision"] for each in entered] == ["fp32", "bf16", "fp32", "fp32"]
    assert [each["lr"] for each in entered] == [0.1, None, 0.04, 0.02]
    assert [each["batch_size"] for each in entered] == [12, 16, 32, 12]
    assert [each["epochs"] for each in entered] == [1, None, 2, 1]


def test_a_function_of_the_run_makes_the_optimizer_where_a_stage_has_none(training):
    def sgd(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)

    stages = [Stage("a"), Stage("b", optimizer="adamw", lr=0.01), Stage("c", optimizer=adamw_over_everything)]
    result = train(training, 1, stages, hooks={"optimizer": sgd}, lr=None)
    assert result.history["lr"].tolist() == [0.3] * 5 + [0.01] * 5 + [0.05] * 5
    assert len(file(result, "stage-0")["optimizer"]["param_groups"][0]) < len(file(result, "last")["optimizer"]["param_groups"][0]), "sgd, then adamw"


def test_how_many_parameters_train_is_told(training):
    result = train(training, 2, HEAD_THEN_ALL)
    assert [event.data["trainable"] for event in result.of_kind("stage")] == [12 * 2 + 2, 12 + 2, 5 * 12 + 12 + 12 * 2 + 2]


# -- where stages begin and end


def test_epochs_and_steps_are_counted_on_over_the_stages(training):
    stages = [Stage("a", max_steps=7), Stage("b", epochs=2, batch_size=32), Stage("c", max_steps=2)]
    result = train(training, 2, stages)
    assert result.history["step"].tolist() == list(range(1, 14))
    assert result.history["epoch"].tolist() == [1] * 5 + [2] * 2 + [3] * 2 + [4] * 2 + [5] * 2
    assert result.history["stage"].tolist() == [0] * 7 + [1] * 4 + [2] * 2
    assert result.epochs["epoch"].tolist() == [1, 2, 3, 4, 5]
    assert result.epochs["stage"].tolist() == [0, 0, 1, 1, 2]
    assert [event.data["whole"] for event in result.of_kind("epoch")] == [True, False, True, True, False]
    assert np.isfinite(result.epochs["val_loss"]).all(), "what a stage ends with is validated"
    assert set(result.progress) == {(13, 5, False, None)}


def test_samples_of_each_stage_come_in_an_order_of_its_own(training):
    result = train(training, 1, [Stage("a"), Stage("b")], lr=0.0, batch_size=16)
    one, two = result.history["loss"].reshape(2, 4)
    assert not np.isclose(one, two).any()
    assert one.mean() == pytest.approx(two.mean()), "the same samples"


@pytest.mark.parametrize(
    "options, steps",
    [({"max_steps": 8, "epochs": 1}, [0] * 5 + [1] * 3), ({"max_steps": 5, "epochs": 1}, [0] * 5), ({"max_steps": 12, "stage_b": {}}, [0] * 5 + [1] * 7)],
)
def test_the_limit_of_the_run_ends_it_in_any_stage(training, options, steps):
    stages = [Stage("a", epochs=1), Stage("b", **options.pop("stage_b", {"epochs": 3})), *([Stage("c")] if "epochs" in options else [])]
    result = train(training, 2, stages, **options)
    assert result.history["stage"].tolist() == steps
    assert {progress[2:] for progress in result.progress} == {(False, None)}
    assert file(result, "last")["step"] == len(steps)


def test_what_is_written_of_each_stage(training):
    result = train(training, 2, [Stage("a", max_steps=3), Stage("b", epochs=2), Stage("c")], keep_last=1)
    names = {path.stem for path in result.run.checkpoints.glob("*.pt")}
    assert {"initial", "last", "best", "stage-0", "stage-1", "stage-2"} <= names
    expected = {"stage-0": (0, "a", 3, 3, 0), "stage-1": (1, "b", 13, 10, 2), "stage-2": (2, "c", 18, 5, 1), "last": (2, "c", 18, 5, 1)}
    for name, facts in expected.items():
        content = file(result, name)
        assert tuple(content[key] for key in ("stage", "stage_name", "step", "stage_step", "stage_epochs_done")) == facts
    written = [event.data["name"] for event in result.of_kind("checkpoint")]
    assert [name for name in written if name.startswith("stage")] == ["stage-0", "stage-1", "stage-2"]


def test_one_stage_alone_writes_what_a_run_without_stages_does(training):
    result = train(training, 1, [Stage("only", epochs=2)])
    assert not list(result.run.checkpoints.glob("stage-*"))
    assert [event.data["name"] for event in result.of_kind("stage")] == ["only"]


# -- patience


def messages(result):
    return [event.data["text"] for event in result.of_kind("message")]


def test_patience_ends_a_stage_and_not_the_run(training):
    stages = [Stage("still", lr=0.0, epochs=20, patience=2), Stage("all", epochs=2)]
    result = train(training, 2, stages)
    assert result.history["stage"].tolist() == [0] * 15 + [1] * 10, "the first value is the best, two more are not better"
    assert result.history["epoch"][-1] == 5
    assert set(result.progress) == {(25, 5, False, None)}
    value = result.epochs["val_loss"][0]
    assert [text for text in messages(result) if "not better" in text] == [
        f"stage still ends: val_loss was not better 2 times in a row; the best was {value:.4g} in epoch 1"
    ]
    assert file(result, "stage-0")["step"] == 15


@pytest.mark.parametrize("nproc", [1, 3])
def test_patience_in_the_last_stage_ends_the_run(training, nproc):
    stages = [Stage("all", epochs=2), Stage("still", lr=0.0, epochs=20, patience=2)]
    result = train(training, nproc, stages)
    assert set(result.progress) == {(20, 4, False, "patience")}
    assert any(text.startswith("the run ends: val_loss was not better 2 times in a row; the best was ") for text in messages(result))
    assert result.of_kind("stopping") == []
    assert file(result, "last")["step"] == 20
    assert file(result, "best")["step"] < 20


def test_patience_counts_validations_within_an_epoch(training):
    stages = [Stage("still", lr=0.0, epochs=20, patience=3, val_every="2 steps"), Stage("all")]
    result = train(training, 2, stages)
    assert result.history["stage"].tolist() == [0] * 8 + [1] * 5
    assert [event.data["step"] for event in result.of_kind("validation")] == [2, 4, 6, 8, 13]


def test_a_stage_may_watch_the_loss_of_its_training(training):
    stages = [Stage("still", lr=0.0, epochs=20, patience=1, monitor="loss", mode="max"), Stage("all")]
    result = train(training, 2, stages, shuffle=False, batch_size=16)
    assert result.history["stage"].tolist() == [0] * 8 + [1] * 4


# -- what goes wrong


def test_a_stage_that_diverges_stops_the_run_if_it_is_to(training):
    stages = [Stage("calm", epochs=1), Stage("wild", lr=1e200, optimizer="sgd", on_nan="stop", epochs=3), Stage("never")]
    result = train(training, 2, stages)
    (stopping,) = result.of_kind("stopping")
    assert stopping.data["reason"] == "on_nan"
    steps, _, stopped, reason = result.progress[0]
    assert (stopped, reason) == (True, "on_nan")
    assert result.history["stage"].tolist() == [0] * 5 + [1] * (steps - 5)
    assert steps < 20
    for weights in result.weights:
        assert all(np.isfinite(value).all() for value in weights.values())
        assert_equal(weights, model_of(result, "last"))


def test_a_stage_that_records_other_scalars_is_refused(training):
    def step(model, batch):
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        return {"loss": loss, **({"size": loss.abs()} if model.head.weight.requires_grad else {})}

    with pytest.raises(StepError, match="the scalars of the step are none in stage backbone, and were size: it returns the same names in all stages"):
        train(training, 2, [Stage("head"), Stage("backbone", freeze="head.*")], hooks={"loss": None, "training_step": step})


def test_a_value_that_is_not_recorded_is_refused_with_those_that_are(training):
    with pytest.raises(StepError, match="monitor=val_acc is not recorded; recorded are loss, val_loss"):
        train(training, 2, [Stage("a", monitor="val_acc")])
