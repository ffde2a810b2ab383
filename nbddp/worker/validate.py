"""Validation: every sample counted once, on one rank, at any number of ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.data import Batches, LoaderOptions, ValShares, make_fetch
from nbddp.precision import autocast_context
from nbddp.worker.errors import StepError
from nbddp.worker.metrics import Metrics
from nbddp.worker.step import Signature, StepResult, read_result
from nbddp.worker.trial import trial

if TYPE_CHECKING:
    from nbddp.data import Micro
    from nbddp.worker.context import Context


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
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


class Validation:
    """The validation of a run, on the bare model: its forward passes need no other rank."""

    def __init__(self, context: Context, data: Any, options: LoaderOptions) -> None:
        self._context = context
        plan, ranks = context.plan, context.ranks
        self._hook = context.hooks.validation_name
        self._shares = ValShares(plan.n_val, plan.val_batch_size, ranks.world_size, ranks.rank, context.config.seed)
        fetch = make_fetch(data, context.hooks.val_collate_fn)
        self._batches = Batches(fetch, options, ranks.device)
        self._metrics = Metrics(context.hooks.metrics, ranks, lambda text: context.message(text, level="warning"))

    def run(self, epoch: int, tick: Callable[[], bool], precision: str) -> dict[str, float] | None:
        """The reduced values: `val_loss`, the step's scalars, the metrics; None where it was left early.

        `tick` is called after every global batch, on every rank alike, and says whether all ranks leave here. The steps run in the precision that is given,
        metrics in float32 or wider.
        """
        self._context.ranks.broadcast_buffers(self._context.model)
        values = self._evaluate(self._shares.epoch(epoch), tick, precision)
        if values is None:
            return None
        metrics = self._metrics.compute()
        assert metrics is not None, "only a trial ends without values"
        return self._joined(values, metrics)

    def probe(self, precision: str) -> list[str] | None:
        """Validate the first global batch, before training: what it needs is there, and what it will record is known, or an error says so at the start.

        Returns:
            The names that a validation records; None where a metric can't be computed from so few samples, so that its names are not known yet.

        Raises:
            StepError: as `run` does.
        """
        with trial(self._context.ranks.device, self._context.model):
            values = self._evaluate(itertools.islice(self._shares.epoch(0), 1), lambda: False, precision)
            assert values is not None, "it was not left early"
            metrics = self._metrics.compute(trial=True)
        return None if metrics is None else list(self._joined(values, metrics))

    def close(self) -> None:
        """End the loader workers."""
        self._batches.close()

    def _evaluate(self, micros: Iterator[Micro], tick: Callable[[], bool], precision: str) -> dict[str, float] | None:
        """Run the steps; return the means of loss and scalars over all ranks. The metrics have taken this rank's batches in."""
        context, ranks = self._context, self._context.ranks
        signature, sums = Signature(self._hook), Sums()
        self._metrics.reset()
        with evaluating(context.model):
            for batch, share in self._batches.epoch(micros):
                if share.weight:
                    with autocast_context(precision, ranks.device):
                        result = read_result(context.hooks.validation_step(context.model, batch), self._hook, training=False)
                    signature.check(result)
                    sums.add(result, float(share.weight if result.weight is None else result.weight))
                    self._metrics.update(result.output, result.target, share.weight, self._hook)
                context.position.ticks += 1
                if tick():
                    return None
        names = self._agree(signature)
        total = ranks.sum([sums.weight, *(sums.values.get(name, 0.0) for name in names)])
        return {name: value / total[0] if total[0] else float("nan") for name, value in zip(names, total[1:], strict=True)}

    def _joined(self, values: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """All values under the names that they are recorded as."""
        if clash := values.keys() & metrics.keys():
            message = f"{self._hook} returns {min(clash)}, and metrics names a {min(clash)} too: both would be recorded as val_{min(clash)}"
            raise StepError(message)
        return {f"val_{name}": value for name, value in {**values, **metrics}.items()}

    def _agree(self, signature: Signature) -> list[str]:
        """The names of all values; ranks without samples learn them from the others."""
        gathered = self._context.ranks.gather_objects(signature.names)
        known = [set(names) for names in gathered if names is not None]
        if any(names != known[0] for names in known):
            message = f"{self._hook} returned other scalars on other ranks: it returns the same names on every rank"
            raise StepError(message)
        return ["loss", *sorted(known[0])] if known else ["loss"]
