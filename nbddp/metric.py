"""Metrics that users write: the base class, how its states come together from all ranks, and what can be said about metrics before anything starts.

Made and checked in the kernel, updated and computed in the ranks, which say how tensors are gathered. Imports neither torchmetrics nor Jupyter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import nn

from nbddp.errors import ConfigError, suggest

Reduction = Literal["sum", "max", "min", "cat"]
Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Every rank's tensor, by rank; they may differ in shape and dtype."""

_gather: ContextVar[Gather] = ContextVar("gather", default=lambda value: [value])


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[None]:
    """Within it, `Metric.dist_sum` and `Metric.dist_concatenate` speak with the other ranks."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


class Metric(ABC):
    """A number over all validation samples, from states that are updated batch by batch and then reduced over the ranks.

    What a user writes::

        class Within(nbddp.Metric):
            def __init__(self, bound):
                self.bound = bound
                self.add_state("hits", 0)
                self.add_state("n", 0)

            def update(self, output, target):
                self.hits += ((output - target).abs() < self.bound).sum()
                self.n += target.numel()

            def compute(self):
                return self.hits / self.n

        metrics = {"within": Within(0.1)}

    Before each validation `reset` is called; `update` with what the step returned as `output` and `target` (half precision cast to float32) for each
    batch; and at the end, on every rank, `dist_reduce` and then `compute`, a real number, or a dict of names and numbers. A rank without samples takes part
    in `dist_reduce` with its states as they were declared. Where all that is to be reduced are declared states, neither `reset` nor `dist_reduce` needs
    to be written. `device` is the rank's device, where all tensors among the attributes are when a validation begins.
    """

    device: torch.device = torch.device("cpu")

    def add_state(self, name: str, default: float | torch.Tensor | Sequence[Any] | None = None, reduce: Reduction = "sum") -> None:
        """Declare a state: the attribute `name`, which `reset` sets to the default and `dist_reduce` makes that of all ranks.

        Args:
            name: name of the attribute.
            default: a number or tensor (0 if it is not given); for "cat" an empty list, to which `update` appends tensors.
            reduce: "sum", "max" and "min" work element by element; "cat" joins the lists of all ranks, rank by rank, to one tensor of shape (n, ...), and
                elements of shape () to one of shape (n,). Afterwards every state is a tensor.

        Raises:
            ConfigError: names the state and the rule.
        """
        if reduce not in get_args(Reduction):
            message = f"add_state({name!r}): reduce={reduce!r} is none of {', '.join(get_args(Reduction))}.{suggest(str(reduce), get_args(Reduction))}"
            raise ConfigError(message)
        if not name.isidentifier() or hasattr(type(self), name):
            message = f"add_state({name!r}): a state is an attribute of its own, so its name is an identifier that {type(self).__name__} does not use otherwise"
            raise ConfigError(message)
        if default is None:
            default = [] if reduce == "cat" else 0
        if reduce == "cat" and not (isinstance(default, list) and not default):
            message = f"add_state({name!r}): the default of a state that is joined is an empty list, to which update appends tensors"
            raise ConfigError(message)
        if reduce != "cat" and not isinstance(default, int | float | torch.Tensor):
            message = f"add_state({name!r}): the default is a {type(default).__name__}; it must be a number or a tensor, and for reduce='cat' an empty list"
            raise ConfigError(message)
        self.__dict__.setdefault("_declared", {})[name] = (copy.deepcopy(default), reduce)
        setattr(self, name, copy.deepcopy(default))

    @property
    def states(self) -> dict[str, Any]:
        """The declared states as they are now."""
        return {name: getattr(self, name) for name in self._declarations()}

    @abstractmethod
    def update(self, output: Any, target: Any) -> None:
        """Take in one batch of this rank."""

    @abstractmethod
    def compute(self) -> Any:
        """The real number, or a dict of names and real numbers, that the reduced states amount to."""

    def reset(self) -> None:
        """Set the declared states to their defaults."""
        for name, (default, _) in self._declarations().items():
            setattr(self, name, default.detach().clone() if isinstance(default, torch.Tensor) else copy.copy(default))

    def dist_reduce(self) -> None:
        """Make the declared states those of all ranks; called on every rank before `compute`, in a single process too."""
        for name, (default, reduce) in self._declarations().items():
            value = getattr(self, name)
            if reduce == "cat":
                reduced = self.dist_concatenate(value)
            elif reduce == "sum":  # what the state began with counts once, and not once per rank
                reduced = self.dist_sum(value - default) + default if _any(default) else self.dist_sum(value)
            else:
                own = self._tensor(value)
                gathered = torch.broadcast_tensors(*_gather.get()(own))
                reduced = (torch.amax if reduce == "max" else torch.amin)(torch.stack(gathered), dim=0).to(own.device)
            setattr(self, name, reduced)

    def dist_sum(self, value: float | torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a number or tensor, in float64 or int64 on the way; for a `dist_reduce` of one's own, which every rank calls."""
        own = self._tensor(value)
        parts = _gather.get()(own)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        total = torch.zeros((), dtype=wide, device=parts[0].device)
        for part in parts:
            total = total + part.to(wide)
        return total.to(own.device, torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype if dtype.is_complex else wide)

    def dist_concatenate(self, value: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """The elements of all ranks joined along the first dimension, rank by rank; a rank may have another number of them than the others, or none.

        Returns:
            A tensor of shape (n, ...); (0,) where no rank has any.

        Raises:
            ValueError: elements of different ranks differ in shape.
        """
        parts = [self._tensor(part) for part in ([value] if isinstance(value, torch.Tensor) else value)]
        parts = [part.reshape(1) if part.ndim == 0 else part for part in parts]
        own = torch.cat(parts) if parts else torch.zeros(0, device=self.device)
        gathered = _gather.get()(own)
        filled = [(rank, part) for rank, part in enumerate(gathered) if part.numel()]
        for rank, part in filled:
            first, whole = filled[0]
            if part.shape[1:] != whole.shape[1:]:
                message = f"elements of shape {tuple(whole.shape[1:])} on rank {first} and {tuple(part.shape[1:])} on rank {rank} can't be joined"
                raise ValueError(message)
        return (torch.cat([part for _, part in filled]) if filled else gathered[0]).to(own.device)

    def to(self, device: torch.device) -> Metric:
        """Move the tensors and modules among the attributes, and the defaults of the states, to a device."""
        self.device = device
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor | nn.Module):
                setattr(self, name, value.to(device))
        moved = {name: (d.to(device) if isinstance(d, torch.Tensor) else d, reduce) for name, (d, reduce) in self._declarations().items()}
        if moved:
            self._declared = moved
        return self

    def _declarations(self) -> dict[str, tuple[Any, Reduction]]:
        """Default and reduction of each state; there without `super().__init__()`, which a user need not call."""
        found: dict[str, tuple[Any, Reduction]] = self.__dict__.get("_declared", {})
        return found

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach()
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device=self.device)


def _any(default: float | torch.Tensor) -> bool:
    return bool((default != 0).any()) if isinstance(default, torch.Tensor) else default != 0


def is_torchmetrics(metric: object) -> bool:
    """Whether it is an object of torchmetrics, which is not imported for that: whoever has one has imported it."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(metric, torchmetrics.Metric | torchmetrics.MetricCollection)


def is_stateful(metric: object) -> bool:
    """Whether it takes batches in and computes at the end, as a `Metric` does and any object that has the same methods; else it is a function."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def can_reduce(metric: object) -> bool:
    """Whether a stateful metric, other than one of torchmetrics, brings the states of all ranks together."""
    if isinstance(metric, Metric) and type(metric).dist_reduce is Metric.dist_reduce:
        return bool(metric.states)
    return callable(getattr(metric, "dist_reduce", None))


def check_metrics(metrics: object, *, validated: bool = True) -> None:
    """Check the hook `metrics` of a request.

    Args:
        metrics: what the user gave; names and metrics, if it is right.
        validated: whether there is validation data.

    Raises:
        ConfigError: names the metric, the rule and the remedy.
    """
    if not isinstance(metrics, Mapping):
        message = f"metrics is a {type(metrics).__name__}: it must be a dict of names and metrics, as in metrics = {{'accuracy': accuracy}}"
        raise ConfigError(message)
    if metrics and not validated:
        message = f"metrics ({', '.join(map(str, metrics))}) are computed in validation, and there is no validation data: give --val or --val-split"
        raise ConfigError(message)
    seen: dict[int, str] = {}
    for name, metric in metrics.items():
        _check_name(name)
        if isinstance(metric, type):
            message = f"metrics: {name} is the class {metric.__name__}, not an instance: write {metric.__name__}(...)"
            raise ConfigError(message)
        if is_torchmetrics(metric) or is_stateful(metric):
            if (other := seen.setdefault(id(metric), name)) != name:
                message = f"metrics: {other} and {name} are the same object, which would take every batch in twice: make one for each"
                raise ConfigError(message)
            _check_reset(name, metric)
        else:
            _check_function(name, metric)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        message = f"metrics: the name {name!r} can't be recorded as val_{name}: a name is made of letters, digits and underscores"
        raise ConfigError(message)
    if name == "loss":
        message = "metrics: the name loss is taken, val_loss being recorded anyway: give the metric another name"
        raise ConfigError(message)


def _check_reset(name: str, metric: object) -> None:
    if isinstance(metric, Metric) and not metric.states and type(metric).reset is Metric.reset:
        message = (
            f"metrics: {name} ({type(metric).__name__}) declares no states and has no reset, so that a validation would go on from the one before: "
            "declare what update changes in __init__, as in self.add_state('hits', 0)"
        )
        raise ConfigError(message)


def _check_function(name: str, metric: object) -> None:
    if not callable(metric):
        what = "an object without reset()" if hasattr(metric, "update") and hasattr(metric, "compute") else f"a {type(metric).__name__}"
        message = f"metrics: {name} is {what}: it must be a torchmetrics metric, an nbddp.Metric, or a function (output, target) -> per-sample values"
        raise ConfigError(message)
    try:
        signature = inspect.signature(metric.forward if isinstance(metric, nn.Module) else metric)
    except (TypeError, ValueError):  # of a function written in C, which need not tell
        return
    try:
        signature.bind("output", "target")
    except TypeError:
        message = f"metrics: {name}{signature} can't be called as {name}(output, target), which is how it is called"
        raise ConfigError(message) from None
