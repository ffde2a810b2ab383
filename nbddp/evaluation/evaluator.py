"""One evaluation of a model: its steps on the batches of this rank, and what they and the metrics amount to over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.evaluation.errors import StepError
from nbddp.evaluation.metrics import Metrics
from nbddp.evaluation.step import Signature, StepResult, read_result
from nbddp.precision import autocast_context

if TYPE_CHECKING:
    from nbddp.data import Micro
    from nbddp.evaluation.hooks import Hooks
    from nbddp.evaluation.ranks import Ranks


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class Sums:
    """Weighted sums of the loss and the scalars of steps, on this rank."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.values: dict[str, float] = {}

    def add(self, result: StepResult, weight: float) -> None:
        """Add what a step returned; with weight 0 it does not count, whatever it is."""
        self.weight += weight
        for name, value in {"loss": result.loss.detach(), **result.scalars}.items():
            self.values[name] = self.values.get(name, 0.0) + (float(value) * weight if weight else 0.0)


class Evaluator:
    """Evaluates a model, bare, with the validation step and the metrics of a run; all ranks make the same calls, and a forward pass needs no other rank.

    `warn` is called with what is to be said about the metrics.
    """

    def __init__(self, model: nn.Module, hooks: Hooks, ranks: Ranks, warn: Callable[[str], None]) -> None:
        self._model, self._ranks = model, ranks
        self._step, self._name = hooks.validation_step, hooks.validation_name
        self._metrics = Metrics(hooks.metrics, ranks, warn)

    def run(
        self, batches: Iterable[tuple[Any, Micro]], precision: str, *, tick: Callable[[], bool] = lambda: False, trial: bool = False
    ) -> dict[str, float] | None:
        """The values over all ranks: `val_loss`, the step's scalars, the metrics. Blocks.

        Args:
            batches: those of this rank, of which some may be empty.
            precision: what the steps run in; metrics are computed in float32 or wider.
            tick: called after every global batch, on every rank alike; says whether all ranks leave here.
            trial: the batches are too few to count on metrics.

        Returns:
            None where it was left early, and in a trial where a metric can't be computed from so few samples.

        Raises:
            StepError: a hook breaks its rule.
        """
        __tracebackhide__ = True
        values = self._means(batches, precision, tick)
        metrics = None if values is None else self._metrics.compute(trial=trial)
        return None if values is None or metrics is None else self._joined(values, metrics)

    def _means(self, batches: Iterable[tuple[Any, Micro]], precision: str, tick: Callable[[], bool]) -> dict[str, float] | None:
        """Run the steps; return the means of loss and scalars over all ranks. The metrics have taken this rank's batches in."""
        __tracebackhide__ = True
        signature, sums = Signature(self._name), Sums()
        self._metrics.reset()
        with evaluating(self._model):
            for batch, share in batches:
                if share.weight:
                    with autocast_context(precision, self._ranks.device):
                        result = read_result(self._step(self._model, batch), self._name, training=False)
                    signature.check(result)
                    sums.add(result, float(share.weight if result.weight is None else result.weight))
                    self._metrics.update(result.output, result.target, share.weight, self._name)
                if tick():
                    return None
        names = self._agree(signature)
        total = self._ranks.sum([sums.weight, *(sums.values.get(name, 0.0) for name in names)])
        return {name: value / total[0] if total[0] else float("nan") for name, value in zip(names, total[1:], strict=True)}

    def _joined(self, values: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """All values under the names that they are recorded as."""
        if clash := values.keys() & metrics.keys():
            message = f"{self._name} returns {min(clash)}, and metrics names a {min(clash)} too: both would be recorded as val_{min(clash)}"
            raise StepError(message)
        return {f"val_{name}": value for name, value in {**values, **metrics}.items()}

    def _agree(self, signature: Signature) -> list[str]:
        """The names of all values; ranks without samples learn them from the others."""
        gathered = self._ranks.gather_objects(signature.names)
        known = [set(names) for names in gathered if names is not None]
        if any(names != known[0] for names in known):
            message = f"{self._name} returned other scalars on other ranks: it returns the same names on every rank"
            raise StepError(message)
        return ["loss", *sorted(known[0])] if known else ["loss"]
