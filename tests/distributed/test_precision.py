"""bf16 and fp16 on real ranks, which on the CPU compute in them as GPUs do: autocast, loss scaling, and what is done with numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp.checkpoint import read
from nbddp.evaluation.errors import StepError

pytestmark = pytest.mark.distributed

N, FEATURES, BATCH = 48, 5, 12
STEPS = 2 * N // BATCH


def data(n=N):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, FEATURES, generator=generator), torch.randn(n, 2, generator=generator))


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))
    return net, data(), TensorDataset(*data()[:13])


def error(output, y):
    """Small enough that its gradients, times the first loss scale of 2^16, stay below the largest float16, 65504."""
    return nn.functional.mse_loss(output, y) / 16


def mse(model, batch):
    x, y = batch
    return error(model(x), y)


def run(training, nproc, step=mse, model=make, hooks=None, **options):
    options = {"epochs": 2, "batch_size": BATCH, "lr": 0.05, **options}
    return training(nproc, model, {"training_step": step, **(hooks or {})}, **options)


def saved(result, name="last"):
    return read(result.run.checkpoints / f"{name}.pt")


def warnings_of(result):
    return [event.data["text"] for event in result.of_kind("message") if event.data["level"] == "warning"]


def assert_replicated(result):
    for weights in result.weights:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, result.weights[0][name], err_msg=name)


def assert_weights(one, other, **tolerance):
    for name, value in one.weights[0].items():
        np.testing.assert_allclose(other.weights[0][name], value, err_msg=name, **tolerance)


# -- autocast


@pytest.mark.parametrize("precision, dtype", [("fp32", "torch.float32"), ("bf16", "torch.bfloat16"), ("fp16", "torch.float16")])
def test_forward_passes_compute_in_it_in_training_and_in_validation(training, precision, dtype):
    def seen(model, batch):
        x, y = batch
        output = model(x)
        assert str(output.dtype) == dtype
        assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
        return {"loss": error(output, y), "training": model.training}

    result = run(training, 2, seen, precision=precision)
    assert result.history["training"].tolist() == [1.0] * STEPS
    assert result.epochs["val_training"].tolist() == [0.0, 0.0]
    assert saved(result)["precision"] == precision
    assert_replicated(result)


@pytest.mark.parametrize("precision, rtol", [("bf16", 0.02), ("fp16", 0.003)])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.05}, {"on_nan": "skip"}], ids=str)
def test_the_curve_is_that_of_fp32_within_its_digits_at_any_number_of_ranks(training, precision, rtol, options):
    full = run(training, 1, **options)
    for nproc in (1, 2, 3):
        low = run(training, nproc, precision=precision, **options)
        np.testing.assert_allclose(low.history["loss"], full.history["loss"], rtol=rtol)
        np.testing.assert_allclose(low.epochs["val_loss"], full.epochs["val_loss"], rtol=rtol)
        assert_replicated(low)
        assert_weights(full, low, atol=30 * rtol * 0.05)


def test_float64_models_stay_float64(training):
    def double():
        net, train, val = make()
        return net.double(), TensorDataset(*(part.double() for part in train.tensors)), val and TensorDataset(*(part.double() for part in val.tensors))

    plain = run(training, 2, model=double)
    for precision in ("bf16", "fp16"):
        result = run(training, 2, model=double, precision=precision)
        np.testing.assert_allclose(result.history["loss"], plain.history["loss"], rtol=1e-12)
    assert saved(run(training, 1, model=double))["precision"] == "fp32"


# -- loss scaling


class Overflows:
    """A step whose gradients, and not its loss, are inf on one rank in the given steps."""

    def __init__(self, *steps, rank=0, weighted=False, calls_per_step=1):
        self.steps, self.rank, self.weighted, self.calls, self.per_step = steps, rank, weighted, 0, calls_per_step

    def __call__(self, model, batch):
        x, y = batch
        loss = error(model(x), y)
        if model.training:
            self.calls += 1
            if (self.calls + self.per_step - 1) // self.per_step in self.steps and torch.distributed.get_rank() == self.rank:
                loss.register_hook(lambda gradient: gradient * float("inf"))
        return {"loss": loss, "weight": len(x)} if self.weighted else loss


def stepwise(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("on_nan", ["warn", "skip", "stop"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"weighted": True}], ids=str)
def test_an_overflow_is_the_same_on_all_ranks_and_everywhere(training, on_nan, options):
    options = dict(options)
    weighted, accumulate = options.pop("weighted", False), options.get("accumulate", 1)
    results = []
    for nproc in (1, 2, 3):
        step = Overflows(2, 3, 6, rank=nproc - 1, weighted=weighted, calls_per_step=accumulate)
        results.append(run(training, nproc, step, hooks={"scheduler": stepwise}, precision="fp16", on_nan=on_nan, optimizer="sgd", **options))
    for result in results:
        assert result.history["lr"].tolist() == [0.05 * 0.5**taken for taken in (0, 1, 1, 1, 2, 3, 3, 4)]
        assert [event.data["overflow"] for event in result.of_kind("steps")] != []
        overflows = [flag for event in result.of_kind("steps") for flag in event.data["overflow"]]
        assert overflows == [0, 1, 1, 0, 0, 1, 0, 0]
        assert warnings_of(result) == []
        content = saved(result)
        assert content["scaler"]["scale"] == 2.0**13
        assert content["step"] == STEPS
        assert content["scheduler"]["steps"] == 5
        assert_replicated(result)
        np.testing.assert_allclose(result.history["loss"], results[0].history["loss"], rtol=3e-3)
        assert_weights(results[0], result, atol=2e-3)


def test_an_overflow_changes_nothing(training):
    """The weights after it are those of a run that never took the step."""
    seen: list[int] = []

    def leaves_out(model, batch):  # by a weight of 0, as if these samples were not there
        x, y = batch
        if model.training:
            seen.append(1)
        return {"loss": error(model(x), y), "weight": 0.0 if len(seen) == 2 and model.training else float(len(x))}

    overflow = run(training, 2, Overflows(2, rank=1, weighted=True), precision="fp16", optimizer="sgd")
    without = run(training, 2, leaves_out, precision="fp16", optimizer="sgd")
    for name, value in without.weights[0].items():
        np.testing.assert_allclose(overflow.weights[0][name], value, atol=1e-6)


def test_clipping_follows_unscaling(training):
    full = run(training, 2, clip_norm=0.01, optimizer="sgd", lr=1.0)
    low = run(training, 2, clip_norm=0.01, optimizer="sgd", lr=1.0, precision="fp16")
    before = make()[0].state_dict()
    moved = np.sqrt(sum(float(((value - before[name].numpy()) ** 2).sum()) for name, value in full.weights[0].items()))
    assert 0.01 < moved <= 0.01 * STEPS * (1 + 1e-5)
    assert_weights(full, low, atol=2e-4)


def test_the_scaler_is_saved_and_goes_on(training):
    """Interrupted after a change of the scale, the run ends with the same bits as one that was not."""
    step = {"precision": "fp16", "checkpoint_every": "3 steps"}
    whole = run(training, 2, Overflows(2, rank=1), **step)
    half = run(training, 2, Overflows(2, rank=1), **step, max_steps=3)
    assert saved(half)["scaler"]["scale"] == 2.0**15
    rest = training(2, make, {"training_step": Overflows()}, resume=half.run.checkpoints / "last.pt", epochs=2, batch_size=BATCH, lr=0.05, **step)
    assert saved(rest)["scaler"] == saved(whole)["scaler"]
    for name, value in whole.weights[0].items():
        np.testing.assert_array_equal(rest.weights[0][name], value)


# -- what is not finite


class Poisons:
    """A step whose loss is nan on one rank in the given steps; its model counts batches in a buffer."""

    def __init__(self, *steps, rank=0):
        self.steps, self.rank, self.calls = steps, rank, 0

    def __call__(self, model, batch):
        x, y = batch
        if model.training:
            self.calls += 1
            if self.calls in self.steps and torch.distributed.get_rank() == self.rank:
                x = x * float("nan")
        return error(model(x), y)


def normed():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), data(), None


@pytest.mark.parametrize("on_nan", ["warn", "skip"])
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_loss_that_is_not_finite_is_said_and_left_out(training, nproc, on_nan):
    result = run(training, nproc, Poisons(3, rank=nproc - 1), normed, {"scheduler": stepwise}, precision="fp16", on_nan=on_nan)
    (said,) = warnings_of(result)
    assert f"step 3: the loss of rank {nproc - 1} is not finite" in said
    assert np.flatnonzero(~np.isfinite(result.history["loss"])).tolist() == [2]
    assert result.history["lr"].tolist() == [0.05 * 0.5**taken for taken in (0, 1, 2, 2, 3, 4, 5, 6)]
    assert saved(result)["scaler"]["scale"] == 2.0**16
    assert saved(result)["finite"]
    assert_replicated(result)
    assert all(np.isfinite(value).all() for value in result.weights[0].values())


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_is_not_finite_stops_all_ranks_at_one_step(training, nproc):
    result = run(training, nproc, Poisons(3, rank=nproc - 1), normed, precision="fp16", on_nan="stop")
    before = run(training, nproc, Poisons(), normed, precision="fp16", max_steps=2)
    assert result.progress == [(3, 1, True, "on_nan")] * nproc
    for name, value in before.weights[0].items():
        if "running" not in name and "tracked" not in name:
            np.testing.assert_array_equal(result.weights[0][name], value)


@pytest.mark.parametrize("nproc", [1, 2])
def test_gradients_that_no_scale_makes_finite_stop_the_run(training, nproc):
    result = run(training, nproc, Overflows(*range(100), rank=nproc - 1), precision="fp16", on_nan="stop", epochs=10)
    assert result.progress[0][0] == 18  # 2^16 falls below 1 in 17 steps
    assert result.progress == [(18, 5, True, "on_nan")] * nproc
    overflows = [flag for event in result.of_kind("steps") for flag in event.data["overflow"]]
    assert overflows == [1] * 17 + [0]
    (said,) = warnings_of(result)
    assert "step 18: a gradient is not finite, though the loss is" in said


# -- optimizers that call the step themselves


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)


def test_fp16_with_a_closure_runs_as_bf16_and_says_so_once(training):
    def seen(model, batch):
        x, y = batch
        output = model(x)
        assert output.dtype is torch.bfloat16
        return error(output, y)

    result = training(2, make, {"training_step": seen, "optimizer": lbfgs}, precision="fp16", epochs=3, batch_size=N)
    (said,) = warnings_of(result)
    assert "precision=fp16 runs as bf16: LBFGS calls the step itself" in said
    assert saved(result)["precision"] == "bf16"
    assert saved(result)["scaler"] is None
    assert_replicated(result)
    assert result.history["loss"][-1] < result.history["loss"][0]


def test_parameters_in_float16_are_refused(training):
    def half():
        net, train, _ = make()
        return net.half(), train, None

    with pytest.raises(StepError, match=r"0.weight, 0.bias, 2.weight, 2.bias are float16 already: model.float\(\) before training"):
        run(training, 1, model=half, precision="fp16")
