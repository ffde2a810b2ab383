"""Which samples a rank sees in which step, and how they become batches.

The order depends on (seed, stage, epoch) alone, never on the number of ranks: step k uses the same samples at every world size. Runs in the ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from nbddp.deathguard import die_with_parent
from nbddp.sampler import GlobalSampler, Indices, derive_seed, epoch_order

Fetch = Callable[[Indices], Any]
"""Makes a batch of the samples at these indices, of shape (n,)."""


class Part(Dataset[Any]):
    """The samples of a dataset at some indices: a `Subset` that keeps them as one tensor."""

    def __init__(self, dataset: Any, indices: torch.Tensor) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    def __getitems__(self, indices: list[int]) -> Any:
        """Several samples at once, by the dataset's own method where it has one."""
        return _samples(self.dataset, self.indices[torch.as_tensor(indices)].tolist())


def split_indices(n: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation indices, both ascending, of a seeded split."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed("split", seed)))
    n_val = split_size(n, share)
    return order[n_val:].sort().values, order[:n_val].sort().values


def split_size(n: int, share: float) -> int:
    """Number of samples that `val_split` sets aside: at least one, and never all."""
    return min(max(1, round(n * share)), n - 1)


@dataclass(slots=True, eq=False)
class Micro:
    """One rank's share of one micro-batch.

    `indices` is of shape (n,). `weight` is the number of samples that count: 0 where the rank has none left and repeats one to keep step with the
    others. `n_global` is the number of samples of the whole step over all ranks, `place` what tells this micro-batch from all others.
    """

    indices: Indices
    weight: int
    n_global: int
    place: tuple[str | int, ...]

    @property
    def seed(self) -> int:
        """What a loader worker is seeded with before it makes the batch."""
        return derive_seed(*self.place)


@dataclass(frozen=True, slots=True)
class Shares:
    """Deals the samples of each step to the ranks: rank r takes every N-th, in `accumulate` micro-batches.

    `n` is the number of samples in an epoch; with a `sampler` of the user's, which replaces `shuffle`, that is the sampler's length.
    """

    n: int
    batch_size: int
    world_size: int
    rank: int
    accumulate: int
    drop_last: bool
    shuffle: bool
    seed: int
    stage: int = 0
    sampler: GlobalSampler | None = None

    @property
    def steps(self) -> int:
        """Steps in a whole epoch."""
        return self.steps_left(0)

    def steps_left(self, start: int) -> int:
        """Steps after the first `start` samples of an epoch, over all ranks; 0 where they don't fill a batch and the tail is left out."""
        left = max(0, self.n - start)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Micro]:
        """The micro-batches of an epoch, `accumulate` per step, after its first `start` samples, whatever batch and number of ranks these were dealt with.

        Raises:
            SamplerError: where the sampler's indices break its rule.
        """
        order = self._order(epoch)
        for step in range(self.steps_left(start)):
            first = start + step * self.batch_size
            whole = order[first : first + self.batch_size]
            mine = whole[self.rank :: self.world_size]
            for number, part in enumerate(np.array_split(mine, self.accumulate) if self.accumulate > 1 else (mine,)):
                place = ("batch", self.seed, self.stage, epoch, first, number, self.rank)
                yield Micro(part if len(part) else whole[:1], len(part), len(whole), place)

    def _order(self, epoch: int) -> Indices:
        if self.sampler is not None:
            return self.sampler.order(self.n, stage=self.stage, epoch=epoch)
        return epoch_order(self.n, seed=self.seed, stage=self.stage, epoch=epoch, shuffle=self.shuffle).numpy()


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

    def epoch(self, epoch: int) -> Iterator[Micro]:
        """One (possibly empty) share per global batch."""
        for step in range(self.steps):
            stop = min(self.n, (step + 1) * self.batch_size)
            first = min(stop, step * self.batch_size + self.rank)
            indices = np.arange(first, stop, self.world_size)
            yield Micro(indices, len(indices), stop - step * self.batch_size, ("val", self.seed, epoch, step, self.rank))


