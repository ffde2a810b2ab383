"""Which samples a rank sees, how they become batches, and how these get to a device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, RandomSampler, Subset, TensorDataset

from nbddp.data import Batches, LoaderOptions, Part, Shares, ValShares, make_fetch, split_indices, split_size, to_device
from nbddp.sampler import GlobalSampler, derive_seed, epoch_order

CPU = torch.device("cpu")


def shares(n, batch, world, rank, accumulate=1, *, drop_last=True, shuffle=True, seed=0, stage=0):
    return Shares(n, batch, world, rank, accumulate, drop_last=drop_last, shuffle=shuffle, seed=seed, stage=stage)


@st.composite
def sizes(draw):
    world, accumulate = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    batch = world * accumulate * draw(st.integers(1, 4))
    return draw(st.integers(1, 90)), batch, world, accumulate


@given(sizes(), st.booleans())
def test_every_sample_of_a_step_counts_once_over_ranks_and_micro_batches(size, drop_last):
    n, batch, world, accumulate = size
    order = epoch_order(n, seed=0, stage=0, epoch=3, shuffle=True).tolist()
    dealt = [list(shares(n, batch, world, rank, accumulate, drop_last=drop_last).epoch(3)) for rank in range(world)]
    steps = n // batch if drop_last else -(-n // batch)
    for rank in range(world):
        assert len(dealt[rank]) == steps * accumulate
        assert all(len(micro.indices) >= 1 and micro.weight in (0, len(micro.indices)) for micro in dealt[rank]), "a rank is never without a batch"
    for step in range(steps):
        whole = order[step * batch : (step + 1) * batch]
        micros = [micro for rank in range(world) for micro in dealt[rank][step * accumulate : (step + 1) * accumulate]]
        assert sorted(index for micro in micros if micro.weight for index in micro.indices.tolist()) == sorted(whole)
        assert sum(micro.weight for micro in micros) == len(whole)
        assert {micro.n_global for micro in micros} == {len(whole)}
        assert all(micro.indices[0] in whole for micro in micros)


@given(sizes())
def test_the_samples_of_a_step_are_the_same_at_every_world_size(size):
    n, batch, world, accumulate = size
    one = list(shares(n, batch, 1, 0).epoch(1))
    for step, whole in enumerate(one):
        parts = [list(shares(n, batch, world, rank, accumulate).epoch(1))[step * accumulate : (step + 1) * accumulate] for rank in range(world)]
        assert sorted(int(i) for rank in parts for micro in rank for i in micro.indices) == sorted(whole.indices.tolist())


@given(sizes(), st.data(), st.booleans())
def test_an_epoch_can_be_entered_at_any_step(size, data, drop_last):
    n, batch, world, accumulate = size
    deal = shares(n, batch, world, world - 1, accumulate, drop_last=drop_last)
    start = data.draw(st.integers(0, deal.steps))
    whole, rest = list(deal.epoch(2)), list(deal.epoch(2, start * batch))
    assert len(rest) == len(whole) - start * accumulate == deal.steps_left(start * batch) * accumulate
    for one, other in zip(whole[start * accumulate :], rest, strict=True):
        assert (one.indices.tolist(), one.weight, one.n_global, one.seed) == (other.indices.tolist(), other.weight, other.n_global, other.seed)


def counted(deals, epoch, start=0, steps=None):
    """The samples that count, of all ranks, in the first `steps` steps after `start`."""
    found = []
    for deal in deals:
        micros = list(deal.epoch(epoch, start))
        assert len(micros) == deal.steps_left(start) * deal.accumulate
        found += [int(i) for micro in micros[: None if steps is None else steps * deal.accumulate] if micro.weight for i in micro.indices]
    return found


@given(sizes(), sizes(), st.data(), st.booleans(), st.booleans(), st.sampled_from([None, "replacement", "some"]))
def test_what_is_left_of_an_epoch_is_dealt_at_any_batch_and_number_of_ranks(before, after, data, drop_last, shuffle, kind):
    (n, batch, world, accumulate), (_, other_batch, other_world, other_accumulate) = before, after
    sampler = kind and GlobalSampler(
        range(0, 2 * n, 2) if kind == "some" else RandomSampler(range(2 * n), replacement=True, num_samples=n), range(2 * n), seed=3
    )

    def deals(batch, world, accumulate):
        return [Shares(n, batch, world, rank, accumulate, drop_last=drop_last, shuffle=shuffle, seed=3, sampler=sampler) for rank in range(world)]

    first, then = deals(batch, world, accumulate), deals(other_batch, other_world, other_accumulate)
    steps = data.draw(st.integers(0, first[0].steps))
    start = min(n, steps * batch)
    done, rest = counted(first, 4, steps=steps), counted(then, 4, start=start)
    (whole,) = [list(micro.indices) for micro in Shares(n, n, 1, 0, 1, drop_last=False, shuffle=shuffle, seed=3, sampler=sampler).epoch(4)]
    assert sorted(done) == sorted(whole[:start])
    left_out = (n - start) % other_batch if drop_last else 0
    assert sorted(rest) == sorted(whole[start : n - left_out]), "none is lost, none comes twice, in the order that was begun"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_draws_the_same_numbers_wherever_its_epoch_was_entered(workers):
    """In loader workers, which are seeded per batch; in the rank itself its own stream goes on, which a checkpoint holds."""
    deal = shares(24, 4, 1, 0, 2)

    class Noisy(Plain):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return index + torch.rand(()) + float(np.random.rand())

    def draw(start):
        torch.manual_seed(0)
        np.random.seed(0)
        batches = Batches(make_fetch(Noisy(), None), LoaderOptions(num_workers=workers), CPU)
        found = [batch.tolist() for batch, _ in batches.epoch(deal.epoch(1, start))]
        batches.close()
        return found

    assert draw(24) == []
    assert (draw(8) == draw(0)[4:]) is bool(workers)


def test_steps_left_where_the_tail_counts_and_where_it_does_not():
    assert [shares(10, 4, 1, 0).steps_left(start) for start in (0, 2, 3, 6, 7, 10, 11)] == [2, 2, 1, 1, 0, 0, 0]
    assert [shares(10, 4, 1, 0, drop_last=False).steps_left(start) for start in (0, 2, 3, 6, 7, 10, 11)] == [3, 2, 2, 1, 1, 0, 0]
    assert shares(10, 4, 1, 0).steps == 2


def test_seeds_of_batches_are_all_different():
    seeds = [micro.seed for rank in range(2) for epoch in (1, 2) for micro in shares(24, 8, 2, rank, 2).epoch(epoch)]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("change", [{"seed": 1}, {"stage": 1}, {"epoch": 2}])
def test_the_order_depends_on_seed_stage_and_epoch(change):
    base = {"seed": 0, "stage": 0, "epoch": 1, "shuffle": True}
    assert epoch_order(100, **base).tolist() == epoch_order(100, **base).tolist() != epoch_order(100, **{**base, **change}).tolist()
    assert sorted(epoch_order(100, **base).tolist()) == list(range(100))
    assert epoch_order(5, **{**base, "shuffle": False}).tolist() == [0, 1, 2, 3, 4]


def test_derived_seeds_do_not_change_between_versions():
    assert derive_seed("batch", 0, 1) == 7261781825409335539
    assert derive_seed("a", 1) != derive_seed("a", "1") != derive_seed("b", 1)
    assert 0 <= derive_seed(()) < 2**63


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_validation_counts_every_sample_once_in_as_many_batches_on_all_ranks(n, per_rank, world):
    batch = per_rank * world
    dealt = [list(ValShares(n, batch, world, rank, 0).epoch(1)) for rank in range(world)]
    assert len({len(rank) for rank in dealt}) == 1
    assert sorted(int(i) for rank in dealt for micro in rank for i in micro.indices) == list(range(n))
    assert all(len(micro.indices) == micro.weight <= per_rank for rank in dealt for micro in rank)


@given(st.integers(2, 300), st.floats(0.001, 0.999))
def test_a_split_is_seeded_whole_and_leaves_neither_side_empty(n, share):
    train, val = split_indices(n, share, 0)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(n))
    assert len(val) == split_size(n, share)
    assert len(val) >= 1
    assert len(train) >= 1
    assert train.tolist() == sorted(train.tolist())
    assert val.tolist() == split_indices(n, share, 0)[1].tolist()


# -- fetching


class Plain(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        assert type(index) is int
        return torch.tensor([index, index + 1]), index * 10


class InOne(Plain):
    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [("together", index) for index in indices]


class OwnTensors(TensorDataset):
    def __getitem__(self, index):
        return [part * 2 for part in super().__getitem__(index)]


def index(*indices):
    return np.array(indices)


def test_samples_are_collated_as_torch_does_it():
    x, y = make_fetch(Plain(), None)(index(3, 1))
    assert x.tolist() == [[3, 4], [1, 2]]
    assert y.tolist() == [30, 10]


@pytest.mark.parametrize("dataset", [[(1.0, 2), (3.0, 4), (5.0, 6)], ((1.0, 2), (3.0, 4), (5.0, 6))], ids=["list", "tuple"])
def test_a_sequence_is_a_dataset(dataset):
    x, y = make_fetch(dataset, None)(index(2, 0))
    assert (x.tolist(), y.tolist()) == ([5.0, 1.0], [6, 2])


def test_a_collate_function_gets_the_samples():
    assert make_fetch(Plain(), lambda samples: [y for _, y in samples])(index(3, 1)) == [30, 10]
    tensors = TensorDataset(torch.arange(4), torch.arange(4) * 2)
    assert make_fetch(tensors, lambda samples: [(int(x), int(y)) for x, y in samples])(index(3, 1)) == [(3, 6), (1, 2)]


def test_a_dataset_that_fetches_several_at_once_does():
    assert make_fetch(InOne(), lambda samples: samples)(index(3, 1)) == [("together", 3), ("together", 1)]
    assert make_fetch(Part(InOne(), torch.tensor([5, 6, 7])), lambda samples: samples)(index(2, 0)) == [("together", 7), ("together", 5)]


def test_tensors_are_fetched_as_a_whole_and_as_torch_would_collate_them():
    dataset = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    x, y = make_fetch(dataset, None)(index(7, 2))
    assert x.tolist() == [[14.0, 15.0], [4.0, 5.0]]
    assert y.tolist() == [7, 2]


PARTS = [
    lambda d: Subset(Subset(d, [9, 8, 7, 6, 5]), [4, 2, 0]),
    lambda d: Part(Subset(d, range(5, 10)), torch.tensor([0, 2, 4])),
    lambda d: Part(d, torch.tensor([5, 7, 9])),
]


@pytest.mark.parametrize("through", PARTS)
@pytest.mark.parametrize("of", [TensorDataset, OwnTensors])
def test_parts_of_a_dataset_are_fetched_through_their_indices(through, of):
    part = through(of(torch.arange(10), torch.arange(10) * 10))
    factor = 2 if of is OwnTensors else 1
    x, y = make_fetch(part, None)(index(2, 0))
    assert x.tolist() == [9 * factor, 5 * factor]
    assert y.tolist() == [90 * factor, 50 * factor]
    assert len(part) == 3
    assert [int(value) for value in part[1]] == [7 * factor, 70 * factor]


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.x * 2)


@dataclasses.dataclass
class Nested:
    sample: Sample
    number: float


class Pair(NamedTuple):
    a: Any
    b: Any


def test_dataclasses_are_collated_field_by_field_wherever_they_stand():
    samples = [{"pair": Pair(Nested(Sample(torch.tensor(float(i)), f"s{i}"), i / 2), "word")} for i in range(3)]
    batch = make_fetch(samples, None)(index(0, 2))
    pair = batch["pair"]
    assert isinstance(pair, Pair)
    assert list(pair.b) == ["word", "word"]
    assert isinstance(pair.a, Nested)
    assert isinstance(pair.a.sample, Sample)
    assert pair.a.sample.x.tolist() == [0.0, 2.0]
    assert pair.a.sample.twice.tolist() == [0.0, 4.0]
    assert pair.a.sample.name == ["s0", "s2"]
    assert pair.a.number.tolist() == [0.0, 1.0]
    assert samples[0]["pair"].a.sample.x.ndim == 0, "the samples themselves stay as they are"


# -- batches


def take(batches, micros):
    return [(batch, micro.weight) for batch, micro in batches.epoch(iter(micros))]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_with_their_shares_in_order(workers):
    deal = ValShares(10, 6, 3, 1, 0)
    batches = Batches(make_fetch(Plain(), None), LoaderOptions(num_workers=workers, prefetch_factor=1), CPU)
    for _ in range(2):
        found = take(batches, [micro for micro in deal.epoch(1) if micro.weight])
        assert [(batch[1].tolist(), weight) for batch, weight in found] == [([10, 40], 2), ([70], 1)]
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_share_has_no_batch(workers):
    batches = Batches(make_fetch(Plain(), None), LoaderOptions(num_workers=workers), CPU)
    found = take(batches, ValShares(4, 3, 3, 2, 0).epoch(1))
    assert [(batch is None, weight) for batch, weight in found] == [(False, 1), (True, 0)]
    batches.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_an_epoch_that_is_left_early_does_not_spill_into_the_next(persistent):
    batches = Batches(make_fetch(Plain(), None), LoaderOptions(num_workers=2, prefetch_factor=2, persistent=persistent), CPU)
    epoch = batches.epoch(shares(10, 2, 1, 0, shuffle=False).epoch(1))
    assert next(epoch)[0][1].tolist() == [0, 10]
    epoch.close()
    found = [(batch[1].tolist(), micro.indices.tolist()) for batch, micro in batches.epoch(shares(10, 2, 1, 0, shuffle=False).epoch(2))]
    assert found == [([10 * a, 10 * a + 10], [a, a + 1]) for a in range(0, 10, 2)]
    batches.close()


def test_indices_are_dealt_as_they_are_needed():
    """An epoch of many samples is never laid out as Python numbers, nor drawn further ahead than the workers hold ready."""
    drawn = []

    def micros():
        for micro in shares(1000, 1, 1, 0).epoch(1):
            drawn.append(micro)
            yield micro

    batches = Batches(make_fetch(TensorDataset(torch.arange(1000)), None), LoaderOptions(num_workers=2, prefetch_factor=3), CPU)
    epoch = batches.epoch(micros())
    for _ in range(5):
        next(epoch)
    assert len(drawn) <= 5 + 2 * 3
    epoch.close()
    batches.close()


# -- devices

META = torch.device("meta")


class Own:
    """Not a container: it has a `to` of its own."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Own(str(device))


