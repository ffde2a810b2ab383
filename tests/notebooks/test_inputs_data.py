"""Data of every kind, dealt to two ranks from a cell: arrays, batches, loaders, and sizes that do not come out even."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel

# A dataset around one array of each kind. For each, a sample has four of its numbers, and whether what is special about the array still holds.
ARRAYS = """
table = X.numpy()
rng = np.random.default_rng(3)
rng.standard_normal((64, 4)).astype("f4").tofile("table.bin")

class Kinds(Dataset):
    def __init__(self):
        self.structured = np.zeros(64, dtype=[("name", "S5"), ("mass", "f8"), ("spin", "f4", (3,))])
        self.structured["mass"], self.structured["spin"], self.structured["name"] = table[:, 0], table[:, 1:], b"abc"
        self.fortran = np.asfortranarray(table)
        self.read_only = table.copy()
        self.read_only.flags.writeable = False
        self.memmap = np.memmap("table.bin", "f4", "r", shape=(64, 4))
        self.slice_of_memmap = self.memmap[::-1, ::-1]
        self.slice_of_tensor = torch.randn(20_000, 4)[100:164]
        self.as_bytes = rng.integers(0, 255, 64 * 4 * 32, dtype=np.uint8)
        self.as_integers = self.as_bytes.view("<u8").reshape(64, 16)
        self.big_endian = table.astype(">f8")
        self.dates = (table * 4).astype("i8").astype("M8[D]")
        self.objects = table.astype(object)

    def __len__(self):
        return 64

    def kinds(self, index):
        rows = self.structured[index]
        yield "structured", [rows["mass"], *rows["spin"]], rows["name"] == b"abc"
        yield "fortran", self.fortran[index], self.fortran.flags.f_contiguous and not self.fortran.flags.c_contiguous
        yield "read_only", self.read_only[index], not self.read_only.flags.writeable
        yield "memmap", self.memmap[index], type(self.memmap) is np.memmap and not self.memmap.flags.writeable
        yield "slice_of_memmap", self.slice_of_memmap[index], self.slice_of_memmap.strides[0] < 0
        yield "slice_of_tensor", self.slice_of_tensor[index], self.slice_of_tensor.shape == (64, 4)
        yield "two_dtypes", self.as_integers[index, :4] % 1000, np.shares_memory(self.as_bytes, self.as_integers)
        yield "big_endian", self.big_endian[index], self.big_endian.dtype == ">f8"
        yield "dates", self.dates[index].astype("i8"), self.dates.dtype == "M8[D]"
        yield "objects", self.objects[index], self.objects.dtype == object

    def __getitem__(self, index):
        numbers = {kind: torch.tensor(np.array(values, dtype="f8")) for kind, values, _ in self.kinds(index)}
        return X[index], Y[index], numbers, {kind: bool(kept) for kind, _, kept in self.kinds(index)}

array_set, net = Kinds(), nn.Linear(4, 2)
batches = list(DataLoader(array_set, 16))
"""
KINDS = ("structured", "fortran", "read_only", "memmap", "slice_of_memmap", "slice_of_tensor", "two_dtypes", "big_endian", "dates", "objects")


def train(nb, line, body="loss = nn.MSELoss()"):
    return nb.run(f"%%ddp_train {line} {{BY_HAND}}\n{body}", check=True)


def test_arrays_of_every_kind_inside_a_dataset_of_the_notebook(nb):
    nb.run(ARRAYS, check=True)
    train(
        nb,
        "net array_set",
        """
def training_step(model, batch):
    lost = [kind for kind, kept in batch[3].items() if not kept.all()]
    assert not lost, lost
    return {"loss": mse(model, batch), **{kind: values.square().mean() for kind, values in batch[2].items()}}
""",
    )
    for kind in KINDS:
        expected = nb.eval(f"[float(batch[2][{kind!r}].square().mean()) for batch in batches]")
        assert nb.eval(f"run.history[{kind!r}].tolist()") == pytest.approx(expected, rel=1e-12), kind
        assert len(set(expected)) == 4, kind


def test_a_small_slice_does_not_take_the_whole_tensor_along(nb):
    nb.run("huge = torch.zeros(10_000_000)\nslice_set = TensorDataset(huge[:64].view(64, 1), huge[100:164].view(64, 1))\nnet = nn.Linear(1, 1)", check=True)
    train(nb, "net slice_set")
    assert nb.eval("run.spec['data'][0]['bytes']") < 100_000


def test_one_tensor_under_two_dtypes_is_one_tensor_on_the_ranks(nb):
    nb.run(
        """
