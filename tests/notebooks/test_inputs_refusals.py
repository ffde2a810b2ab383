"""What can't be trained is refused in one line, by name, before anything is started, and nothing is left of the attempt."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.kernel

THINGS = """
import threading, h5py

class Holder(Dataset):
    def __init__(self, **held):
        self.__dict__.update(held)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return X[index], Y[index]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(train_set)

def opened():
    Path("notes.txt").write_text("text")
    return open("notes.txt")
def hdf5():
    return h5py.File("some.h5", "a")

net = nn.Linear(4, 2)
"""


def refused(nb, line, error="BundleError", body="loss = nn.MSELoss()"):
    """Run a cell that must be refused; check that it left nothing and return its one line."""
    files, standby, last = nb.eval("run_files()"), nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")
    cell = nb.run(f"%%ddp_train {line} -n 2\n{body}")
    assert cell.error is not None, cell.text
    assert cell.error.ename == error, cell.error.traceback
    assert nb.eval("run_files()") == files
    assert (nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")) == (standby, last)
    assert cell.text == ""
    assert "\n" not in cell.error.traceback
    return cell.error.traceback.removeprefix(f"{error}: ")


@pytest.fixture(scope="module")
def things(shared_kernel):
    shared_kernel.run(THINGS, check=True)
    return shared_kernel


@pytest.mark.parametrize(
    "make, line, says",
    [
        ("held = Holder(file=opened())", "net held", ("held.file", "an open file ('notes.txt') can't be sent to another process; open it in __getitem__")),
        (
            "held = Holder(parts={'lock': threading.Lock()})",
            "net held",
            ("held.parts['lock']", "threading.Lock can't be sent to another process; create it where it is first used"),
        ),
        (
            "held = Holder(parts=[1, {'rows': (n for n in range(3))}])",
            "net held",
            ("held.parts[1]['rows']", "generator can't be sent to another process; keep a list"),
        ),
        ("held = Holder(file=hdf5())", "net held", ("held.file", "h5py.File can't be sent to another process; open it in __getitem__")),
        (
            "held = Holder(pair=(X, torch.empty(3, device='meta')))",
            "net held",
            ("held.pair[1]", "a tensor on the meta device holds no data; build it on the CPU"),
        ),
        (
            "held = Holder(loader=threading.Thread(target=print))",
            "net held",
            ("held.loader", "threading.Thread can't be sent to another process; start it where it is first used"),
        ),
        (
            "lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))",
            "lazy train_set",
            ("lazy[1]", "LazyLinear has no shapes yet, and every rank would make up its own; run one batch through it first"),
        ),
        (
            "with torch.device('meta'): empty = nn.Sequential(nn.Linear(4, 2))",
            "empty train_set",
            ("empty[0].weight", "a tensor on the meta device holds no data"),
        ),
        (
            "scripted = torch.jit.script(nn.Linear(4, 2))",
            "scripted train_set",
            ("scripted", "a ScriptModule can't be sent to another process; use the Python module that it was made from"),
        ),
        (
            "class Outer(nn.Module):\n    pass\nouter = Outer(); outer.head = torch.jit.script(nn.Linear(4, 2))",
            "outer train_set",
            ("outer.head", "a ScriptModule can't be sent to another process"),
        ),
    ],
)
def test_what_cannot_travel_is_refused_by_name(things, nb, make, line, says):
    nb.run(make, check=True)
    path, reason = says
    said = refused(nb, line)
    assert said.startswith(f"{path}: ")
    assert reason in said


def test_what_a_hook_refers_to_is_refused_by_name(things, nb):
    nb.run("lock = threading.RLock()", check=True)
    body = "def training_step(model, batch):\n    with lock:\n        return mse(model, batch)"
    line = refused(nb, "net train_set", body=body)
    assert line.startswith("training_step -> lock: ")
    assert "RLock can't be sent to another process; create it where it is first used" in line


def test_a_loss_with_parameters_that_nothing_would_train_is_refused(things, nb):
    body = "class Learned(nn.MSELoss):\n    def __init__(self):\n        super().__init__()\n        self.scale = nn.Parameter(torch.ones(1))\nloss = Learned()"
    assert refused(nb, "net train_set", "ConfigError", body).startswith("loss (Learned) has parameters of its own, scale: make it a part of the model")


def test_a_hook_on_a_parameter_is_refused_by_name(things, nb):
    nb.run("hooked = nn.Linear(4, 2)\nhandle = hooked.weight.register_hook(lambda gradient: gradient * 0)", check=True)
    assert refused(nb, "hooked train_set") == (
        "hooked: weight has a hook on the tensor itself, which can't be sent to another process: register it in optimizer(model)"
    )


@pytest.mark.parametrize("command", ["get_ipython().user_ns", "!echo on every rank", "%time x = 1"])
def test_a_magic_inside_a_step_is_refused_by_name(things, nb, command):
    """It would run in the rank, where there is no notebook."""
    line = refused(nb, "net train_set", body=f"def training_step(model, batch):\n    {command}\n    return mse(model, batch)")
    assert line.startswith("training_step -> get_ipython.__self__: the notebook's shell can't be sent to another process; leave get_ipython(), % magics")


@pytest.mark.parametrize(
    "make, line, says",
    [
        (
            "stream = Stream()",
            "net stream",
            "stream is an IterableDataset: samples that can't be drawn by index can't be dealt to ranks; not available yet, use a map-style dataset",
        ),
        ("stream = DataLoader(Stream(), 16)", "net stream", "stream is an IterableDataset: samples that can't be drawn by index can't be dealt to ranks"),
        ("stream = Stream()", "net train_set --val stream", "stream is an IterableDataset"),
        (
            "batches = DataLoader(train_set, batch_sampler=[[0, 1], [2, 3]])",
            "net batches",
            "batches has a batch sampler of its own (list): batches that are not made of one index after the other can't be dealt to ranks; give the dataset",
        ),
        ("numbers = iter([1])", "net numbers", "numbers is a list_iterator without __len__"),
        ("pass", "train_set net", "train_set is a TensorDataset: the model must be a torch.nn.Module; the order is MODEL DATA"),
        ("pass", "net net", "net is a model (Linear): the order is MODEL DATA"),
        ("flat = nn.Flatten()", "flat train_set", "flat has no parameters: there is nothing to train"),
        (
            "frozen = nn.Linear(4, 2).requires_grad_(False)",
            "frozen train_set",
            "no parameter of frozen requires a gradient: frozen.requires_grad_() makes all of them trainable",
        ),
        ("nothing = TensorDataset(X[:0], Y[:0])", "net nothing", "the training data is empty: it needs at least one sample"),
        ("nothing = TensorDataset(X[:0], Y[:0])", "net train_set --val nothing", "nothing is empty: leave --val out, or give it samples"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(things, nb, make, line, says):
    nb.run(make, check=True)
    assert refused(nb, line, "ConfigError").startswith(says)


def test_a_first_cell_that_is_refused_leaves_no_run_and_the_next_one_trains(notebook, tmp_path):
    nb = notebook()
    nb.run("%load_ext nbddp\nimport threading, torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset", check=True)
    nb.run("net, data = nn.Linear(1, 1), TensorDataset(torch.zeros(64, 1), torch.zeros(64, 1))\ndata.lock = threading.Lock()", check=True)
    assert nb.run("%%ddp_train net data -n 2 --batch-size 63\nloss = nn.MSELoss()").error.ename == "ConfigError"
    assert list(tmp_path.iterdir()) == []
    assert nb.run("%%ddp_train net data -n 2\nloss = nn.MSELoss()").error.evalue.startswith("data.lock: ")
    assert [path.name for path in (tmp_path / "nbddp_runs").rglob("*") if path.name not in (".gitignore", "data", ".lock")] == []
    nb.run("del data.lock", check=True)
    nb.run("%%ddp_train net data -n 2\nloss = nn.MSELoss()", check=True)
    assert nb.eval("run.state") == "finished"


@contextmanager
def file_system(folder, megabytes):
    """A file system of that size on a folder; skips where this user may not mount one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small file system takes privileges: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_is_refused_before_writing(things, nb, tmp_path):
    nb.run("large, small = TensorDataset(torch.randn(12 << 20, 1), torch.zeros(12 << 20, 1)), TensorDataset(X[:, :1], Y[:, :1])", check=True)
    nb.run("net = nn.Linear(1, 1)", check=True)
    with file_system(tmp_path / "disk", 96) as disk:
        says = refused(nb, f"net large --run-root {disk}/runs")
        assert says.startswith("large, net and hooks: needs 0.2 GiB in ")
        assert says.endswith("free; free some with nbddp.prune(), or choose another place with --run-root")
        assert nb.eval(f"run_files('{disk}/runs')") == []
        assert sum(path.stat().st_blocks for path in disk.rglob("*")) * 512 < 64 << 10
        nb.run(f"%%ddp_train net small -n 2 --run-root {disk}/runs\nloss = nn.MSELoss()", check=True)
        assert nb.eval("run.state") == "finished"
        nb.run("del large, run; import gc; gc.collect()", check=True)