def structures():
    t = torch.ones(2)
    return {
        "tensor": (t, lambda b: [b]),
        "list": ([t, "word", 3, None, b"bytes"], lambda b: [b[0]]),
        "tuple": ((t, (t, t)), lambda b: [b[0], *b[1]]),
        "namedtuple": (Pair(t, {"k": t}), lambda b: [b.a, b.b["k"]]),
        "dict": ({"k": t, 3: [t]}, lambda b: [b["k"], b[3][0]]),
        "ordered dict": (OrderedDict(k=t), lambda b: [b["k"]]),
        "defaultdict": (defaultdict(list, k=t), lambda b: [b["k"]]),
        "user dict": (UserDict(k=t), lambda b: [b["k"]]),
        "immutable mapping": (MappingProxyType({"k": t}), lambda b: [b["k"]]),
        "dataclass": (Nested(Sample(t, "s"), 1.0), lambda b: [b.sample.x, b.sample.twice]),
    }


@pytest.mark.parametrize("kind", list(structures()))
def test_tensors_move_wherever_they_are_and_containers_keep_their_type(kind):
    batch, tensors = structures()[kind]
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert all(tensor.device == META for tensor in tensors(moved))
    assert all(tensor.device == CPU for tensor in tensors(batch)), "the batch itself stays where it is"


