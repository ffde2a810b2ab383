"""What shares memory or identity in the notebook does so on the ranks, and is stored once."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import Subset, TensorDataset, random_split

from nbddp.errors import BundleError
from support.bundled import CellNotebook

SIZE = 400_000  # bytes of the tensor below


@pytest.fixture
def notebook(tmp_path):
    return CellNotebook(tmp_path)


@pytest.fixture
def data():
    return TensorDataset(torch.arange(100_000, dtype=torch.float32).reshape(1000, 100), torch.arange(1000))


def test_tied_weights_are_tied(notebook):
    net = torch.nn.ModuleDict({"enc": torch.nn.Linear(3, 3), "dec": torch.nn.Linear(3, 3), "view": torch.nn.Linear(3, 2)})
    net.dec.weight = net.enc.weight
    net.view.weight.data = net.enc.weight.data[:2]
    program = """
net, h = loaded.model, loaded.hooks
with __import__("torch").no_grad():
    net["enc"].weight[0] = 7
weight = net["enc"].weight
result = [net["dec"].weight is weight, net["view"].weight[0].tolist(), h["weight"] is weight, h["net"] is net, h["fn"].__closure__[0].cell_contents is net]
"""
    hooks = {"weight": net.enc.weight, "net": net, "fn": (lambda net: lambda: net)(net)}
    assert notebook.ship(model=net, hooks=hooks).opened(program) == [True, [7, 7, 7], True, True, True]


def test_hooks_refer_to_the_data(notebook, data):
    train, _ = random_split(data, [900, 100])
    notebook.main.train_set, notebook.main.x = train, data.tensors[0]
    notebook.cell("def step():\n    return train_set, x\n")
    hooks = {"step": notebook["step"], "base": train.dataset, "part": data.tensors[0][5:9], "as_array": data.tensors[0].numpy()[:, 1:]}
    program = """
train, h = loaded.datasets["train"], loaded.hooks
x = train.dataset.tensors[0]
x[5, 1] = -1
same = [h["step"]()[0] is train, h["step"]()[1] is x, h["base"] is train.dataset]
result = [*same, h["part"][0, 1].item(), float(h["as_array"][5, 0]), h["part"].data_ptr() - x.data_ptr()]
"""
    shipped = notebook.ship(train=train, hooks=hooks)
    assert shipped.opened(program) == [True, True, True, -1, -1, 2000]
    assert shipped.path.stat().st_size < SIZE / 10


def test_two_parts_of_one_dataset_are_stored_once(notebook, data):
    train, val = random_split(data, [900, 100])
    shipped = notebook.ship(train=train, val=val, hooks={"base": data})
    sizes = sorted(path.stat().st_size for path in shipped.data_dir.iterdir())
    assert sizes[0] < SIZE / 10 < SIZE < sizes[1] < 1.2 * SIZE
    program = """
t, v = loaded.datasets["train"], loaded.datasets["val"]
result = [t.dataset is v.dataset is loaded.hooks["base"], [int(v[i][1]) for i in range(3)]]
"""
    assert shipped.opened(program) == [True, [int(val[i][1]) for i in range(3)]]


def test_one_dataset_in_two_roles_is_one(notebook, data):
    shipped = notebook.ship(train=data, val=data)
    assert shipped.refs[0].hash == shipped.refs[1].hash
    assert len(list(shipped.data_dir.iterdir())) == 1
    assert shipped.opened("result = loaded.datasets['train'] is loaded.datasets['val']")


def test_list_dataset_is_referred_to(notebook):
    samples = [(str(i), i) for i in range(20_000)]
    notebook.main.samples = samples
    notebook.cell("def step():\n    return samples\n")
    shipped = notebook.ship(train=samples, hooks={"step": notebook["step"]})
    assert shipped.opened("result = loaded.hooks['step']() is loaded.datasets['train']")
    assert shipped.path.stat().st_size < 20_000


def test_model_opens_without_the_data(notebook, data):
    from nbddp.bundle.loader import load_model

    net = torch.nn.Linear(2, 2)
    net.register_buffer("examples", data.tensors[0])
    shipped = notebook.ship(train=data, model=net, hooks={"x": data})
    for path in shipped.data_dir.iterdir():
        path.unlink()
    assert torch.equal(load_model(shipped.path).examples, data.tensors[0])
    with pytest.raises(AssertionError, match=r"BundleError: .*\.pt is gone; .* Run the cell again"):
        shipped.opened("")


def test_small_objects_of_a_dataset_do_not_tie_the_hooks_to_it(notebook, data):
    data.classes = {"cat": 0}
    shipped = notebook.ship(train=Subset(data, [0]), hooks={"classes": data.classes})
    shipped.refs = []
    for path in shipped.data_dir.iterdir():
        path.unlink()
    assert shipped.opened("result = loaded.hooks['classes']") == {"cat": 0}


def test_processes_share_pages_until_they_write(notebook, data):
    program = """
import os
x = loaded.datasets["train"].tensors[0]
before = x[0, 0].item()
pid = os.fork()
if pid == 0:
    x[0, 0] = 5
    os._exit(0)
os.waitpid(pid, 0)
mapped = [line for line in open("/proc/self/maps") if line.rstrip().endswith(".pt") and "data" in line]
result = [before, x[0, 0].item(), mapped[0].split()[1], len(mapped) >= 1]
"""
    shipped = notebook.ship(train=data)
    assert shipped.opened(program) == [0, 0, "rw-p", True]
    assert shipped.opened(program) == [0, 0, "rw-p", True]  # nothing was written through to the file


def test_in_a_kernel_hooks_share_with_the_model_and_need_of_the_data_only_what_they_refer_to(notebook, data):
    from nbddp.bundle import load_apart

    notebook.cell("import torch\nnet = torch.nn.Linear(2, 2)\ndef step():\n    return net\n")
    shipped = notebook.ship(train=data, model=notebook["net"], hooks={"step": notebook["step"], "base": data})
    loaded = load_apart(shipped.path, shipped.data_dir)
    assert loaded.hooks["step"]() is loaded.model
    assert loaded.model is not notebook["net"]
    assert torch.equal(loaded.hooks["base"].tensors[0], data.tensors[0])
    assert "step" not in vars(sys.modules["__main__"])
    for path in shipped.data_dir.iterdir():
        path.unlink()
    with pytest.raises(BundleError, match=r"\.pt is gone; .* Run the cell again") as caught:
        load_apart(shipped.path, shipped.data_dir)
    assert caught.value.__notes__ == ["while one of the hooks was rebuilt"]