class Bits(Dataset):
    def __init__(self, raw):
        self.raw, self.bits = raw, raw.view(torch.int32)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        assert self.raw.data_ptr() == self.bits.data_ptr() and self.bits.dtype == torch.int32
        return (self.bits[index] % 5).float(), self.raw[index, :2]

bits_set, net = Bits(X.clone()), nn.Linear(4, 2)
expected = fit(net, mse, list(DataLoader(bits_set, 16)))
""",
        check=True,
    )
    train(nb, "net bits_set")
    assert nb.eval("apart(net, expected)") < 1e-5


BATCHES = {
    "dict": ("return {'x': X[index], 'y': Y[index]}", "batch['x'], batch['y']", "type(batch) is dict and set(batch) == {'x', 'y'}"),
    "nested tuples": ("return (X[index], (Y[index], {'n': index}))", "batch[0], batch[1][0]", "len(batch) == 2 and batch[1][1]['n'].dtype == torch.int64"),
    "namedtuple": ("return Pair(X[index], Y[index])", "batch.x, batch.y", "type(batch) is Pair"),
    "dataclass": ("return Sample(X[index], Y[index], 'mean')", "batch.x, batch.y", "type(batch) is Sample and list(batch.how) == ['mean'] * len(batch.x)"),
    "strings": ("return X[index], f'sample {index}', Y[index]", "batch[0], batch[2]", "len(batch[1]) == 8 and all(s.startswith('sample ') for s in batch[1])"),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_structure(nb, kind):
    returns, takes, holds = BATCHES[kind]
    nb.run(
        f"""
Pair = collections.namedtuple("Pair", "x y")

@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    how: str

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {returns}

samples, net = Samples(), nn.Linear(4, 2)
expected = fit(net, mse, in_order(X, Y))
""",
        check=True,
    )
    train(nb, "net samples --val samples", f"def training_step(model, batch):\n    assert {holds}, batch\n    return mse(model, ({takes}))")
    assert nb.eval("apart(net, expected)") < 1e-6


def test_a_lambda_as_collate_fn_with_loader_workers(nb):
    nb.run(
        """
