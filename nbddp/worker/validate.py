"""Validation: every sample counted once, on one rank, at any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.data import Batches, LoaderOptions, ValShares, make_fetch
from nbddp.precision import autocast_context
from nbddp.worker.errors import StepError
from nbddp.worker.step import Signature, read_result

if TYPE_CHECKING:
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


class Validation:
    """The validation of a stage, on the bare model: its forward passes need no other rank."""

    def __init__(self, context: Context, data: Any, options: LoaderOptions) -> None:
        self._context = context
        plan, ranks = context.plan, context.ranks
        self._shares = ValShares(plan.n_val, plan.val_batch_size, ranks.world_size, ranks.rank, context.config.seed)
        fetch = make_fetch(data, context.hooks.val_collate_fn)
        self._batches = Batches(fetch, options, ranks.device)

    def run(self, epoch: int, tick: Callable[[], bool]) -> dict[str, float] | None:
        """The reduced values, `val_loss` first; None where it was left early.

        `tick` is called after every global batch, on every rank alike, and says whether all ranks leave here.
        """
        context = self._context
        position, ranks = context.position, context.ranks
        ranks.broadcast_buffers(context.model)
        signature = Signature(context.hooks.validation_name)
        sums: dict[str, float] = {}
        weight = 0.0
        with evaluating(context.model), autocast_context(context.plan.precision, ranks.device):
            for batch, share in self._batches.epoch(self._shares.epoch(epoch)):
                if share.weight:
                    result = read_result(context.hooks.validation_step(context.model, batch), context.hooks.validation_name, training=False)
                    signature.check(result)
                    of = float(share.weight if result.weight is None else result.weight)
                    weight += of
                    for name, value in {"loss": result.loss.detach(), **result.scalars}.items():
                        sums[name] = sums.get(name, 0.0) + (float(value) * of if of else 0.0)
                position.ticks += 1
                if tick():
                    return None
        names = self._agree(signature)
        total = ranks.sum([weight, *(sums.get(name, 0.0) for name in names)])
        return {f"val_{name}": value / total[0] if total[0] else float("nan") for name, value in zip(names, total[1:], strict=True)}

    def close(self) -> None:
        """End the loader workers."""
        self._batches.close()

    def _agree(self, signature: Signature) -> list[str]:
        """The names of all values; ranks without samples learn them from the others."""
        gathered = self._context.ranks.gather_objects(signature.names)
        known = [set(names) for names in gathered if names is not None]
        if any(names != known[0] for names in known):
            message = f"{self._context.hooks.validation_name} returned other scalars on other ranks: it returns the same names on every rank"
            raise StepError(message)
        return ["loss", *sorted(known[0])] if known else ["loss"]
