"""Which samples a rank sees in which step, and how they become batches.

The order depends on (seed, stage, epoch) alone, never on the number of ranks: step k uses the same samples at every world size. Runs in the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from nbddp.deathguard import die_with_parent

Fetch = Callable[[list[int]], Any]


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; the same in every process and version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def epoch_order(n: int, *, seed: int, stage: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The order of all samples in one epoch: int64 of shape (n,)."""
    if not shuffle:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(derive_seed("order", seed, stage, epoch))
    return torch.randperm(n, generator=generator)


def split_indices(n: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation indices, both ascending, of a seeded split."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed("split", seed)))
    n_val = split_size(n, share)
    return order[n_val:].sort().values, order[:n_val].sort().values


def split_size(n: int, share: float) -> int:
    """Number of samples that `val_split` sets aside: at least one, and never all."""
    return min(max(1, round(n * share)), n - 1)


@dataclass(frozen=True, slots=True)
class Micro:
    """One rank's share of one micro-batch.

    `weight` is the number of samples that count: 0 where the rank has none left and repeats one to keep step with the others.
    `n_global` is the number of samples of the whole step over all ranks, `seed` what loader workers are seeded with.
    """

    indices: list[int]
    weight: int
    n_global: int
    seed: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Deals the samples of each step to the ranks: rank r takes every N-th, in `accumulate` micro-batches."""

    n: int
    batch_size: int
    world_size: int
    rank: int
    accumulate: int
    drop_last: bool
    shuffle: bool
    seed: int
    stage: int = 0

    @property
    def steps(self) -> int:
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Micro]:
        """The micro-batches of an epoch from `start_step` on, `accumulate` per step."""
        order = epoch_order(self.n, seed=self.seed, stage=self.stage, epoch=epoch, shuffle=self.shuffle)
        for step in range(start_step, self.steps):
            whole = order[step * self.batch_size : (step + 1) * self.batch_size]
            mine = whole[self.rank :: self.world_size]
            spare = whole[:1].tolist()
            for number, part in enumerate(torch.tensor_split(mine, self.accumulate)):
                indices = part.tolist()
                seed = derive_seed("batch", self.seed, self.stage, epoch, step, number, self.rank)
                yield Micro(indices or spare, len(indices), len(whole), seed)


@dataclass(frozen=True, slots=True)
class ValShares:
    """Deals validation samples without padding: every sample on one rank, once; the number of batches is the same on all ranks."""

    n: int
    batch_size: int
    world_size: int
    rank: int
    seed: int

    @property
    def steps(self) -> int:
        return -(-self.n // self.batch_size)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Micro]:
        """One (possibly empty) share per global batch."""
        for step in range(start_step, self.steps):
            stop = min(self.n, (step + 1) * self.batch_size)
            indices = list(range(step * self.batch_size + self.rank, stop, self.world_size))
            yield Micro(indices, len(indices), stop - step * self.batch_size, derive_seed("val", self.seed, epoch, step, self.rank))


def make_fetch(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Fetch:  # noqa: ANN401 - any map-style dataset
    """How a list of indices becomes a batch: by whole tensors, by `__getitems__`, or sample by sample."""
    if collate is None and (tensors := _tensors(dataset)) is not None:
        parts, through = tensors

        def by_tensor(indices: list[int]) -> list[torch.Tensor]:
            index = torch.tensor(indices)
            if through is not None:
                index = through[index]
            return [part.index_select(0, index) for part in parts]

        return by_tensor
    join = _collate if collate is None else collate
    if callable(getattr(dataset, "__getitems__", None)):
        return lambda indices: join(dataset.__getitems__(indices))
    return lambda indices: join([dataset[index] for index in indices])


def _collate(samples: list[Any]) -> Any:  # noqa: ANN401 - a batch
    """torch's default_collate, which knows no dataclasses, and dataclasses field by field."""
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return type(first)(**{field.name: _collate([getattr(sample, field.name) for sample in samples]) for field in dataclasses.fields(first)})
    return default_collate(samples)


def _tensors(dataset: object) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None:
    """The tensors of a TensorDataset (through Subsets, with their indices); None for a dataset that has its own `__getitem__`."""
    through: torch.Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(np.asarray(dataset.indices), dtype=torch.int64)
        through = indices if through is None else indices[through]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        plain = all(part.layout is torch.strided and not part.is_quantized for part in dataset.tensors)
        return (dataset.tensors, through) if plain else None
    return None


class _SeededFetch(Dataset[Any]):
    """Runs in loader workers: a batch is a function of its key, whichever worker makes it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:  # noqa: ANN401 - a batch
        seed, indices = key
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from numpy's global stream
        return self._fetch(indices) if indices else None


class _Keys(Sequence[tuple[int, list[int]]]):
    """The sampler of the loader: what the coming epoch fetches, in order."""

    def __init__(self) -> None:
        self.micros: list[Micro] = []

    def __len__(self) -> int:
        return len(self.micros)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - int or slice
        micro = self.micros[index]
        return micro.seed, micro.indices


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401 - a batch
    return batch


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How batches are made: loader workers of this rank, batches each holds ready, and where they go."""

    num_workers: int = 0
    prefetch_factor: int = 2
    persistent: bool = True
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None


class _InitWorker:
    """First call in a loader worker: it must not outlive its rank."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if self._then is not None:
            self._then(worker)


class Batches:
    """The batches of one rank, made in this process or by loader workers, on the rank's device."""

    def __init__(self, fetch: Fetch, options: LoaderOptions, device: torch.device) -> None:
        self._fetch, self._device = fetch, device
        self._keys = _Keys()
        self._loader: DataLoader[Any] | None = None
        if options.num_workers:
            self._loader = DataLoader(
                _SeededFetch(fetch),
                batch_size=None,
                sampler=self._keys,  # type: ignore[arg-type]
                num_workers=options.num_workers,
                prefetch_factor=options.prefetch_factor,
                persistent_workers=options.persistent,
                pin_memory=options.pin_memory,
                collate_fn=_as_it_is,
                worker_init_fn=_InitWorker(options.worker_init_fn),
                generator=torch.Generator().manual_seed(0),
            )
        self._pin = options.pin_memory and self._loader is None

    def epoch(self, micros: Iterator[Micro]) -> Iterator[tuple[Any, Micro]]:
        """Yield (batch, share); an empty share has no batch (None)."""
        if self._loader is None:
            for micro in micros:
                yield (self._to_device(self._fetch(micro.indices)) if micro.indices else None), micro
            return
        self._keys.micros = list(micros)
        for batch, micro in zip(self._loader, self._keys.micros, strict=True):
            yield self._to_device(batch), micro

    def _to_device(self, batch: Any) -> Any:  # noqa: ANN401 - a batch
        if self._device.type == "cpu":
            return batch
        return to_device(batch, self._device, pin=self._pin)


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:  # noqa: ANN401 - a batch
    """Move the tensors of a batch, through dicts, sequences, namedtuples, dataclasses and objects with a `to`; the rest stays as it is."""
    if isinstance(batch, torch.Tensor):
        return (batch.pin_memory() if pin and batch.device.type == "cpu" else batch).to(device, non_blocking=True)
    if isinstance(batch, str | bytes) or batch is None:
        return batch
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, pin=pin) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, pin=pin) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, pin=pin) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: to_device(getattr(batch, field.name), device, pin=pin) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch
