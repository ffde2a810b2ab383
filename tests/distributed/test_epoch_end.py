"""The hook `on_epoch_end` on real ranks: it runs on rank 0, what it reports is known to all, and what it does there does not take the ranks apart."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp.evaluation.errors import StepError
from nbddp.worker.epoch_end import EpochState
from support.ranks import RankError

pytestmark = pytest.mark.distributed

N, FEATURES, EPOCHS = 24, 4, 4


def make():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    x = torch.randn(N, FEATURES, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    return net, TensorDataset(x, y), TensorDataset(x[:7], y[:7])


def run(training, nproc, on_epoch_end, **options):
    options = {"epochs": EPOCHS, "batch_size": 12, "lr": 0.01, "optimizer": "sgd", **options}
    return training(nproc, make, {"loss": nn.functional.mse_loss, "on_epoch_end": on_epoch_end}, **options)


def reported(result):
    return [event.data for event in result.of_kind("reported")]


def test_it_runs_on_rank_0_and_knows_the_epoch(training):
    def hook(state):
        assert torch.distributed.get_rank() == 0
        assert isinstance(state, EpochState)
        assert type(state.model) is nn.Sequential
        assert state.model.training
        assert state.optimizer.param_groups[0]["lr"] == state.lr == 0.01
        assert state.stage == 0
        assert isinstance(state.stage_name, str)
        state.report(at=state.epoch * 1000 + state.step, seen_loss=state.loss, seen_val=state.values.get("val_loss", -1), weight=state.model[2].bias)

    result = run(training, 2, hook, val_every="2")
    found = reported(result)
    assert [entry["values"]["at"] for entry in found] == [1002, 2004, 3006, 4008]
    assert [entry["step"] for entry in found] == [2, 4, 6, 8]
    np.testing.assert_array_equal([entry["values"]["seen_loss"] for entry in found], result.epochs["loss"])
    validated = [entry["values"]["seen_val"] for entry in found]
    assert validated[0] == validated[2] == -1, "no validation, no values of an earlier epoch"
    assert validated[1::2] == result.epochs["val_loss"][1::2].tolist()


@pytest.mark.parametrize("nproc", [1, 3])
def test_the_monitor_may_be_a_reported_value(training, nproc):
    def hook(state):
        state.report(score=[0.1, 0.9, 0.5, 0.3][state.epoch - 1])

    result = run(training, nproc, hook, monitor="score", mode="max", patience=2, epochs=10)
    best = [event.data for event in result.of_kind("checkpoint") if event.data["name"] == "best"][-1]
    assert (best["epoch"], best["value"]) == (2, 0.9)
    assert [progress[1] for progress in result.progress] == [4] * nproc, "all ranks stop after the same epoch"


def test_a_monitor_that_nobody_reports_is_refused_after_the_first_epoch(training):
    with pytest.raises(StepError, match=r"monitor=score is not recorded; recorded are .*val_loss.*other"):
        run(training, 2, lambda state: state.report(other=1.0), monitor="score")


def test_reports_are_real_numbers_of_any_kind(training):
    def hook(state):
        state.report(a=1, b=True, c=torch.tensor([0.5]), d=np.float32(0.25), e=float("nan"))
        state.report(f=float("-inf"), a=2)

    (first, *_) = reported(run(training, 2, hook))
    values = {name: float(value) for name, value in first["values"].items()}
    assert np.isnan(values.pop("e"))
    assert values == {"a": 2.0, "b": 1.0, "c": 0.5, "d": 0.25, "f": float("-inf")}


def test_an_epoch_may_report_nothing_or_other_names(training):
    def hook(state):
        if state.epoch % 2:
            state.report(**{f"odd_{state.epoch}": state.epoch})

    assert [entry["values"] for entry in reported(run(training, 2, hook))] == [{"odd_1": 1.0}, {"odd_3": 3.0}]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"score": "high"}, "on_epoch_end reports score: a str; it must be a real number, or a tensor with one"),
        ({"score": torch.zeros(2)}, r"on_epoch_end reports score: a tensor of shape \(2,\), float32"),
        ({"score": None}, "on_epoch_end reports score: None"),
        ({"score": 1j}, "on_epoch_end reports score: a complex"),
        ({"a b": 1}, "on_epoch_end reports 'a b': a name is made of letters"),
        ({"loss": 1}, "on_epoch_end reports loss, which is recorded already: give it another name"),
        ({"val_loss": 1}, "reports val_loss, which is recorded already"),
        ({"epoch": 1}, "reports epoch, which is recorded already"),
        ({"duration_s": 1}, "reports duration_s, which is recorded already"),
    ],
)
def test_a_wrong_report_is_refused_in_words(training, values, message):
    with pytest.raises(StepError, match=message):
        run(training, 2, lambda state: state.report(**values))


def test_an_exception_fails_the_run_at_once_though_the_other_ranks_wait(training):
    def hook(state):
        if state.epoch == 2:
            raise ZeroDivisionError("in the hook")

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        run(training, 3, hook)
    assert time.monotonic() - began < 50, "not the time that a collective waits"


def test_options_of_the_optimizer_that_it_sets_reach_all_ranks(training):
    def halve(state):
        for group in state.optimizer.param_groups:
            group["lr"] *= 0.5
            group["momentum"] = 0.5

    one, three = (run(training, nproc, halve, momentum=0.9) for nproc in (1, 3))
    assert three.history["lr"].tolist() == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125, 0.00125]
    for weights in three.weights:
        for name, value in three.weights[0].items():
            np.testing.assert_array_equal(weights[name], value)
    assert one.history["lr"].tolist() == three.history["lr"].tolist()


def test_a_learning_rate_that_is_a_tensor_is_set_in_place(training):
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))

    def halve(state):
        state.optimizer.param_groups[0]["lr"] *= 0.5

    result = training(2, make, {"loss": nn.functional.mse_loss, "optimizer": optimizer, "on_epoch_end": halve}, epochs=2, batch_size=12)
    np.testing.assert_allclose(result.history["lr"], [0.01, 0.01, 0.005, 0.005])
    for name, value in result.weights[0].items():
        np.testing.assert_array_equal(result.weights[1][name], value)


def test_gradients_and_modes_that_it_leaves_behind_do_not_reach_the_next_step(training):
    def careless(state):
        state.model.eval()
        state.model(torch.ones(2, FEATURES, dtype=torch.float64)).sum().backward()
        assert state.model[0].weight.grad is not None

    plain, other = run(training, 2, lambda state: None), run(training, 2, careless)
    for name, value in plain.weights[0].items():
        np.testing.assert_array_equal(other.weights[0][name], value)


def test_weights_that_it_changes_are_found_at_the_next_checkpoint(training):
    def change(state):
        with torch.no_grad():
            state.model[0].weight.mul_(2)

    run(training, 1, change, epochs=1)
    with pytest.raises(RankError, match=r"ReplicasDiffer: .*rank 1 \(0.weight\) are not those of rank 0"):
        run(training, 2, change, epochs=1)


def test_a_run_that_resumes_draws_what_one_that_went_on_draws(training):
    def draws(state):
        state.report(drawn=torch.rand(()), values=float(len(state.values)))

    whole = run(training, 2, draws)
    half = run(training, 2, draws, epochs=2)
    rest = run(training, 2, draws, resume=half.run.checkpoints / "last.pt")
    assert [entry["values"] for entry in reported(rest)] == [entry["values"] for entry in reported(whole)[2:]]
    for rank in range(2):
        for name, value in whole.weights[rank].items():
            np.testing.assert_array_equal(rest.weights[rank][name], value)


def test_an_epoch_that_a_stop_leaves_open_does_not_end(training):
    result = run(training, 2, lambda state: state.report(x=1.0), ask="stop", epochs=1000, max_steps=100000)
    assert reported(result) == []


def add_a_group(state):
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def freeze_one(state):
    next(state.model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(
    "hook, message", [(add_a_group, "adds parameter groups to the optimizer of rank 0 alone"), (freeze_one, "changes requires_grad on rank 0")]
)
def test_what_would_part_the_ranks_is_refused(training, hook, message):
    with pytest.raises(StepError, match=message):
        run(training, 2, hook)


@pytest.mark.parametrize("schedule, warned", [("linear", True), ("constant", False)])
def test_a_rate_that_the_schedule_sets_anew_is_warned_of(training, schedule, warned):
    def hook(state):
        state.optimizer.param_groups[0]["lr"] = 0.5

    texts = [event.data["text"] for event in run(training, 2, hook, schedule=schedule).of_kind("message")]
    assert any("on_epoch_end sets lr, and so does the schedule" in text for text in texts) == warned


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_weights_of_the_epoch_are_kept_where_it_raises(training, tmp_path, nproc):
    def hook(state):
        if state.epoch == 2:
            raise LookupError("no such score")

    with pytest.raises(LookupError, match="no such score"):
        run(training, nproc, hook)
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and path.name[0] == "2")
    content = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    assert (content["epoch"], content["epochs_done"]) == (2, 1)
