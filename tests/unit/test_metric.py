"""`nbddp.Metric` in one process, what is refused about metrics before anything starts, and how their results are read."""

from __future__ import annotations

import collections
import copy
import functools
import operator
import pickle
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from nbddp.errors import ConfigError
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.metrics import Metrics, numbers_of, real_number, widened
from nbddp.metric import Metric, can_reduce, check_metrics, gathering, is_stateful, is_torchmetrics


class Within(Metric):
    """As in the documentation: no `super().__init__()`, no reset, no dist_reduce."""

    def __init__(self, bound):
        self.bound = bound
        self.add_state("hits", 0)
        self.add_state("n", 0)

    def update(self, output, target):
        self.hits += ((output - target).abs() < self.bound).sum()
        self.n += target.numel()

    def compute(self):
        return self.hits / self.n


class Seen(Metric):
    def __init__(self, **states):
        for name, (default, reduce) in states.items():
            self.add_state(name, default, reduce)

    def update(self, output, target):
        pass

    def compute(self):
        return 0.0


def beside(*others):
    """As if the other ranks held these."""
    return gathering(lambda tensor: [tensor, *(torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None) for value in others)])


def test_the_documented_metric_counts_over_batches_and_begins_anew():
    metric = Within(0.5)
    for _ in range(2):
        metric.reset()
        metric.update(torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3))
        metric.update(torch.tensor([0.1]), torch.zeros(1))
        metric.dist_reduce()
        assert float(metric.compute()) == 0.5
    assert metric.states == {"hits": torch.tensor(2), "n": torch.tensor(4)}


def test_a_copy_and_a_pickled_metric_keep_their_declarations():
    metric = Within(0.5)
    metric.update(torch.zeros(2), torch.zeros(2))
    for other in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        other.reset()
        assert other.states == {"hits": 0, "n": 0}
    assert metric.states == {"hits": torch.tensor(2), "n": 2}


def test_a_metric_without_update_and_compute_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Metric()


@pytest.mark.parametrize(
    "default, reduce, values, expected",
    [
        (0, "sum", [1, 2, 3], torch.tensor(6)),
        (0, "sum", [1, torch.tensor([1.0, 2.0]), 0], torch.tensor([2.0, 3.0])),  # a rank without samples still has the default
        (0.0, "sum", [0.5, 0.25], torch.tensor(0.75, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.int32), "sum", [torch.tensor([1, 2], dtype=torch.int32)] * 2, torch.tensor([2, 4])),
        (torch.zeros(2, dtype=torch.bool), "sum", [torch.tensor([True, False])] * 3, torch.tensor([3, 0])),
        (torch.zeros(1, dtype=torch.uint8), "sum", [torch.tensor([200], dtype=torch.uint8)] * 2, torch.tensor([400])),
        (torch.zeros(1, dtype=torch.float16), "sum", [torch.tensor([60000.0], dtype=torch.float16)] * 2, torch.tensor([120000.0])),
        (0, "sum", [torch.tensor(1 + 2j), torch.tensor(1j)], torch.tensor(1 + 3j)),
        (0, "max", [1, 5, 3], torch.tensor(5)),
        (torch.tensor([9.0, 9.0]), "min", [torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0])], torch.tensor([1.0, 3.0])),
        (0, "max", [0, torch.tensor([3, 4])], torch.tensor([3, 4])),
    ],
)
def test_states_are_reduced_as_declared(default, reduce, values, expected):
    metric = Seen(state=(default, reduce))
    metric.state = values[0]
    with beside(*values[1:]):
        metric.dist_reduce()
    torch.testing.assert_close(metric.state, expected, rtol=0, atol=0)


def test_what_a_sum_begins_with_counts_once():
    metric = Seen(state=(1.0, "sum"), grid=(torch.tensor([1.0, 0.0]), "sum"))
    metric.state += 2
    metric.grid += 3
    with gathering(lambda tensor: [tensor] * 3):
        metric.dist_reduce()
    assert float(metric.state) == 7
    assert metric.grid.tolist() == [10, 9]