class TensorFetch:
    """Makes a batch of whole tensors by their indices. Runs no code of the user and draws no random numbers, so it may run early."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], through: torch.Tensor | None) -> None:
        self._tensors, self._through = tensors, through

    def __call__(self, indices: Indices) -> list[torch.Tensor]:
        index = torch.from_numpy(np.ascontiguousarray(indices))
        if self._through is not None:
            index = self._through[index]
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self._tensors]  # on a GPU in kernels only


def make_fetch(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Fetch:
    """How indices become a batch: by whole tensors, by `__getitems__`, or sample by sample."""
    if collate_fn is None and (tensors := _tensors(dataset)) is not None:
        return TensorFetch(*tensors)
    join = default_collate_with_dataclasses if collate_fn is None else collate_fn
    return lambda indices: join(_samples(dataset, indices.tolist()))


def _samples(dataset: Any, indices: list[int]) -> Any:
    if callable(getattr(dataset, "__getitems__", None)):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


class _IsDataclass(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return dataclasses.is_dataclass(instance) and not isinstance(instance, type)


class _Dataclass(metaclass=_IsDataclass):
    """Instances of all dataclasses are instances of it: torch's collate picks its functions by type."""


def _collate_dataclass(samples: list[Any], *, collate_fn_map: Any) -> Any:
    def column(name: str) -> Any:
        return collate([getattr(sample, name) for sample in samples], collate_fn_map=collate_fn_map)

    return _with_fields(samples[0], {field.name: column(field.name) for field in dataclasses.fields(samples[0])})


_COLLATE_FN_MAP: dict[Any, Callable[..., Any]] = {**default_collate_fn_map, _Dataclass: _collate_dataclass}


def default_collate_with_dataclasses(samples: list[Any]) -> Any:
    """Torch's `default_collate`, which knows no dataclasses, and those field by field."""
    return collate(samples, collate_fn_map=_COLLATE_FN_MAP)


def _with_fields(instance: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values in its fields; frozen ones and those without an `__init__` argument included."""
    other = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


def _tensors(dataset: object) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None] | None:
    """The tensors of a TensorDataset (through Subsets, with their indices); None for a dataset that has its own way to a sample."""
    through: torch.Tensor | None = None
    while type(dataset) in (Subset, Part):
        indices = torch.as_tensor(np.asarray(dataset.indices), dtype=torch.int64)  # type: ignore[attr-defined]  # both have them
        through = indices if through is None else indices[through]
        dataset = dataset.dataset  # type: ignore[attr-defined]  # both have one
    if not isinstance(dataset, TensorDataset):
        return None
    own = any(getattr(type(dataset), name, None) is not getattr(TensorDataset, name, None) for name in ("__getitem__", "__getitems__"))
    plain = all(part.layout is torch.strided and not part.is_quantized for part in dataset.tensors)
    return (dataset.tensors, through) if plain and not own else None


class _SeededFetch(Dataset[Any]):
    """Runs in loader workers: a batch is a function of its key, whichever worker makes it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[int, Indices]) -> Any:
        seed, indices = key
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # numpy's global stream: user code draws from it
        return self._fetch(indices) if len(indices) else None


class _Ahead(Sampler[Any]):
    """The loader's sampler: what it draws ahead of the batches is remembered until the batch arrives."""

    def __init__(self) -> None:
        self._micros: Iterator[Micro] = iter(())
        self._drawn: deque[Micro] = deque()

    def begin(self, micros: Iterator[Micro]) -> None:
        self._micros = micros
        self._drawn.clear()

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        for micro in self._micros:
            self._drawn.append(micro)
            yield micro.seed, micro.indices

    def arrived(self) -> Micro:
        """The share of the batch that the loader hands out now: batches come in the order in which they were drawn."""
        return self._drawn.popleft()


def _as_it_is(batch: Any) -> Any:
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