def test_what_is_no_tensor_stays_and_what_moves_itself_does():
    array = np.ones(3)
    batch = ["word", 3, None, array, Own()]
    moved = to_device(batch, META)
    assert moved[:3] == ["word", 3, None]
    assert moved[3] is array
    assert moved[4].device == "meta"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"packed": packed}, CPU)["packed"]
    assert isinstance(moved, torch.nn.utils.rnn.PackedSequence)


def test_a_batch_for_the_cpu_is_the_one_that_was_made():
    made = object()
    batches = Batches(lambda indices: made, LoaderOptions(), CPU)
    assert next(batches.epoch(shares(2, 1, 1, 0).epoch(1)))[0] is made


def test_whole_tensors_are_fetched_ahead_and_what_user_code_makes_is_not():
    for dataset, ahead in ((TensorDataset(torch.arange(10)), True), (Plain(), False)):
        batches = Batches(make_fetch(dataset, None), LoaderOptions(), CPU)
        epoch = batches.epoch(shares(10, 4, 1, 0, drop_last=False, shuffle=False).epoch(1))
        seen = []
        assert epoch.fetch_ahead() is ahead
        assert epoch.fetch_ahead() is False, "one batch is enough"
        for batch, micro in epoch:
            seen.append((batch[-1].flatten().tolist(), micro.weight))
            epoch.fetch_ahead()
        assert [weight for _, weight in seen] == [4, 4, 2]
        assert [number // (1 if ahead else 10) for numbers, _ in seen for number in numbers] == list(range(10))
        epoch.close()
        assert next(epoch, None) is None
