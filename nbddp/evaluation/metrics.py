"""The metrics of a validation on one rank: functions, `nbddp.Metric` and objects like it, torchmetrics. All ranks make the same calls."""

from __future__ import annotations

import contextlib
import copy
import numbers
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from nbddp.evaluation import metric_states
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.gather import gather_tensors
from nbddp.evaluation.ranks import Ranks
from nbddp.metric import Metric, can_reduce, gathering, is_stateful, is_torchmetrics

Values = dict[str, float]


class _Kind(Protocol):
    """One metric, whatever its kind.

    `seen` is the number of samples that this rank took in. A trial may end without values (None), where the user's `compute` fails for so few samples.
    """

    def reset(self) -> None: ...
    def update(self, output: Any, target: Any, n: int) -> None: ...
    def compute(self, seen: int, *, trial: bool) -> Values | None: ...


class Metrics:
    """What the hook `metrics` names, from the `output` and `target` of validation steps."""

    def __init__(self, metrics: Mapping[str, Any], ranks: Ranks, warn: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._metrics: dict[str, _Kind] = {name: _kind(name, metric, ranks, warn) for name, metric in metrics.items()}
        self._seen = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics, in the order of the hook."""
        return tuple(self._metrics)

    def reset(self) -> None:
        """Begin a validation."""
        self._seen = 0
        for name, metric in self._metrics.items():
            with _named(name):
                metric.reset()

    def update(self, output: Any, target: Any, n: int, hook: str) -> None:
        """Take in a batch of n samples, as the step named `hook` returned it.

        Raises:
            StepError: the step did not return what metrics need, or a function did not return one value per sample.
        """
        if not self._metrics:
            return
        if missing := [name for name, value in (("output", output), ("target", target)) if value is None]:
            message = (
                f"metrics ({', '.join(self.names)}) are computed from output and target, and {hook} returned no {' and no '.join(missing)}: "
                "return {'loss': loss, 'output': output, 'target': target}"
            )
            raise StepError(message)
        output, target = widened(output), widened(target)
        self._seen += n
        for name, metric in self._metrics.items():
            with _named(name):
                metric.update(output, target, n)

    def compute(self, *, trial: bool = False) -> Values | None:
        """The values over all ranks, the same on every rank; blocks. None where, in a trial, a metric can't be computed from so few samples.

        Raises:
            StepError: a metric amounts to something other than numbers.
        """
        if not self._metrics:
            return {}
        values: Values = {}
        complete = True
        for name, metric in self._metrics.items():
            with _named(name):
                found = metric.compute(self._seen, trial=trial)
                if clash := values.keys() & (found or {}).keys():
                    message = f"metrics: two are recorded as val_{min(clash)}: give {name} another name"
                    raise StepError(message)
            complete = complete and found is not None
            values.update(found or {})
        return self._ranks.gather_objects(values if complete else None)[0]


def _kind(name: str, metric: Any, ranks: Ranks, warn: Callable[[str], None]) -> _Kind:
    if is_torchmetrics(metric):
        return _Torchmetrics(name, metric, ranks)
    if not is_stateful(metric):
        return _Function(name, metric, ranks)
    if can_reduce(metric):
        return _Stateful(name, metric, ranks, warn)
    if ranks.world_size > 1:
        warn(
            f"val_{name} is the mean over ranks of what each computes from its own samples, since {type(metric).__name__} can't bring its states together: "
            "declare them with add_state, or write dist_reduce"
        )
    return _PerRank(name, metric, ranks)


class _Function:
    """A function (output, target) -> one value per sample; the mean over all samples, in float64."""

    def __init__(self, name: str, function: Any, ranks: Ranks) -> None:
        self._name, self._ranks = name, ranks
        self._function = function.to(ranks.device).eval() if isinstance(function, nn.Module) else function

    def reset(self) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        self._n = 0

    def update(self, output: Any, target: Any, n: int) -> None:
        values = self._function(output, target)
        if isinstance(values, np.ndarray | np.generic):
            values = torch.as_tensor(values)
        if not isinstance(values, torch.Tensor) or values.is_complex() or tuple(values.shape) not in ((n,), () if n == 1 else (n,)):
            message = f"metrics: {self._name}(output, target) returned {described(values)} for a batch of {n}: it must return one real value per sample, "
            raise StepError(message + _remedy(values, n))
        self._sum += values.detach().to(self._sum.device, torch.float64).sum()
        self._n += n

    def compute(self, seen: int, *, trial: bool) -> Values | None:
        total, n = self._ranks.sum([float(self._sum), self._n])
        return {self._name: total / n if n else float("nan")}


def _remedy(values: Any, n: int) -> str:
    shape = f"a tensor of shape ({n},)"
    if not isinstance(values, torch.Tensor):
        return shape
    if values.ndim > 1 and len(values) == n:
        return f"{shape}, which .flatten(1).mean(1) makes of it where the mean is meant"
    return f"{shape}, and no mean over the batch; what is no mean over samples is an nbddp.Metric"


class _Stateful:
    """An `nbddp.Metric`, or an object like it with a `dist_reduce`."""

    def __init__(self, name: str, metric: Any, ranks: Ranks, warn: Callable[[str], None]) -> None:
        self._name, self._metric, self._ranks = name, metric, ranks
        self._growth = Growth(name, metric, warn) if Growth.matters(metric, ranks) else None
        _move(metric, ranks.device)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, output: Any, target: Any, n: int) -> None:
        self._metric.update(output, target)
        if self._growth is not None:
            self._growth.look()

    def compute(self, seen: int, *, trial: bool) -> Values | None:
        with gathering(lambda tensor: [tensors[0] for tensors in gather_tensors([tensor], self._ranks)]):
            self._metric.dist_reduce()
        return _computed(self._name, self._metric, seen, trial=trial)


class Growth:
    """Finds attributes of an `nbddp.Metric` that updates change though they are not declared: they are neither reset nor reduced."""

    def __init__(self, name: str, metric: Metric, warn: Callable[[str], None]) -> None:
        self._name, self._metric, self._warn = name, metric, warn
        self._before: dict[str, Any] | None = None
        self._told: set[str] = set()

    @staticmethod
    def matters(metric: Any, ranks: Ranks) -> bool:
        """Whether an undeclared attribute would falsify the number: not where the user's own `reset` and `dist_reduce` may care for it."""
        if not isinstance(metric, Metric):
            return False
        return type(metric).reset is Metric.reset or (ranks.world_size > 1 and type(metric).dist_reduce is Metric.dist_reduce)

    def look(self) -> None:
        """Compare with the update before. What only the first one sets, such as a number of classes, is no state."""
        now = {name: _fingerprint(value) for name, value in vars(self._metric).items() if not name.startswith("_") and name not in self._metric.states}
        if self._before is not None:
            for name in now.keys() & self._before.keys():
                if now[name] != self._before[name] and name not in self._told:
                    self._told.add(name)
                    self._warn(
                        f"metrics: update() of {self._name} changes {name}, which is not declared, so that it is neither reset before a validation nor reduced "
                        f"over ranks: self.add_state({name!r}, ...) in __init__ of {type(self._metric).__name__}"
                    )
        self._before = now


def _fingerprint(value: Any) -> Any:
    """What tells a state from what it was before the last update, as far as that is cheap."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | str) else len(value) if isinstance(value, list | dict | set) else None


class _PerRank:
    """A metric whose states stay on their rank: the mean of the ranks' values, weighted by samples."""

    def __init__(self, name: str, metric: Any, ranks: Ranks) -> None:
        self._name, self._metric, self._ranks = name, metric, ranks
        _move(metric, ranks.device)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, output: Any, target: Any, n: int) -> None:
        self._metric.update(output, target)

    def compute(self, seen: int, *, trial: bool) -> Values | None:
        mine = _computed(self._name, self._metric, seen, trial=trial) if seen else {}
        everyone = [(n, values) for n, values in self._ranks.gather_objects((seen, mine)) if n]
        found = [(n, values) for n, values in everyone if values is not None]
        if len(found) < len(everyone):
            return None
        total = sum(n for n, _ in found)
        return {key: sum(n * values.get(key, float("nan")) for n, values in found) / total for key in found[0][1]}