@pytest.mark.parametrize(
    "own, others, expected",
    [
        ([], [], torch.zeros(0)),
        ([torch.tensor(1.0), torch.tensor(2.0)], [torch.zeros(0), torch.tensor([3.0])], torch.tensor([1.0, 2.0, 3.0])),
        ([], [torch.tensor([[1, 2]])], torch.tensor([[1, 2]])),
        ([torch.tensor([[1.0, 2.0]]), torch.zeros(0, 2)], [torch.zeros(0), torch.ones(2, 2)], torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])),
        (torch.tensor([1.0]), [torch.tensor([2.0], dtype=torch.float64)], torch.tensor([1.0, 2.0], dtype=torch.float64)),
    ],
)
def test_joined_states_are_one_tensor(own, others, expected):
    metric = Seen(rows=([], "cat"))
    if isinstance(own, list):
        for part in own:
            metric.rows.append(part)
    else:
        metric.rows = own
    with gathering(lambda tensor: [tensor, *others]):
        metric.dist_reduce()
    torch.testing.assert_close(metric.rows, expected)


def test_rows_of_different_shapes_are_not_joined():
    metric = Seen(rows=([], "cat"))
    metric.rows.append(torch.zeros(2, 3))
    with gathering(lambda tensor: [tensor, torch.zeros(1, 4)]), pytest.raises(ValueError, match=r"shape \(3,\) on rank 0 and \(4,\) on rank 1 can't be joined"):
        metric.dist_reduce()


def test_the_default_of_a_joined_state_is_not_shared():
    metric = Seen(rows=(None, "cat"))
    metric.rows.append(torch.ones(1))
    metric.reset()
    assert metric.rows == []
    assert Seen(rows=([], "cat")).rows == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("hits", 0, "summ"), "reduce='summ' is none of sum, max, min, cat. Did you mean sum"),
        (("hits", 0, "mean"), "reduce='mean' is none of"),
        (("a b", 0), "add_state\\('a b'\\): a state is an attribute of its own"),
        (("update", 0), "add_state\\('update'\\): a state is an attribute of its own, so its name is an identifier that Seen does not use otherwise"),
        (("hits", [1], "cat"), "the default of a state that is joined is an empty list"),
        (("hits", torch.zeros(3), "cat"), "the default of a state that is joined is an empty list"),
        (("hits", []), "the default is a list; it must be a number or a tensor, and for reduce='cat' an empty list"),
        (("hits", "0"), "the default is a str"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Seen().add_state(*arguments)


def test_a_metric_moves_with_its_tensors_modules_and_defaults():
    metric = Seen(grid=(torch.zeros(2), "sum"), n=(0, "sum"))
    metric.thresholds, metric.net = torch.ones(3), nn.Linear(2, 2)
    metric.to(torch.device("meta"))
    metric.reset()
    assert {metric.grid.device.type, metric.thresholds.device.type, metric.net.weight.device.type, metric.device.type} == {"meta"}
    assert metric.n == 0
    assert Metric.device.type == "cpu"


class OwnReduction(Seen):
    def dist_reduce(self):
        self.total = self.dist_sum(self.total)


class Duck:
    def update(self, output, target): ...
    def compute(self): ...
    def reset(self): ...


def test_kinds_are_told_apart():
    accuracy = torchmetrics.classification.BinaryAccuracy()
    assert is_torchmetrics(accuracy)
    assert is_torchmetrics(torchmetrics.MetricCollection([accuracy]))
    assert not is_torchmetrics(Duck())
    assert is_stateful(Within(1))
    assert is_stateful(Duck())
    assert not is_stateful(operator.eq)
    assert can_reduce(Within(1))
    assert can_reduce(OwnReduction())
    assert not can_reduce(Seen())
    assert not can_reduce(Duck())


# -- what is refused before anything starts


def accuracy(output, target):
    return output.argmax(1) == target


def test_what_is_right_passes():
    check_metrics({})
    check_metrics({}, validated=False)
    check_metrics(
        {
            "accuracy": accuracy,
            "class": lambda output, target: output,
            "partial": functools.partial(lambda bound, output, target: output, 0.5),
            "builtin": operator.eq,
            "module": nn.L1Loss(reduction="none"),
            "within": Within(0.1),
            "duck": Duck(),
            "auroc": torchmetrics.AUROC(task="binary"),
            "both": torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]),
        }
    )


