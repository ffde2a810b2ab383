"""Metrics of a validation on real ranks: the same number at 1, 2 and 3 ranks, whatever the sizes, and what is said where that can't be."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import TensorDataset

import nbddp.metric
from nbddp.evaluation.errors import StepError

pytestmark = pytest.mark.distributed

FEATURES, CLASSES = 4, 3


def make(n_val):
    def parts():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
        x = torch.randn(24, FEATURES, dtype=torch.float64)
        y = torch.arange(24) % CLASSES
        x_val = torch.randn(n_val, FEATURES, dtype=torch.float64)
        return net, TensorDataset(x, y), TensorDataset(x_val, torch.randint(0, CLASSES, (n_val,)))

    return parts


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output, target)


def correct(output, target):
    return output.argmax(1) == target


def probability(output, target):
    return output.softmax(1).gather(1, target[:, None]).squeeze(1)


def run(training, nproc, metrics, *, n_val=17, hooks=None, **options):
    """One step of 24, at every number of ranks alike up to rounding, then a validation."""
    options = {"epochs": 1, "batch_size": 24, "val_batch_size": 6, "optimizer": "sgd", "lr": 0.0, **options}
    return training(nproc, make(n_val), {"loss": cross_entropy, "metrics": metrics, **(hooks or {})}, **options)


def values(result):
    (event,) = result.of_kind("validation")
    return {name: float(value) for name, value in event.data["values"].items()}


def expected(n_val, function):
    """What one pass over all samples gives, by hand."""
    net, _, data = make(n_val)()
    net.eval()
    with torch.no_grad():
        return function(net(data.tensors[0]), data.tensors[1])


class Confusion(nbddp.metric.Metric):
    """Sums of a matrix, a count in Python, extremes, and joined rows: all kinds of states."""

    def __init__(self):
        self.add_state("matrix", torch.zeros(CLASSES, CLASSES, dtype=torch.int64))
        self.add_state("n", 0)
        self.add_state("largest", -torch.inf, "max")
        self.add_state("smallest", torch.tensor(torch.inf), "min")
        self.add_state("rows", [], "cat")

    def update(self, output, target):
        self.matrix += torch.bincount(target * CLASSES + output.argmax(1), minlength=CLASSES**2).reshape(CLASSES, CLASSES)
        self.n += len(target)
        self.largest = max(self.largest, output.max().item())
        self.smallest = torch.minimum(self.smallest, output.min())
        self.rows.append(output[:, 0])

    def compute(self):
        return {
            "accuracy": self.matrix.trace() / self.n,
            "range": self.largest - self.smallest,
            "median": self.rows.median(),
            "n": self.n,
            "rows": len(self.rows),
        }


class ByHand(nbddp.metric.Metric):
    """States of its own, with its own reduction and reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.outputs = 0.0, []

    def update(self, output, target):
        self.total += float((output[:, 0] - target).sum())
        self.outputs.append(output[:, 1])

    def dist_reduce(self):
        self.total = self.dist_sum(self.total)
        self.outputs = self.dist_concatenate(self.outputs)

    def compute(self):
        return self.total / len(self.outputs) + self.outputs.std(correction=0)


class Foreign:
    """No class of ours: what another system's custom metrics look like."""

    def __init__(self):
        self.state = torch.zeros(2, dtype=torch.float64)

    def reset(self):
        self.state.zero_()

    def update(self, output, target):
        self.state += torch.tensor([float(correct(output, target).sum()), len(target)])

    def dist_reduce(self):
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(self.state)

    def compute(self):
        return self.state[0] / self.state[1]


def own_metrics():
    return {"correct": correct, "probability": probability, "l1": nn.L1Loss(reduction="none"), "confusion": Confusion(), "hand": ByHand(), "foreign": Foreign()}


@pytest.fixture(scope="module")
def hooks_without_l1():
    metrics = own_metrics()
    del metrics["l1"]
    return metrics


