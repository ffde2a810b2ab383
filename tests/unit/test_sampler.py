"""The order of an epoch: how a sampler of the user's becomes the one order that all ranks deal, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from nbddp.sampler import GlobalSampler, SamplerError

DATASET = list(range(20))


class Own(Sampler):
    """Draws from all three global streams, and knows the epoch."""

    def __init__(self, n=8):
        self.n, self.epochs = n, []

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield int(torch.randint(0, 20, ())) if random.random() < 0.5 else int(np.random.randint(20))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Held(Sampler):
    """Draws from generators of its own."""

    def __init__(self):
        self.torch_one, self.inner = torch.Generator(), RandomSampler(DATASET, generator=torch.Generator())
        self.numpy_one, self.old_one, self.python_one = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.again = self

    def __len__(self):
        return 5 + 3

    def __iter__(self):
        yield from list(self.inner)[:4]
        yield int(torch.randint(20, (), generator=self.torch_one))
        yield self.numpy_one.integers(20)
        yield np.int64(self.old_one.randint(20))
        yield self.python_one.randrange(20)


MAKE = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 10 + [5.0] * 10, 30),
    "subset": lambda: SubsetRandomSampler([3, 5, 7, 11, 13]),
    "replacement": lambda: RandomSampler(DATASET, replacement=True, num_samples=50),
    "with a generator": lambda: RandomSampler(DATASET, generator=torch.Generator()),
    "own": Own,
    "held": Held,
    "function": lambda: lambda dataset: WeightedRandomSampler([1.0] * len(dataset), 7),
    "class": lambda: RandomSampler,
    "random function": lambda: lambda dataset: [random.randrange(len(dataset)) for _ in range(9)],
}
FIXED = {"list": [3, 1, 2, 3], "tuple": (0, 19), "range": range(19, 0, -2), "array": np.array([4, 2], np.uint8), "tensor": torch.tensor([5, 0, 5])}


def order(sampler, epoch=1, *, seed=0, stage=0):
    whole = GlobalSampler(sampler, DATASET, seed=seed)
    return whole.order(len(whole), stage=stage, epoch=epoch).tolist()


def stir():
    """As on another rank, or in another process: streams of its own."""
    torch.manual_seed(random.SystemRandom().randrange(2**60))
    np.random.seed(random.SystemRandom().randrange(2**32))
    random.seed()


@pytest.mark.parametrize("kind", list(MAKE))
def test_the_order_is_a_function_of_seed_stage_and_epoch_alone(kind):
    stir()
    drawn = order(MAKE[kind]())
    stir()
    kept = GlobalSampler(MAKE[kind](), DATASET, seed=0)
    later = kept.order(len(kept), stage=0, epoch=2).tolist()
    stir()
    assert kept.order(len(kept), stage=0, epoch=1).tolist() == drawn, "also after another epoch"
    assert all(0 <= index < 20 for index in drawn)
    if kind != "random function":  # drawn once, as a list
        assert later != drawn
        assert drawn not in (order(MAKE[kind](), stage=1), order(MAKE[kind](), seed=1))


@pytest.mark.parametrize("kind", list(FIXED))
def test_indices_as_they_are(kind):
    assert order(FIXED[kind]) == order(FIXED[kind], epoch=2) == [int(index) for index in FIXED[kind]]


def test_the_epoch_is_told():
    sampler = Own()
    order(sampler, epoch=3)
    assert sampler.epochs == [3]


@pytest.mark.parametrize("make", [Own, lambda: lambda dataset: [int(torch.randint(20, ())), random.randrange(20), np.random.randint(20)]])
def test_the_streams_of_the_process_are_put_back(make):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    order(make())
    assert (float(torch.rand(())), random.random(), float(np.random.rand())) == expected


class Broken(Own):
    def __iter__(self):
        raise ZeroDivisionError


def test_the_streams_are_put_back_after_an_error_too():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with pytest.raises(ZeroDivisionError):
        order(Broken())
    assert random.random() == expected


@pytest.mark.gpu
def test_the_stream_of_the_gpu_is_put_back():
    torch.cuda.manual_seed(5)
    expected = float(torch.rand((), device="cuda"))
    torch.cuda.manual_seed(5)

    class Drawing(Own):
        def __iter__(self):
            return iter(torch.randint(20, (8,), device="cuda").tolist())

    first = order(Drawing())
    assert float(torch.rand((), device="cuda")) == expected
    assert order(Drawing()) == first


class Gives(Sampler):
    def __init__(self, values, n=None):
        self.values, self.n = values, len(values) if n is None else n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.values)


def test_integers_of_any_kind_are_indices():
    assert order(Gives([1, np.int32(2), torch.tensor(3), np.uint8(4), torch.tensor([5])])) == [1, 2, 3, 4, 5]


NAME = "sampler is a Gives"
REFUSED = [
    (3, "sampler is a int: it must have __iter__, which gives indices, and __len__, such as a torch.utils.data.Sampler or a list"),
    (iter([1, 2]), "sampler is a list_iterator: it must have __iter__"),
    (lambda dataset: (i for i in range(3)), "sampler(dataset) gave a generator: it must have __iter__"),
    (lambda dataset: None, "sampler(dataset) gave a NoneType: it must have"),
    (lambda dataset: RandomSampler, "sampler(dataset) gave a type: it must have"),
    ([], "sampler is a list of no samples: it must give at least one"),
    (range(5, 5), "sampler is a range of no samples"),
    (BatchSampler(SequentialSampler(DATASET), 4, drop_last=False), "sampler is a BatchSampler, which gives whole batches: give the sampler inside it, and"),
    ([1, 2, 20], "sampler is a list; its index 2 is 20, and the dataset has the samples 0 to 19"),
    ([1, -1], "sampler is a list; its index 1 is -1, and the dataset has the samples 0 to 19"),
    (range(0, 30, 10), "sampler is a range; its index 2 is 20"),
    ([1.0], "sampler is a list; its index 0 is 1.0: an index is an integer"),
    ([True, False], "sampler is a list; its index 0 is True: an index is an integer"),
    (torch.ones(20, dtype=torch.bool), "sampler is a Tensor of dtype bool and shape (20,): indices are integers in one dimension; of a mask: torch.nonzero"),
    (np.ones(3), "sampler is a ndarray of dtype float64 and shape (3,): indices are integers in one dimension"),
    (np.ones((3, 1), int), "sampler is a ndarray of dtype int64 and shape (3, 1): indices are integers in one dimension"),
    (lambda dataset: [len(dataset)], "sampler(dataset) gave a list; its index 0 is 20"),
]


@pytest.mark.parametrize("sampler, says", REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_what_is_no_sampler_is_refused_where_it_is_made(sampler, says):
    with pytest.raises(SamplerError) as caught:
        GlobalSampler(sampler, DATASET, seed=0)
    assert str(caught.value).startswith(says)


GAVE = [
    (Gives([1, 2, 3], 4), f"{NAME} of 4 samples by its __len__, and gave 3 in epoch 1: both must be the same in every epoch"),
    (Gives([1, 2, 3], 2), f"{NAME} of 2 samples by its __len__, and gave more than 2 in epoch 1"),
    (Gives([0, 20]), f"{NAME}; its index 1 is 20, and the dataset has the samples 0 to 19"),
    (Gives([0, -2]), f"{NAME}; its index 1 is -2"),
    (Gives([[0, 1], [2, 3]]), f"{NAME}; its index 0 is [0, 1]: one index at a time, not a batch of them"),
    (Gives([0, "1"]), f"{NAME}; its index 1 is '1': an index is an integer"),
    (Gives([0, 1.5]), f"{NAME}; its index 1 is 1.5: an index is an integer"),
    (Gives([torch.tensor(True)]), f"{NAME}; its index 0 is tensor(True): an index is an integer"),
    (Gives([np.bool_(True)]), f"{NAME}; its index 0 is "),
    (Gives([None]), f"{NAME}; its index 0 is None: an index is an integer"),
]


@pytest.mark.parametrize("sampler, says", GAVE, ids=[says[-40:] for _, says in GAVE])
def test_what_a_sampler_gives_is_checked_in_each_epoch(sampler, says):
    whole = GlobalSampler(sampler, DATASET, seed=0)
    with pytest.raises(SamplerError) as caught:
        whole.order(len(whole), stage=0, epoch=1)
    assert str(caught.value).startswith(says)


def test_a_length_that_changed_since_the_run_was_planned():
    sampler = Own()
    whole = GlobalSampler(sampler, DATASET, seed=0)
    sampler.n = 9
    with pytest.raises(SamplerError, match="of 8 samples by its __len__, and gave more than 8 in epoch 2"):
        whole.order(8, stage=0, epoch=2)


def test_an_endless_sampler_is_noticed():
    class Endless(Own):
        def __iter__(self):
            while True:
                yield 1

    with pytest.raises(SamplerError, match="gave more than 8"):
        order(Endless())