@pytest.mark.parametrize(
    "metrics, message",
    [
        ([accuracy], "metrics is a list: it must be a dict of names and metrics"),
        (accuracy, "metrics is a function: it must be a dict"),
        (torchmetrics.MeanSquaredError(), "metrics is a MeanSquaredError: it must be a dict"),
        ({1: accuracy}, "metrics: the name 1 can't be recorded as val_1"),
        ({"top 5": accuracy}, "the name 'top 5' can't be recorded"),
        ({"": accuracy}, "the name '' can't be recorded"),
        ({"loss": accuracy}, "the name loss is taken"),
        ({"a": Within}, r"a is the class Within, not an instance: write Within\(...\)"),
        ({"a": torchmetrics.MeanSquaredError}, "a is the class MeanSquaredError, not an instance"),
        ({"a": None}, "a is a NoneType: it must be a torchmetrics metric, an nbddp.Metric, or a function"),
        ({"a": "accuracy"}, "a is a str"),
        ({"a": lambda output: output}, r"a\(output\) can't be called as a\(output, target\)"),
        ({"a": lambda output, target, extra: output}, r"a\(output, target, extra\) can't be called"),
        ({"a": nn.Linear(2, 2)}, r"a\(input: torch.Tensor\) -> torch.Tensor can't be called"),
        ({"a": Seen()}, r"a \(Seen\) declares no states and has no reset"),
        ({"a": type("Half", (), {"update": None, "compute": None})()}, r"a is an object without reset\(\)"),
    ],
)
def test_what_is_wrong_is_refused_in_words(metrics, message):
    with pytest.raises(ConfigError, match=message):
        check_metrics(metrics)


def test_metrics_need_validation_data():
    with pytest.raises(ConfigError, match=r"metrics \(accuracy\) are computed in validation, and there is no validation data: give --val or --val-split"):
        check_metrics({"accuracy": accuracy}, validated=False)


def test_one_object_under_two_names_is_refused_and_one_function_is_not():
    check_metrics({"a": accuracy, "b": accuracy})
    for metric in (Within(1), torchmetrics.MeanSquaredError()):
        with pytest.raises(ConfigError, match="a and b are the same object"):
            check_metrics({"a": metric, "b": metric})