class Scaled(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return X[index], Y[index], os.getppid()

scaled, net = Scaled(), nn.Linear(4, 2)
expected = fit(net, mse, in_order(2 * X, Y))
""",
        check=True,
    )
    train(
        nb,
        "net scaled --num-workers 2",
        """
collate_fn = lambda samples: (2 * torch.stack([x for x, _, _ in samples]), torch.stack([y for _, y, _ in samples]), {p for *_, p in samples})
def training_step(model, batch):
    assert batch[2] == {os.getpid()}, "made by a loader worker of this rank"
    return mse(model, batch)
""",
    )
    assert nb.eval("apart(net, expected)") < 1e-6


def test_a_dataloader_is_taken_apart_and_that_is_listed(nb):
    """Batch size as the global one, order, drop_last, collate_fn, workers and their worker_init_fn are the loader's."""
    nb.run(
        """
def double(samples):
    return torch.stack([2 * x for x, _ in samples]), torch.stack([y for _, y in samples]), torch.tensor(int(os.environ.get("WORKER_WAS_SET", -1)))
def set_worker(number):
    os.environ["WORKER_WAS_SET"] = str(number)
loader = DataLoader(TensorDataset(X[:60], Y[:60]), 16, shuffle=False, drop_last=False, collate_fn=double, num_workers=2, worker_init_fn=set_worker)
net = nn.Linear(4, 2)
expected = fit(net, mse, in_order(2 * X[:60], Y[:60]), epochs=2)
""",
        check=True,
    )
    cell = nb.run(
        "%%ddp_train net loader -n 2 --epochs 2 --optimizer sgd --lr 0.05\n"
        "def training_step(model, batch):\n    assert int(batch[2]) == 0, 'the one loader worker of this rank'\n    return mse(model, batch)",
        check=True,
    )
    assert "16 = 2 x 8 · 4 steps/epoch · " in cell.text.splitlines()[0]
    taken = next(line for line in cell.text.splitlines() if line.startswith("loader: "))
    assert taken.startswith("loader: taken from the DataLoader: dataset, batch_size 16, shuffle False, drop_last False, num_workers 2, ")
    assert taken.endswith("collate_fn, worker_init_fn")
    assert nb.eval("apart(net, expected)") < 1e-6


def test_options_of_the_line_win_over_the_dataloaders(nb):
    nb.run(
        """
loader, val_loader = DataLoader(train_set, 32, shuffle=True, drop_last=True), DataLoader(train_set, 10)
net = nn.Linear(4, 2)
expected = fit(net, mse, in_order(X, Y))
""",
        check=True,
    )
    cell = train(nb, "net loader --val val_loader")
    assert "loader: taken from the DataLoader: dataset, drop_last True, num_workers 0" in cell.text.splitlines()
    assert "val_loader: taken from the DataLoader: dataset, val_batch_size 10" in cell.text.splitlines()
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("float(abs(run.epochs['val_loss'][-1] - float(F.mse_loss(net(X), Y))))") < 1e-5


def test_a_dataloader_that_shuffles_does_so_here(nb):
    nb.run("loader = DataLoader(train_set, 16, shuffle=True)\nnet = nn.Linear(4, 2)\nin_file_order = fit(net, mse, in_order(X, Y))", check=True)
    cell = nb.run("%%ddp_train net loader -n 2 --optimizer sgd --lr 0.05\nloss = nn.MSELoss()", check=True)
    assert "shuffle True" in cell.text
    assert nb.eval("apart(net, in_file_order)") > 1e-5


def test_a_validation_set_smaller_than_the_number_of_ranks(nb):
    nb.run("net = nn.Linear(4, 2)\none, three = TensorDataset(X[:1], Y[:1]), TensorDataset(X[:3], Y[:3])", check=True)
    train(nb, "net train_set --val one --epochs 2")
    assert nb.eval("run.epochs['val_loss'].shape") == (2,)
    assert nb.eval("float(abs(run.epochs['val_loss'][-1] - float(F.mse_loss(net(X[:1]), Y[:1]))))") < 1e-5
    train(nb, "net train_set --val three --val-batch-size 2")
    assert nb.eval("float(abs(run.epochs['val_loss'][-1] - float(F.mse_loss(net(X[:3]), Y[:3]))))") < 1e-5


def test_a_dataset_shorter_than_a_batch(nb):
    """Refused with the ways out, and each of them works."""
    nb.run("short, net = TensorDataset(X[:11], Y[:11]), nn.Linear(4, 2)", check=True)
    nb.run("expected = fit(fit(net, mse, [(X[:10], Y[:10])]), mse, [(X[:11], Y[:11])])", check=True)
    error = nb.run("%%ddp_train net short {BY_HAND}\nloss = nn.MSELoss()").error
    assert error.traceback == ("ConfigError: the training data has 11 samples, fewer than one batch of 16: --batch-size 10 or less, or --drop-last false")
    nb.run("%%ddp_train net short {BY_HAND.replace('16', '10')}\nloss = nn.MSELoss()", check=True)
    train(nb, "net short --drop-last false")
    assert nb.eval("apart(net, expected)") < 1e-6


def test_more_ranks_than_samples_in_the_last_batch(nb):
    nb.run("odd, net = TensorDataset(X[:17], Y[:17]), nn.Linear(4, 2)\nexpected = fit(net, mse, [(X[:16], Y[:16]), (X[16:17], Y[16:17])])", check=True)
    train(nb, "net odd --drop-last false")
    assert nb.eval("apart(net, expected)") < 1e-6


def test_a_dataset_that_is_fetched_by_batch(nb):
    nb.run(
        """
class Table(Dataset):
    def __len__(self):
        return 64
    def __getitems__(self, indices):
        return [(X[index], Y[index]) for index in indices]
    def __getitem__(self, index):
        raise AssertionError("one by one")
tabled, net = Table(), nn.Linear(4, 2)
expected = fit(net, mse, in_order(X, Y))
""",
        check=True,
    )
    train(nb, "net tabled")
    assert nb.eval("apart(net, expected)") < 1e-6
