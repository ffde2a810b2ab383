"""Validation: every sample counted once, on one rank, at any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbddp.data import Batches, LoaderOptions, ValShares, make_fetch
from nbddp.evaluation.evaluator import Evaluator
from nbddp.worker.trial import trial

if TYPE_CHECKING:
    from nbddp.worker.context import Context


class Validation:
    """The validation of a run, on the bare model: its forward passes need no other rank."""

    def __init__(self, context: Context, data: Any, options: LoaderOptions) -> None:
        self._context = context
        plan, ranks = context.plan, context.ranks
        self._shares = ValShares(plan.n_val, plan.val_batch_size, ranks.world_size, ranks.rank, context.config.seed)
        fetch = make_fetch(data, context.hooks.val_collate_fn)
        self._batches = Batches(fetch, options, ranks.device)
        self._evaluator = Evaluator(context.model, context.hooks, ranks, lambda text: context.message(text, level="warning"))

    def run(self, epoch: int, tick: Callable[[], bool], precision: str) -> dict[str, float] | None:
        """The reduced values: `val_loss`, the step's scalars, the metrics; None where it was left early.

        `tick` is called after every global batch, on every rank alike, and says whether all ranks leave here. The steps run in the precision that is given,
        metrics in float32 or wider.
        """
        self._context.ranks.broadcast_buffers(self._context.model)
        batches = self._batches.epoch(self._shares.epoch(epoch))
        return self._evaluator.run(batches, precision, tick=lambda: self._ticked(tick))

    def probe(self, precision: str) -> list[str] | None:
        """Validate the first global batch, before training: what it needs is there, and what it will record is known, or an error says so at the start.

        Returns:
            The names that a validation records; None where a metric can't be computed from so few samples, so that its names are not known yet.

        Raises:
            StepError: as `run` does.
        """
        batches = self._batches.epoch(itertools.islice(self._shares.epoch(0), 1))
        with trial(self._context.ranks.device, self._context.model):
            values = self._evaluator.run(batches, precision, tick=lambda: self._ticked(lambda: False), trial=True)
        return None if values is None else list(values)

    def close(self) -> None:
        """End the loader workers."""
        self._batches.close()

    def _ticked(self, tick: Callable[[], bool]) -> bool:
        self._context.position.ticks += 1
        return tick()