def test_metrics_are_checked_without_torchmetrics():
    program = """
import sys, nbddp.metric, nbddp.evaluation.metrics
nbddp.metric.check_metrics({"a": lambda output, target: output})
print([name for name in sys.modules if name.split(".")[0] in ("torchmetrics", "IPython", "zmq", "traitlets")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- results


@pytest.mark.parametrize(
    "value, expected",
    [
        (1, 1.0),
        (True, 1.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[2]]), 2.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array([0.5]), 0.5),
        (np.bool_(True), 1.0),
        (float("inf"), float("inf")),
        (torch.zeros(2), None),
        (torch.zeros(0), None),
        (torch.tensor(1j), None),
        (1j, None),
        (np.zeros(2), None),
        (np.array("a"), None),
        ("1", None),
        (None, None),
    ],
)
def test_real_numbers_are_read_from_what_holds_one(value, expected):
    assert real_number(value) == expected


def test_dicts_of_numbers_are_recorded_under_joint_names():
    assert numbers_of("f1", {"macro": 0.5, "classes": {"cat": torch.tensor(1.0), 1: np.float64(2)}}) == {
        "f1_macro": 0.5,
        "f1_classes_cat": 1.0,
        "f1_classes_1": 2.0,
    }
    assert np.isnan(numbers_of("f1", float("nan"))["f1"])


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.zeros(10), r"metrics: f1 is computed to a tensor of shape \(10,\), float32: it must be a real number.*average='macro'.*ClasswiseWrapper"),
        (None, "f1 is computed to None: it must be a real number, or a dict of names and real numbers"),
        ((1.0, 2.0), "f1 is computed to a tuple"),
        (np.zeros(3), r"f1 is computed to an array of shape \(3,\)"),
        ({"macro": torch.zeros(2)}, r"f1_macro is computed to a tensor of shape \(2,\)"),
        (torch.tensor(1j), r"f1 is computed to a tensor of shape \(\), complex64"),
    ],
)
def test_a_result_that_is_no_number_is_refused(value, message):
    with pytest.raises(StepError, match=message):
        numbers_of("f1", value)


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def test_half_precision_is_widened_within_structures():
    half, double = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    nested = {"a": [half, double], "b": Pair(half.half(), 1), "c": (half, "x"), "d": collections.OrderedDict(e=half)}
    wide = widened(nested)
    assert [wide["a"][0].dtype, wide["a"][1].dtype] == [torch.float32, torch.float64]
    assert isinstance(wide["b"], Pair)
    assert wide["b"].a.dtype is torch.float32
    assert wide["c"][0].dtype is torch.float32
    assert type(wide["d"]) is collections.OrderedDict
    assert wide["d"]["e"].dtype is torch.float32
    assert nested["a"][0].dtype is torch.bfloat16, "the step's own output is left alone"


def test_what_has_nothing_to_widen_stays_the_same_object():
    for value in ({"a": [torch.ones(1)], "b": (1, None)}, [torch.ones(1, dtype=torch.int64)], "text", None):
        assert widened(value) is value


# -- a validation in one process


@pytest.fixture
def alone():
    from nbddp.evaluation.ranks import Ranks

    return Ranks(0, 1, 0, torch.device("cpu"), "gloo", None)


@pytest.mark.parametrize(
    "function, message",
    [
        (
            lambda o, t: (o == t).float().mean(),
            r"a\(output, target\) returned a tensor of shape \(\), float32 for a batch of 3.*one real value per sample.*no mean over the batch",
        ),
        (lambda o, t: torch.stack([o, o], 1), r"shape \(3, 2\).*a tensor of shape \(3,\), which .flatten\(1\).mean\(1\) makes of it"),
        (lambda o, t: o[:2], r"shape \(2,\), float32 for a batch of 3"),
        (lambda o, t: o.to(torch.complex64), r"shape \(3,\), complex64"),
        (lambda o, t: 0.5, "returned a float for a batch of 3"),
        (lambda o, t: None, "returned None for a batch of 3"),
    ],
)
def test_a_function_returns_one_value_per_sample(alone, function, message):
    metrics = Metrics({"a": function}, alone, pytest.fail)
    metrics.reset()
    with pytest.raises(StepError, match=message):
        metrics.update(torch.zeros(3), torch.zeros(3), 3, "loss")


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy(), lambda x: x.bool(), lambda x: x.long(), lambda x: x.to(torch.bfloat16)])
def test_a_function_returns_any_real_dtype(alone, convert):
    metrics = Metrics({"a": lambda output, target: convert(output)}, alone, pytest.fail)
    metrics.reset()
    metrics.update(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3), 3, "loss")
    metrics.update(torch.tensor([1.0]), torch.zeros(1), 1, "loss")
    assert metrics.compute() == {"a": 0.75}


def test_a_single_sample_may_have_lost_its_dimension(alone):
    metrics = Metrics({"a": lambda output, target: (output - target).squeeze()}, alone, pytest.fail)
    metrics.reset()
    metrics.update(torch.ones(1, 1), torch.zeros(1, 1), 1, "loss")
    assert metrics.compute() == {"a": 1.0}


def test_values_that_are_not_finite_are_recorded_as_such(alone):
    metrics = Metrics({"a": lambda output, target: output / 0}, alone, pytest.fail)
    metrics.reset()
    metrics.update(torch.ones(2), torch.ones(2), 2, "loss")
    assert metrics.compute() == {"a": float("inf")}


def test_undeclared_attributes_that_grow_are_told_once(alone):
    class Forgets(Within):
        def __init__(self):
            super().__init__(0.5)
            self.extra, self.rows = 0, []

        def update(self, output, target):
            super().update(output, target)
            self.width = output.shape[0]  # no state: the same from the first update on
            self.extra += 1

    told = []
    metrics = Metrics({"a": Forgets(), "b": Within(1)}, alone, told.append)
    metrics.reset()
    for _ in range(4):
        metrics.update(torch.zeros(2), torch.zeros(2), 2, "loss")
    assert len(told) == 1
    assert "update() of a changes extra, which is not declared" in told[0]
    assert "self.add_state('extra', ...) in __init__ of Forgets" in told[0]


def test_two_metrics_that_are_recorded_under_one_name_are_refused(alone):
    class Both(Within):
        def compute(self):
            return {"b": 1.0}

    metrics = Metrics({"a_b": Within(1), "a": Both(1)}, alone, pytest.fail)
    metrics.reset()
    metrics.update(torch.zeros(2), torch.zeros(2), 2, "loss")
    with pytest.raises(StepError, match="metrics: two are recorded as val_a_b: give a another name"):
        metrics.compute()


def test_an_exception_says_in_which_metric_it_was(alone):
    metrics = Metrics({"a": accuracy, "mse": torchmetrics.MeanSquaredError()}, alone, pytest.fail)
    metrics.reset()
    with pytest.raises(RuntimeError, match="same shape") as caught:
        metrics.update(torch.zeros(2, 2), torch.zeros(2), 2, "loss")
    assert caught.value.__notes__ == ["in the metric mse"]
