"""The data of a rank: training batches, the user's sampler, validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp.data import Batches, LoaderOptions, Part, make_fetch, split_indices
from nbddp.sampler import GlobalSampler
from nbddp.worker.validate import Validation

if TYPE_CHECKING:
    from nbddp.data import Shares
    from nbddp.worker.context import Context


@dataclass(frozen=True, slots=True)
class Feed:
    """Made once in a run; stages deal the samples anew."""

    batches: Batches
    sampler: GlobalSampler | None
    validation: Validation | None

    @classmethod
    def of(cls, context: Context) -> Feed:
        config, plan, ranks = context.config, context.plan, context.ranks
        train_data, val_data = context.train_data, context.val_data
        if config.val_split is not None:
            train_indices, val_indices = split_indices(len(train_data), config.val_split, config.seed)
            train_data, val_data = Part(train_data, train_indices), Part(train_data, val_indices)
        options = LoaderOptions(
            num_workers=plan.workers_per_rank,
            prefetch_factor=config.prefetch_factor,
            persistent=config.persistent_workers,
            pin_memory=ranks.device.type == "cuda" if config.pin_memory is None else config.pin_memory and torch.cuda.is_available(),
            worker_init_fn=context.hooks.worker_init_fn,
        )
        sampler = context.hooks.sampler
        return cls(
            batches=Batches(make_fetch(train_data, context.hooks.collate_fn), options, ranks.device),
            sampler=None if sampler is None else GlobalSampler(sampler, train_data, seed=config.seed),
            validation=Validation(context, val_data, options) if val_data is not None and plan.n_val else None,
        )

    def first_batch(self, shares: Shares) -> Any:
        """A micro-batch as the steps of a stage will get it; it draws on the random streams as they do."""
        batches = self.batches.epoch(shares.epoch(1))
        batch, _ = next(batches)
        batches.close()
        return batch

    def close(self) -> None:
        """End the loader workers."""
        self.batches.close()
        if self.validation is not None:
            self.validation.close()
