"""The order of the samples in an epoch: shuffled, or as a sampler of the user's draws it.

It depends on (seed, stage, epoch) alone, so it is the same on every rank, at every world size and in a resumed run. Runs in the ranks; the kernel only
asks how many samples there are. Imports no Jupyter.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

Indices = NDArray[np.int64]


class SamplerError(ValueError):
    """What a sampler is, or gave, breaks its rule."""


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


class GlobalSampler:
    """A sampler of the user's, asked for the indices of the whole batches of all ranks; shares of it are dealt like those of a shuffled epoch.

    Args:
        sampler: an object with ``__iter__`` (of indices) and ``__len__``, or a function ``sampler(dataset)`` that returns one.
        dataset: what the indices are of.
        seed: of the run. While the user's code runs, the global random streams of torch, Python and numpy are seeded with (seed, stage, epoch), so are
            generators that the sampler holds, and its ``set_epoch(epoch)`` is called where it has one.

    Raises:
        SamplerError: for anything else, and for one without samples.
    """

    def __init__(self, sampler: Any, dataset: Any, *, seed: int) -> None:
        self._seed, self._dataset_size = seed, len(dataset)
        if not isinstance(sampler, Iterable) and callable(sampler):
            with seeded(derive_seed("sampler", seed)):
                made = sampler(dataset)
            self.name, sampler = f"sampler(dataset) gave a {type(made).__name__}", made
        else:
            self.name = f"sampler is a {type(sampler).__name__}"
        self._sampler = sampler
        self._check()

    def _check(self) -> None:
        given = self._sampler
        if isinstance(given, type | Iterator) or not isinstance(given, Iterable) or not isinstance(given, Sized):
            message = f"{self.name}: it must have __iter__, which gives indices, and __len__, such as a torch.utils.data.Sampler or a list"
            raise SamplerError(message)
        if isinstance(given, torch.utils.data.BatchSampler):
            message = f"{self.name}, which gives whole batches: give the sampler inside it, and --batch-size"
            raise SamplerError(message)
        if len(given) < 1:
            message = f"{self.name} of no samples: it must give at least one"
            raise SamplerError(message)
        if isinstance(given, list | tuple | range | np.ndarray | torch.Tensor):  # asking these for their indices changes nothing
            self._checked(given)

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return len(self._sampler)

    def order(self, n: int, *, stage: int, epoch: int) -> Indices:
        """The indices of one epoch, of shape (n,).

        Raises:
            SamplerError: where they are not n integers of the dataset.
        """
        with seeded(seed := derive_seed("sampler", self._seed, stage, epoch)):
            for generator in _generators(self._sampler):
                reseed(generator, seed)
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            drawn = self._checked(itertools.islice(iter(self._sampler), n + 1))
        if len(drawn) != n:
            gave = f"more than {n}" if len(drawn) > n else str(len(drawn))
            message = f"{self.name} of {n} samples by its __len__, and gave {gave} in epoch {epoch}: both must be the same in every epoch"
            raise SamplerError(message)
        return drawn

    def _checked(self, values: Iterable[Any]) -> Indices:
        if isinstance(values, range):
            indices = np.arange(values.start, values.stop, values.step, dtype=np.int64)
        elif isinstance(values, np.ndarray | torch.Tensor):
            indices = self._as_array(np.asarray(values))
        else:
            indices = np.fromiter((self._as_index(place, value) for place, value in enumerate(values)), np.int64)
        bad = np.flatnonzero((indices < 0) | (indices >= self._dataset_size))
        if len(bad):
            message = f"{self.name}; its index {bad[0]} is {indices[bad[0]]}, and the dataset has the samples 0 to {self._dataset_size - 1}"
            raise SamplerError(message)
        return indices

    def _as_array(self, values: NDArray[Any]) -> Indices:
        if values.ndim != 1 or values.dtype.kind not in "iu":
            hint = "; of a mask: torch.nonzero(mask).flatten()" if values.dtype.kind == "b" else ""
            message = f"{self.name} of dtype {values.dtype} and shape {values.shape}: indices are integers in one dimension{hint}"
            raise SamplerError(message)
        return values.astype(np.int64)

    def _as_index(self, place: int, value: Any) -> int:
        try:
            if isinstance(value, bool | np.bool_) or (isinstance(value, torch.Tensor) and value.dtype is torch.bool):
                raise TypeError  # noqa: TRY301 - a mask, of which the entries would pass for 0 and 1
            return operator.index(value)
        except TypeError:
            rule = "one index at a time, not a batch of them" if isinstance(value, list | tuple) else "an index is an integer"
            message = f"{self.name}; its index {place} is {value!r:.40}: {rule}"
            raise SamplerError(message) from None


def _generators(sampler: Any) -> list[Any]:
    """The generators that a sampler, and those inside it, hold."""
    found, todo, seen = [], [sampler], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for value in getattr(one, "__dict__", {}).values():
            if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                found.append(value)
            elif isinstance(value, Sampler):
                todo.append(value)
    return found


def reseed(generator: Any, seed: int) -> None:
    """Set a generator of torch, numpy or Python to the state that a seed gives."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random streams of torch, Python and numpy, and put them back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            if devices:
                torch.cuda.manual_seed(seed)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the other devices, too
            random.seed(seed)
            np.random.seed(seed % 2**32)  # numpy's global stream: user code draws from it
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