def _move(metric: Any, device: torch.device) -> None:
    if callable(getattr(metric, "to", None)):
        metric.to(device)


class _Torchmetrics:
    """A metric or collection of torchmetrics."""

    def __init__(self, name: str, metric: Any, ranks: Ranks) -> None:
        self._name, self._ranks = name, ranks
        self._metric = metric.to(ranks.device)
        metric_states.alone(metric)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, output: Any, target: Any, n: int) -> None:
        self._metric.update(output, target)

    def compute(self, seen: int, *, trial: bool) -> Values | None:
        with metric_states.merged(self._metric, self._ranks):
            return _computed(self._name, self._metric, seen, trial=trial)


def _computed(name: str, metric: Any, seen: int, *, trial: bool) -> Values | None:
    """Compute; None where that fails and nobody needs it: in a trial, and on a rank without samples, which lacks what `update` sets up besides states."""
    try:
        value = metric.compute()
    except Exception:
        if seen and not trial:
            raise
        return None
    return numbers_of(name, value)


def numbers_of(name: str, value: Any) -> Values:
    """The real number, or the numbers of a dict, that a metric amounts to, under the names that they are recorded as.

    Raises:
        StepError: names the metric and what it returned.
    """
    if isinstance(value, Mapping):
        if strange := [part for part in value if not f"{name}_{part}".isidentifier()]:
            message = f"metrics: {name} is computed to a dict with the name {strange[0]!r}: names are made of letters, digits and underscores"
            raise StepError(message)
        return {key: number for part, item in value.items() for key, number in numbers_of(f"{name}_{part}", item).items()}
    if (number := real_number(value)) is not None:
        return {name: number}
    remedy = "a real number, or a dict of names and real numbers"
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        remedy += "; an average makes one of several, such as average='macro', and torchmetrics' ClasswiseWrapper a dict"
    message = f"metrics: {name} is computed to {described(value)}: it must be {remedy}"
    raise StepError(message)


def real_number(value: Any) -> float | None:
    """The number that a real number is, or a tensor or array of one element; None for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, np.ndarray | np.generic):
        return float(value.reshape(())) if value.size == 1 and value.dtype.kind in "biuf" else None
    return float(value) if isinstance(value, numbers.Real) else None


def described(value: Any) -> str:
    """What a value is that should have been a number."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which metric an exception comes from, whose traceback may lie in a library alone."""
    try:
        yield
    except StepError:
        raise
    except Exception as error:
        error.add_note(f"in the metric {name}")
        raise


def like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Other values under the keys of a mapping, in one of its own type."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, MutableMapping):  # by copying, since constructors differ: that of a defaultdict takes a factory first
        other = copy.copy(mapping)
        for key, item in items.items():
            other[key] = item
        return other
    return type(mapping)(items)  # type: ignore[call-arg]  # as every immutable mapping can be made


def widened(value: Any) -> Any:
    """Half-precision tensors as float32, through dicts, sequences and namedtuples; the rest stays as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        changed = {key: new for key, item in value.items() if (new := widened(item)) is not item}
        return like(value, dict(value) | changed) if changed else value
    if isinstance(value, list | tuple):
        items = [widened(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
