"""Samplers of the user's: one order for all ranks, whatever their number, from the cell or out of a DataLoader."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel

# Each rank writes down which samples it saw, a line per step; `orders` puts those of all ranks together again, as they were dealt.
SEEN = """
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

class Indexed(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor([float(index)]), index

indexed = Indexed()
weighted = WeightedRandomSampler([1.0] * 20 + [9.0] * 20, 24)

def note(model, batch):
    x, indices = batch
    with open(f"seen-{os.environ['RANK']}", "a") as file:
        file.write(json.dumps(indices.tolist()) + "\\n")
    return model(x / 40).square().mean()

def orders():
    lines = {int(path.name[5:]): [json.loads(line) for line in path.read_text().splitlines()] for path in Path().glob("seen-*")}
    steps = []
    for parts in zip(*(lines[rank] for rank in sorted(lines)), strict=True):
        step = [None] * sum(len(part) for part in parts)
        for rank, part in enumerate(parts):
            step[rank :: len(parts)] = part
        steps.append(step)
    return steps
"""


@pytest.fixture(scope="module", autouse=True)
def seen(shared_kernel):
    shared_kernel.run(SEEN, check=True)


def orders(nb, line, body="", *, says=()):
    """The samples of each step of a run, in the order over all ranks."""
    for path in nb.folder.glob("seen-*"):
        path.unlink()
    nb.run("net = nn.Linear(1, 1)", check=True)
    cell = nb.run(f"%%ddp_train net {line} --optimizer sgd\ntraining_step = note\n{body}", check=True)
    assert all(said in cell.text for said in says), cell.text
    return nb.eval("orders()")


def test_a_sampler_gives_one_order_at_every_number_of_ranks(nb):
    line = "indexed --batch-size 12 --epochs 2"
    one = orders(nb, f"{line} -n 1", "sampler = weighted", says=["2 steps/epoch"])
    assert [len(step) for step in one] == [12] * 4
    assert one[:2] != one[2:], "each epoch has an order of its own"
    first = [index for step in one[:2] for index in step]
    assert len(set(first)) < 24, "with replacement"
    assert sum(index >= 20 for step in one for index in step) > 32, "by its weights"
    assert orders(nb, f"{line} -n 2", "sampler = weighted") == one
    assert orders(nb, f"{line} -n 2 --num-workers 2", "sampler = weighted") == one
    assert orders(nb, f"{line} -n 2 --seed 1", "sampler = weighted") != one
    nb.run("loader = DataLoader(indexed, 12, sampler=weighted)", check=True)
    assert orders(nb, "loader -n 2 --epochs 2", says=["loader: taken from the DataLoader: dataset, batch_size 12,", ", sampler"]) == one


@pytest.mark.parametrize(
    "body, expected",
    [
        ("sampler = [5, 3, 9, 1, 7, 5]", [[5, 3, 9, 1], [7, 5]]),
        ("sampler = range(39, 27, -2)", [[39, 37, 35, 33], [31, 29]]),
        ("def sampler(dataset):\n    return list(range(len(dataset)))[-4:]", [[36, 37, 38, 39]]),
    ],
)
def test_indices_and_functions_are_samplers(nb, body, expected):
    assert orders(nb, "indexed -n 2 --batch-size 4 --drop-last false", body) == expected


def test_a_sampler_of_ones_own_class_is_told_the_epoch_and_draws_alike_on_all_ranks(nb):
    body = """
class Own(Sampler):
    def __init__(self, dataset):
        self.dataset, self.epoch, self.generator = dataset, None, np.random.default_rng()
    def __len__(self):
        return 8
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        yield self.epoch
        yield int(torch.randint(40, ()))
        yield int(np.random.randint(40))
        yield int(self.generator.integers(40))
        yield from torch.randperm(len(self.dataset))[:4]
sampler = Own(indexed)
"""
    line = "indexed --batch-size 8 --epochs 3"
    one = orders(nb, f"{line} -n 1", body)
    assert [step[0] for step in one] == [1, 2, 3]
    assert len({tuple(step[1:]) for step in one}) == 3
    assert orders(nb, f"{line} -n 2", body) == one


def test_a_loader_with_a_distributed_sampler_is_that_of_a_rank(nb):
    nb.run("loader = DataLoader(indexed, 4, sampler=DistributedSampler(indexed, num_replicas=2, rank=1, shuffle=False))", check=True)
    note = "loader: its DistributedSampler is unwrapped; samples are dealt to the ranks here, and its batch size is that of a rank"
    found = orders(nb, "loader -n 2", says=[note, "8 = 2 x 4"])
    assert found == [list(range(first, first + 8)) for first in range(0, 40, 8)]


def test_a_validation_is_on_the_samples_of_its_loader(nb):
    nb.run("held = DataLoader(train_set, 4, sampler=SubsetRandomSampler([7, 3, 9]))\nnet = nn.Linear(4, 2)", check=True)
    cell = nb.run("%%ddp_train net train_set --val held -n 2 --lr 0 --optimizer sgd\nloss = nn.MSELoss()", check=True)
    assert "held: validates on the 3 samples of its SubsetRandomSampler" in cell.text
    assert nb.eval("abs(float(run.epochs['val_loss'][0]) - float(F.mse_loss(net(X[[7, 3, 9]]), Y[[7, 3, 9]]))) < 1e-6")


@pytest.mark.parametrize(
    "line, body, says",
    [
        ("indexed --shuffle true", "sampler = weighted", "shuffle beside a sampler, which sets the order of the samples: keep one of the two"),
        ("indexed --val-split 0.2", "sampler = weighted", "val_split=0.2 beside a sampler, whose indices are of all samples: split the dataset before"),
        ("indexed", "sampler = [40]", "sampler is a list; its index 0 is 40, and the dataset has the samples 0 to 39"),
        ("indexed", "sampler = iter([1])", "sampler is a list_iterator: it must have __iter__, which gives indices, and __len__"),
        ("indexed", "sampler = torch.utils.data.BatchSampler(weighted, 4, True)", "sampler is a BatchSampler, which gives whole batches"),
        ("indexed", "sampler = weighted", "the training data has 24 samples, fewer than one batch of 64"),
    ],
)
def test_what_is_refused_before_anything_starts(nb, line, body, says):
    before = nb.eval("run_files()")
    nb.run("net = nn.Linear(1, 1)", check=True)
    cell = nb.run(f"%%ddp_train net {line} -n 2\ntraining_step = note\n{body}")
    assert cell.error is not None
    assert cell.error.ename == "ConfigError"
    assert cell.error.evalue.startswith(says)
    assert nb.eval("run_files()") == before


@pytest.mark.parametrize(
    "give, says",
    [
        ("[1, 2, 3]", "sampler is a Lying of 8 samples by its __len__, and gave 3 in epoch 1: both must be the same in every epoch"),
        ("[1, 2, 3, 4, 5, 6, 7, 99]", "sampler is a Lying; its index 7 is 99, and the dataset has the samples 0 to 39"),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", "sampler is a Lying; its index 0 is [1, 2, 3, 4]: one index at a time, not a batch of them"),
    ],
)
def test_a_sampler_that_breaks_its_word_ends_the_run_with_the_reason(nb, give, says):
    body = f"""
class Lying(Sampler):
    def __init__(self):
        pass
    def __len__(self):
        return 8
    def __iter__(self):
        return iter({give})
"""
    nb.run("net = nn.Linear(1, 1)", check=True)
    cell = nb.run(f"%%ddp_train net indexed -n 2 --batch-size 8\ntraining_step = note\n{body}sampler = Lying()")
    assert cell.error is not None
    assert cell.error.ename == "WorkerError"
    assert says in cell.error.evalue


def test_a_run_that_goes_on_continues_the_order_of_its_sampler(nb):
    line = "indexed --batch-size 8 -n 2"
    whole = orders(nb, f"{line} --epochs 2", "sampler = weighted")
    assert len(whole) == 6
    begun = orders(nb, f"{line} --max-steps 4", "sampler = weighted")
    rest = orders(nb, f"{line} --epochs 2 --resume last", "sampler = weighted", says=["epoch 2, step 4, last.pt"])
    assert begun + rest == whole
    begun = orders(nb, f"{line} --max-steps 4 --name again", "sampler = weighted")
    rest = orders(nb, "indexed --batch-size 4 -n 1 --epochs 2 --resume last --name again", "sampler = weighted")
    flat = [index for step in whole for index in step]
    assert [index for step in [*begun, *rest] for index in step] == flat, "on another number of ranks and with another batch"
