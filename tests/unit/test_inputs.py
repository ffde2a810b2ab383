"""DataLoaders with samplers, taken apart; what a sampler excludes; data with a state of its own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from nbddp.errors import ConfigError
from nbddp.kernel.inputs import count_sampled, stateful, take_data
from nbddp.kernel.request import Named

DATA = TensorDataset(torch.arange(20.0))


def take(loader, *, training=True, sampler=None):
    return take_data(Named("loader", loader), training=training, sampler=sampler)


def refused(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


SAMPLERS = {
    "weighted": WeightedRandomSampler([1.0] * 20, 30),
    "subset": SubsetRandomSampler([1, 2, 3]),
    "replacement": RandomSampler(DATA, replacement=True, num_samples=40),
    "fewer": RandomSampler(DATA, num_samples=5),
    "list": [5, 4, 3],
    "range": range(0, 20, 2),
}


@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_a_sampler_of_a_loader_becomes_the_hook(kind):
    data = take(DataLoader(DATA, 4, sampler=SAMPLERS[kind], drop_last=True, num_workers=2))
    assert data.hooks == {"sampler": SAMPLERS[kind]}
    assert data.dataset is DATA
    assert data.options == {"batch_size": 4, "drop_last": True, "num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}


@pytest.mark.parametrize("sampler, shuffle", [(None, False), (SequentialSampler(DATA), False), (RandomSampler(DATA), True)])
def test_torchs_own_orders_of_all_samples_are_an_option(sampler, shuffle):
    data = take(DataLoader(DATA, 4, sampler=sampler))
    assert (data.hooks, data.options["shuffle"]) == ({}, shuffle)
    assert list(data.options)[:3] == ["batch_size", "shuffle", "drop_last"]


@pytest.mark.parametrize("loader", [DataLoader(DATA, 4, shuffle=True), DataLoader(DATA, 4, sampler=[1, 2])])
def test_a_sampler_of_the_cell_replaces_that_of_the_loader(loader):
    data = take(loader, sampler=range(3))
    assert data.hooks == {}
    assert "shuffle" not in data.options


def test_a_plain_batch_sampler_is_taken_apart_and_others_are_refused():
    data = take(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=True)))
    assert data.options == {"batch_size": 5, "shuffle": True, "drop_last": True, "num_workers": 0}

    class Own(BatchSampler):
        pass

    own = DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 5, drop_last=True))
    assert refused(take, own) == (
        "loader has a batch sampler of its own (Own): batches that are not made of one index after the other can't be dealt to ranks; "
        "give the dataset, --batch-size and, where the order matters, sampler = ... in the cell"
    )
    assert refused(take, DataLoader(DATA, batch_sampler=[[1, 2], [3]])).startswith("loader has a batch sampler of its own (list): ")
    assert refused(take, DataLoader(DATA, batch_size=None)).startswith("loader has no batches: ")


@pytest.mark.parametrize("shuffle, drop, loader_drop", [(True, False, False), (False, True, False), (True, False, True)])
def test_a_distributed_sampler_is_unwrapped(shuffle, drop, loader_drop):
    sampler = DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=shuffle, drop_last=drop)
    data = take(DataLoader(DATA, 2, sampler=sampler, drop_last=loader_drop))
    assert data.hooks == {}
    assert data.options == {"per_rank_batch_size": 2, "shuffle": shuffle, "drop_last": drop or loader_drop, "num_workers": 0}
    assert data.notes == ["loader: its DistributedSampler is unwrapped; samples are dealt to the ranks here, and its batch size is that of a rank"]
    val = take(DataLoader(DATA, 2, sampler=sampler), training=False)
    assert (val.dataset, val.options) == (DATA, {"val_batch_size": 8})
    assert val.notes == ["loader: its DistributedSampler is unwrapped; each sample counts once, on one of the ranks"]


def test_a_distributed_sampler_of_ones_own_is_refused():
    class Own(DistributedSampler):
        pass

    for training in (True, False):
        assert refused(take, DataLoader(DATA, 2, sampler=Own(DATA, 2, 0)), training=training) == (
            "loader has a Own, which deals samples to ranks in a way of its own: "
            "give the dataset, and sampler = ... in the cell for the order of the samples over all ranks"
        )


def test_a_validation_counts_the_samples_that_its_loader_would():
    """The split of many tutorials: two loaders over one dataset."""
    for sampler in (SubsetRandomSampler([7, 3, 9]), [7, 3, 9], torch.tensor([7, 3, 9]).tolist()):
        data = take(DataLoader(DATA, 2, sampler=sampler), training=False)
        assert [float(data.dataset[place][0]) for place in range(len(data.dataset))] == [7.0, 3.0, 9.0]
        assert data.notes == [f"loader: validates on the 3 samples of its {type(sampler).__name__}"]
        assert data.options == {"val_batch_size": 2}
    for sampler in (None, RandomSampler(DATA)):
        assert take(DataLoader(DATA, 2, sampler=sampler), training=False).dataset is DATA
    assert refused(take, DataLoader(DATA, 2, sampler=WeightedRandomSampler([1.0] * 20, 5)), training=False) == (
        "loader has a WeightedRandomSampler: a validation counts each sample once, in order; "
        "give the dataset, or a torch.utils.data.Subset of it, in place of the loader"
    )


# -- how many samples there are, and what a sampler excludes


def count(sampler, *, given=frozenset(), val_split=None):
    return count_sampled(sampler, DATA, given=given, val_split=val_split, seed=0)


@pytest.mark.parametrize("sampler, n", [(SAMPLERS["weighted"], 30), ([1, 1, 1], 3), (lambda dataset: range(len(dataset) - 1), 19), (RandomSampler, 20)])
def test_an_epoch_is_as_long_as_its_sampler(sampler, n):
    assert count(sampler) == n


def test_asking_for_the_length_leaves_the_random_streams_alone():
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    assert 1 <= count(lambda dataset: range(int(torch.randint(1, 20, ())))) < 20
    assert torch.rand(3).tolist() == expected


def fails(dataset):
    return [][0]


@pytest.mark.parametrize(
    "sampler, options, says",
    [
        ([1], {"given": frozenset({"shuffle"})}, "shuffle beside a sampler, which sets the order of the samples: keep one of the two"),
        ([1], {"val_split": 0.25}, "val_split=0.25 beside a sampler, whose indices are of all samples: split the dataset before, with "),
        (DistributedSampler(DATA, 2, 0), {}, "sampler is a DistributedSampler: samples are dealt to the ranks here; leave it out, and give --shuffle or "),
        ([99], {}, "sampler is a list; its index 0 is 99, and the dataset has the samples 0 to 19"),
        (3, {}, "sampler is a int: it must have __iter__"),
        (WeightedRandomSampler, {}, "the sampler can't be asked for the number of its samples: TypeError: "),
        (fails, {}, "the sampler can't be asked for the number of its samples: IndexError: list index out of range"),
    ],
)
def test_samplers_that_are_refused_before_anything_starts(sampler, options, says):
    assert refused(count, sampler, **options).startswith(says)


# -- states


class Stateful(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {}


class StatefulLoader(DataLoader):
    def load_state_dict(self, state):
        pass


class StatefulSampler(RandomSampler):
    def state_dict(self):
        return {}


REST = "has a state of its own (state_dict), which checkpoints don't hold: this is not exactly a run that never stopped"


def test_what_has_a_state_of_its_own_is_said_by_name():
    data = Stateful()
    assert stateful(Named("digits", DATA), DATA, None) == []
    assert stateful(Named("digits", DataLoader(DATA, 2)), DATA, RandomSampler(DATA)) == []
    assert stateful(Named("digits", data), data, None) == [f"digits (Stateful) {REST}"]
    part = Subset(Subset(data, [0, 1]), [0])
    assert stateful(Named("digits", part), part, None) == [f"digits.dataset.dataset (Stateful) {REST}"]
    loader = StatefulLoader(data, 2)
    assert stateful(Named("digits", loader), data, StatefulSampler(data)) == [
        f"digits (StatefulLoader) {REST}",
        f"digits.dataset (Stateful) {REST}",
        f"sampler (StatefulSampler) {REST}",
    ]