@pytest.mark.parametrize("n_val", [17, 1, 2, 7])
def test_functions_and_metrics_of_the_user_are_the_same_at_every_number_of_ranks(training, hooks_without_l1, n_val):
    one, *others = [values(run(training, nproc, hooks_without_l1, n_val=n_val)) for nproc in (1, 2, 3)]
    names = ["correct", "probability", *(f"confusion_{name}" for name in ("accuracy", "range", "median", "n", "rows")), "hand", "foreign"]
    assert list(one) == ["val_loss", *(f"val_{name}" for name in names)], "in the order of the hook"
    for other in others:
        assert list(other) == list(one)
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-13, abs=1e-15), name
    assert one["val_correct"] == one["val_foreign"] == pytest.approx(float(expected(n_val, correct).double().mean()), rel=1e-15)
    assert one["val_confusion_accuracy"] == pytest.approx(one["val_correct"], rel=1e-6)  # a quotient of int64 tensors is float32
    assert one["val_probability"] == pytest.approx(float(expected(n_val, probability).mean()), rel=1e-13)
    assert one["val_confusion_n"] == one["val_confusion_rows"] == n_val
    output = expected(n_val, lambda output, target: output)
    assert one["val_confusion_median"] == float(output[:, 0].median())


class Tracked(torchmetrics.Metric):
    """A user's torchmetrics class: a list that is not joined, a tensor that is, a reduction of its own, an attribute that `update` sets up."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("parts", [], dist_reduce_fx=None)
        self.add_state("grown", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="cat")
        self.add_state("squares", torch.zeros(CLASSES, dtype=torch.float64), dist_reduce_fx=lambda stacked: stacked.sum(0) if stacked.ndim > 1 else stacked)

    def update(self, output, target):
        self.columns = output.shape[1]
        self.parts += list(output[:, 0])
        self.grown = torch.cat([self.grown, output[:, 1]])
        self.squares += output.square().sum(0)

    def compute(self):
        return {"parts": torch.stack(self.parts).sum(), "grown": self.grown.median(), "squares": self.squares.sum() / self.columns}


def torch_metrics():
    c = torchmetrics.classification
    return {
        "accuracy": c.MulticlassAccuracy(CLASSES, average="micro"),
        "auroc": c.MulticlassAUROC(CLASSES, thresholds=None, average="macro"),  # joined lists: floats of shape (n, 3), and ints
        "many": torchmetrics.MetricCollection({"f1": c.MulticlassF1Score(CLASSES, average="macro"), "recall": c.MulticlassRecall(CLASSES, average="macro")}),
        "classes": torchmetrics.ClasswiseWrapper(c.MulticlassRecall(CLASSES, average=None), labels=["a", "b", "c"]),
        "own": Tracked(),
    }


@pytest.mark.parametrize("n_val", [17, 1, 2, 7])
@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_are_the_same_at_every_number_of_ranks(training, n_val):
    one, *others = [values(run(training, nproc, torch_metrics(), n_val=n_val)) for nproc in (1, 2, 3)]
    keys = ["accuracy", "auroc", "many_f1", "many_recall", "classes_multiclassrecall_a", "classes_multiclassrecall_b", "classes_multiclassrecall_c"]
    assert set(one) == {"val_loss", *(f"val_{key}" for key in [*keys, "own_parts", "own_grown", "own_squares"])}
    for other in others:
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name
    for name, metric in torch_metrics().items():
        if name in ("accuracy", "auroc"):
            assert one[f"val_{name}"] == pytest.approx(float(expected(n_val, metric)), rel=1e-6)


def regression(output, target):
    return nn.functional.mse_loss(output, target)


def make_regression(n_val):
    def parts():
        torch.manual_seed(3)
        x, x_val = torch.randn(24, FEATURES), torch.randn(n_val, FEATURES)
        return nn.Linear(FEATURES, 2), TensorDataset(x, x[:, :2] * 2 + 1), TensorDataset(x_val, x_val[:, :2] * 2 + x_val[:, 2:])

    return parts


@pytest.mark.parametrize("n_val", [17, 4])
@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_whose_states_are_stacked_over_ranks_are_the_same(training, n_val):
    metrics = {
        "pearson": torchmetrics.MetricCollection({"p": torchmetrics.PearsonCorrCoef(num_outputs=2)}),
        "r2": torchmetrics.R2Score(),
        "variance": torchmetrics.ExplainedVariance(),  # its states change their shape in the first update
        "spearman": torchmetrics.SpearmanCorrCoef(num_outputs=2),
        "minmax": torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()),
    }
    metrics["pearson"] = Mean(metrics["pearson"])
    metrics["spearman"] = Mean(metrics["spearman"])
    results = []
    for nproc in (1, 2, 3):
        options = {"epochs": 1, "batch_size": 24, "val_batch_size": 6, "optimizer": "sgd", "lr": 0.0}
        results.append(values(training(nproc, make_regression(n_val), {"loss": regression, "metrics": metrics}, **options)))
    assert len(results[0]) == 8
    for other in results[1:]:
        for name, value in results[0].items():
            assert other[name] == pytest.approx(value, rel=2e-5), name


class Mean(torchmetrics.Metric):
    """The mean over outputs, of a metric that is a part of it."""

    full_state_update = False

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def update(self, output, target):
        self.inner.update(output, target)

    def compute(self):
        value = self.inner.compute()
        return (value["p"] if isinstance(value, dict) else value).mean()

    def reset(self):
        super().reset()
        self.inner.reset()


def test_metrics_begin_anew_in_every_validation(training):
    metrics = {"correct": correct, "confusion": Confusion(), "accuracy": torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")}
    metrics["accuracy"].update(torch.zeros(5, CLASSES), torch.zeros(5, dtype=torch.int64))  # what the user tried before
    metrics["confusion"].update(torch.zeros(5, CLASSES, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    result = run(training, 2, metrics, epochs=3)
    assert result.epochs["val_confusion_n"].tolist() == [17, 17, 17]
    assert len(set(result.epochs["val_correct"])) == 1
    np.testing.assert_allclose(result.epochs["val_accuracy"], result.epochs["val_correct"], rtol=1e-6)


def test_metrics_change_nothing_of_the_training(training):
    plain, measured = (run(training, 2, metrics, epochs=3, lr=0.1) for metrics in ({}, {"noise": lambda output, target: torch.rand(len(target))}))
    for name, value in plain.weights[0].items():
        np.testing.assert_array_equal(measured.weights[0][name], value)
    assert plain.history["loss"].tolist() == measured.history["loss"].tolist()


# -- what steps return


def test_metrics_of_a_step_come_from_its_output_and_target(training):
    class Batch(NamedTuple):
        logits: torch.Tensor
        extra: int

    def step(model, batch):
        x, y = batch
        logits = model(x)
        return {"loss": cross_entropy(logits, y), "output": Batch(logits, 1), "target": {"y": y}, "scalar": 2.0}

    metrics = {"correct": lambda output, target: output.logits.argmax(1) == target["y"]}
    result = values(run(training, 3, metrics, hooks={"loss": None, "training_step": step}))
    assert result["val_correct"] == pytest.approx(float(expected(17, correct).double().mean()), rel=1e-15)
    assert result["val_scalar"] == 2.0


@pytest.mark.parametrize(
    "returned, message",
    [
        ({}, "returned no output and no target: return {'loss': loss, 'output': output, 'target': target}"),
        ({"output": torch.zeros(1)}, "returned no target: return"),
        ({"target": torch.zeros(1)}, "returned no output: return"),
    ],
)
def test_a_step_without_output_and_target_is_refused_before_training(training, returned, message):
    def step(model, batch):
        return {"loss": cross_entropy(model(batch[0]), batch[1]), **returned}

    def never(model, batch):
        time.sleep(0)
        raise AssertionError("a step was taken before validation was looked at")

    with pytest.raises(StepError, match=rf"metrics \(correct\) are computed from output and target, and validation_step {message}"):
        run(training, 2, {"correct": correct}, hooks={"loss": None, "training_step": never, "validation_step": step})


@pytest.mark.parametrize(
    "metrics, message",
    [
        ({"a": lambda output, target: output}, r"a\(output, target\) returned a tensor of shape \(3, 3\), float64 for a batch of 3"),
        ({"a": cross_entropy}, r"returned a tensor of shape \(\), float64 for a batch of 3: it must return one real value per sample"),
        (
            {"a": torchmetrics.classification.MulticlassRecall(CLASSES, average=None)},
            r"a is computed to a tensor of shape \(3,\), float32: it must be a real number",
        ),
    ],
)
def test_a_wrong_metric_is_refused_before_training(training, metrics, message):
    def never(model, batch):
        raise AssertionError("a step was taken before validation was looked at")

    def step(model, batch):
        output = model(batch[0])
        return {"loss": cross_entropy(output, batch[1]), "output": output, "target": batch[1]}

    with pytest.raises(StepError, match=message):
        run(training, 2, metrics, hooks={"loss": None, "training_step": never, "validation_step": step})


def test_a_scalar_and_a_metric_of_one_name_are_refused(training):
    def step(model, batch):
        output = model(batch[0])
        return {"loss": cross_entropy(output, batch[1]), "output": output, "target": batch[1], "correct": 1.0}

    with pytest.raises(StepError, match="training_step returns correct, and metrics names a correct too: both would be recorded as val_correct"):
        run(training, 2, {"correct": correct}, hooks={"loss": None, "training_step": step})


@pytest.mark.parametrize("workers", [0, 2])
def test_looking_at_validation_first_leaves_training_as_it_was(training, workers):
    """Dropout, BatchNorm and random transforms: the same weights with and without metrics, bit for bit."""

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn(FEATURES, dtype=x.dtype), y

    def parts():
        net, train, val = make(8)()
        return nn.Sequential(nn.BatchNorm1d(FEATURES).double(), net), Noisy(*train.tensors), Noisy(*val.tensors)

    def counted(model, batch):
        output = model(batch[0])
        if not model.training:
            model[0].running_mean += 1e-3  # a buffer that changes in eval mode as well
        return {"loss": cross_entropy(output, batch[1]), "output": output, "target": batch[1]}

    options = {"epochs": 2, "batch_size": 12, "lr": 0.1, "num_workers": workers}
    hooks = {"training_step": counted}
    plain, measured = (training(2, parts, {**hooks, "metrics": metrics}, **options) for metrics in ({}, {"correct": correct}))
    for rank in range(2):
        for name, value in plain.weights[rank].items():
            np.testing.assert_array_equal(measured.weights[rank][name], value, err_msg=name)


# -- precision, choices, warnings


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_metrics_accumulate_in_float32_or_wider(training, precision):
    seen = []

    def dtype(output, target):
        seen.append(output.dtype)
        assert output.dtype is torch.float32
        assert (output @ output.T).dtype is torch.float32, "autocast is off"
        return output[:, 0]

    class Total(nbddp.metric.Metric):
        def __init__(self):
            self.add_state("total", 0.0)

        def update(self, output, target):
            self.total += output.sum()

        def compute(self):
            assert self.total.dtype is torch.float32
            return self.total

    def parts():
        net, train, val = make(17)()
        return net.float(), TensorDataset(train.tensors[0].float(), train.tensors[1]), TensorDataset(val.tensors[0].float(), val.tensors[1])

    hooks = {"loss": cross_entropy, "metrics": {"dtype": dtype, "total": Total()}}
    options = {"epochs": 1, "batch_size": 24, "val_batch_size": 6, "optimizer": "sgd", "lr": 0.0, "precision": precision}
    one, two = (values(training(nproc, parts, hooks, **options)) for nproc in (1, 2))
    assert two["val_dtype"] == pytest.approx(one["val_dtype"], rel=1e-6)
    assert two["val_total"] == pytest.approx(one["val_total"], rel=1e-5)


def test_the_best_is_chosen_by_a_metric(training):
    result = run(training, 3, {"probability": probability}, epochs=4, lr=1.0, monitor="val_probability", mode="max")
    best = [event.data for event in result.of_kind("checkpoint") if event.data["name"] == "best"][-1]
    found = result.epochs["val_probability"]
    assert best["value"] == found.max()
    assert best["epoch"] == found.argmax() + 1


def test_a_wrong_monitor_is_found_before_the_first_epoch_ends(training):
    with pytest.raises(StepError, match=r"monitor=val_f1 is not recorded; recorded are .*val_loss.*val_correct"):
        run(training, 2, {"correct": correct}, monitor="val_f1", epochs=1000)


class Local:
    """Keeps its states on its rank."""

    def reset(self):
        self.hits = self.n = 0

    def update(self, output, target):
        self.hits += int(correct(output, target).sum())
        self.n += len(target)

    def compute(self):
        return self.hits / self.n


class LocalOfOurs(Local, nbddp.metric.Metric):
    pass


@pytest.mark.parametrize("metric", [Local(), LocalOfOurs()])
def test_a_metric_that_cannot_reduce_says_so_once(training, metric):
    one, three = (run(training, nproc, {"local": metric, "correct": correct}, epochs=2, n_val=2 if nproc == 3 else 17) for nproc in (1, 3))
    assert not [event for event in one.of_kind("message") if "val_local" in event.data["text"]]
    (event,) = [event for event in three.of_kind("message") if "val_local" in event.data["text"]]
    assert event.data["level"] == "warning"
    assert f"val_local is the mean over ranks of what each computes from its own samples, since {type(metric).__name__} can't" in event.data["text"]
    np.testing.assert_allclose(three.epochs["val_local"], three.epochs["val_correct"])  # a mean over samples is right even so


def test_a_metric_that_cannot_be_computed_from_one_batch_does_not_stop_the_run(training):
    class Patient(Confusion):
        def compute(self):
            if self.n < 17:
                message = "not enough"
                raise RuntimeError(message)
            return {"n": self.n}

    result = run(training, 3, {"patient": Patient()}, monitor="val_patient_n", mode="max")
    assert values(result)["val_patient_n"] == 17


def test_a_metric_that_fails_in_the_end_fails_the_run(training):
    class Broken(Confusion):
        def compute(self):
            message = "no such number"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="no such number"):
        run(training, 2, {"broken": Broken()})


# -- the exchange itself


def exchange(rank, n):
    import torch.distributed as dist

    from nbddp.evaluation.gather import gather_tensors
    from nbddp.evaluation.ranks import Ranks

    ranks = Ranks(rank, n, rank, torch.device("cpu"), "gloo", dist.new_group(backend="gloo"))
    held = [
        [torch.arange(6).reshape(2, 3), torch.tensor(True), torch.tensor([1 + 2j])],
        [],
        [torch.tensor([0.5], dtype=torch.bfloat16), torch.zeros(0, 4), torch.tensor(3.0, dtype=torch.float64), torch.arange(3, dtype=torch.uint8).t()],
    ]
    nothing = gather_tensors([], ranks)
    found = gather_tensors(held[rank], ranks)
    assert nothing == [[], [], []]
    for theirs, expected in zip(found, held, strict=True):
        for one, other in zip(theirs, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def test_tensors_of_any_number_shape_and_dtype_are_gathered(ranks):
    assert ranks(3, exchange, 3) == [True, True, True]


# -- on a GPU


def on_a_gpu(rank, n, metrics, make):
    import torch.distributed as dist

    from nbddp.evaluation.metrics import Metrics
    from nbddp.evaluation.ranks import Ranks

    device = torch.device("cuda", 0)
    ranks = Ranks(rank, n, rank, device, "gloo", dist.new_group(backend="gloo"))
    net, _, data = make()
    net.to(device).eval()
    measured = Metrics(metrics, ranks, pytest.fail)
    measured.reset()
    mine = torch.arange(rank, len(data), n)
    if len(mine):
        x, y = (tensor[mine].to(device) for tensor in data.tensors)
        with torch.no_grad():
            measured.update(net(x), y, len(mine), "loss")
    return measured.compute()


@pytest.mark.gpu
@pytest.mark.parametrize("n_val", [17, 1])
@pytest.mark.filterwarnings("ignore")
def test_states_on_a_gpu_are_merged_over_ranks(ranks, hooks_without_l1, n_val):
    """Three ranks that share a device: states travel by the CPU and go back."""
    metrics = {**hooks_without_l1, **torch_metrics()}
    del metrics["foreign"]  # reduces a state on the CPU by itself
    one, three = (ranks(n, on_a_gpu, n, metrics, make(n_val)) for n in (1, 3))
    for rank in three:
        assert rank == three[0]
    for name, value in one[0].items():
        assert three[0][name] == pytest.approx(value, rel=1e-6, nan_ok=True), name