class Epoch(Iterator[tuple[Any, Micro]]):
    """The batches of an epoch with their shares."""

    def __init__(self, batches: Generator[tuple[Any, Micro]], *, may_fetch_ahead: bool) -> None:
        self._batches, self._may_fetch_ahead = batches, may_fetch_ahead
        self._held: tuple[Any, Micro] | None = None

    def __next__(self) -> tuple[Any, Micro]:
        if self._held is None:
            return next(self._batches)
        held, self._held = self._held, None
        return held

    def fetch_ahead(self) -> bool:
        """Make the next batch now, where that can be done early without anybody noticing; return whether something was done."""
        if not self._may_fetch_ahead or self._held is not None:
            return False
        self._held = next(self._batches, None)
        return True

    def close(self) -> None:
        """Leave the epoch, wherever it is."""
        self._held = None
        self._batches.close()


class Batches:
    """The batches of one rank, made in this process or by loader workers, on the rank's device."""

    def __init__(self, fetch: Fetch, options: LoaderOptions, device: torch.device) -> None:
        self._fetch, self._device = fetch, device
        self._ahead = _Ahead()
        self._loader: DataLoader[Any] | None = None
        if options.num_workers:
            self._loader = DataLoader(
                _SeededFetch(fetch),
                batch_size=None,
                sampler=self._ahead,
                num_workers=options.num_workers,
                prefetch_factor=options.prefetch_factor,
                persistent_workers=options.persistent,
                pin_memory=options.pin_memory,
                collate_fn=_as_it_is,
                worker_init_fn=_InitWorker(options.worker_init_fn),
                generator=torch.Generator().manual_seed(0),
            )
        self._pin = options.pin_memory and self._loader is None

    def epoch(self, micros: Iterator[Micro]) -> Epoch:
        """Iterate over (batch, share); an empty share has no batch (None)."""
        if self._loader is None:
            return Epoch(self._fetched(micros), may_fetch_ahead=isinstance(self._fetch, TensorFetch))
        return Epoch(self._loaded(self._loader, micros), may_fetch_ahead=False)

    def _fetched(self, micros: Iterator[Micro]) -> Generator[tuple[Any, Micro]]:
        for micro in micros:
            yield (self._to_device(self._fetch(micro.indices)) if len(micro.indices) else None), micro

    def _loaded(self, loader: DataLoader[Any], micros: Iterator[Micro]) -> Generator[tuple[Any, Micro]]:
        self._ahead.begin(micros)
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ConnectionError, EOFError) as error:
                message = (
                    "a loader worker ended while it sent a batch: killed, as for want of memory, or by os._exit; --num-workers 0 fetches in the rank itself"
                )
                raise RuntimeError(message) from error
            yield self._to_device(batch), self._ahead.arrived()
            del batch  # else it would lie in memory while the next one is awaited

    def close(self) -> None:
        """End the loader workers."""
        self._loader = None

    def _to_device(self, batch: Any) -> Any:
        return batch if self._device.type == "cpu" else to_device(batch, self._device, pin=self._pin)


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Move the tensors of a batch, through dicts, sequences, namedtuples, dataclasses and objects with a `to` of their own; the rest stays as it is."""
    if isinstance(batch, torch.Tensor):
        return (batch.pin_memory() if pin and batch.device.type == "cpu" else batch).to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # before the containers: a PackedSequence is a namedtuple, of which a part stays on the CPU
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _like(batch, {key: to_device(value, device, pin=pin) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, pin=pin) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, pin=pin) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _with_fields(batch, {field.name: to_device(getattr(batch, field.name), device, pin=pin) for field in dataclasses.fields(batch)})
    return batch


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """The moved values in a mapping of the batch's own type."""
    if type(batch) is dict:
        return moved
    if isinstance(batch, MutableMapping):  # by copying, since constructors differ: that of a defaultdict takes a factory first
        other = copy.copy(batch)
        other.update(moved)
        return other
    return type(batch)(moved)  # type: ignore[call-arg]  # as every immutable mapping can be made
