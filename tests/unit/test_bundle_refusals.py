"""What can't be sent is refused by name, before anything is written."""

from __future__ import annotations

import gzip
import json
import re
import socket
import sqlite3
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from nbddp.errors import BundleError
from support.bundled import CellNotebook


@pytest.fixture
def notebook(tmp_path):
    return CellNotebook(tmp_path)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def refused(notebook, *, model=None, hooks=None, **datasets):
    with pytest.raises(BundleError) as caught:
        notebook.ship(model=model, hooks=hooks, **datasets)
    assert list(notebook.folder.rglob("*.pt*")) == []
    return str(caught.value)


def holding(obj):
    return SimpleNamespace(items=[1, {"x": obj}])


def h5_file(folder, stack):
    file = stack.enter_context(h5py.File(folder / "a.h5", "w"))
    file["values"] = np.arange(5)
    file.attrs["a"] = 1
    return file


def generator():
    yield 1


UNSENDABLE = {
    "text file": (
        lambda f, s: s.enter_context((f / "a.txt").open("w")),
        r"an open file \('.*a\.txt'\) can't be sent to another process; open it in __getitem__ \(once",
    ),
    "binary file": (lambda f, s: s.enter_context((f / "a.bin").open("wb")), r"an open file \('.*a\.bin'\) can't be sent"),
    "compressed file": (lambda f, s: s.enter_context(gzip.GzipFile(f / "a.gz", "w")), r"an open file \('.*a\.gz'\) can't be sent"),
    "standard input": (lambda f, s: sys.__stdin__, r"an open file \('<stdin>'\) can't be sent"),
    "h5py file": (h5_file, r"h5py\.File can't be sent to another process; open it in __getitem__ \(once per process\), and keep only its path"),
    "h5py dataset": (lambda f, s: h5_file(f, s)["values"], r"h5py\.Dataset can't be sent to another process; open it in __getitem__"),
    "h5py handle": (lambda f, s: h5_file(f, s).id, r"h5py\.h5f\.FileID can't be sent"),
    "h5py attributes": (lambda f, s: h5_file(f, s).attrs, r"h5py\.AttributeManager can't be sent"),
    "lock": (
        lambda f, s: threading.Lock(),
        r"threading\.Lock can't be sent to another process; create it where it is first used, or leave it out in __getstate__",
    ),
    "event": (lambda f, s: threading.Event(), r"threading\.Event can't be sent .* create it where"),
    "thread": (lambda f, s: threading.Thread(), r"threading\.Thread can't be sent .* start it where"),
    "executor": (lambda f, s: s.enter_context(ThreadPoolExecutor(1)), r"concurrent\.futures\.ThreadPoolExecutor can't be sent .* start it where"),
    "generator": (lambda f, s: generator(), r"generator can't be sent to another process; keep a list of its items, or the function that makes it"),
    "socket": (lambda f, s: s.enter_context(socket.socket()), r"socket\.socket can't be sent .* connect where"),
    "weak reference": (lambda f, s: weakref.ref(SimpleNamespace), r"weakref\.ReferenceType can't be sent .* keep the object itself"),
    "database": (
        lambda f, s: s.enter_context(closing(sqlite3.connect(":memory:"))),
        r"sqlite3\.Connection can't be sent to another process \(cannot pickle 'sqlite3\.Connection' object\); create",
    ),
    "module from nowhere": (lambda f, s: sys._getframe(), r"frame can't be sent to another process \(cannot pickle 'frame' object\)"),
    "graph": (
        lambda f, s: torch.ones(2, requires_grad=True) * 2,
        r"a tensor that is part of an autograd graph \(MulBackward0\) can't be sent to another process; keep it detached: \.detach",
    ),
    "meta": (lambda f, s: torch.ones(2, device="meta"), r"a tensor on the meta device holds no data; build it on the CPU, or use to_empty\(device='cpu'\)"),
    "uninitialised": (lambda f, s: torch.nn.UninitializedParameter(), r"a parameter without a shape yet, .* run one batch through its module first"),
}


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_object_in_a_dataset_is_refused_by_path(notebook, tmp_path, stack, kind):
    make, message = UNSENDABLE[kind]
    obj = make(tmp_path, stack)
    text = refused(notebook, train=holding(obj))
    assert re.match(rf"train_set\.items\[1\]\['x'\]: {message}", text), text
    assert "\n" not in text


def test_lazy_module_is_refused_by_name(notebook):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.LazyLinear(3)))
    assert refused(notebook, model=net) == ("net[1][0]: LazyLinear has no shapes yet, and every rank would make up its own; run one batch through it first")
    net(torch.ones(1, 2))
    notebook.ship(model=net)


def test_module_on_the_meta_device_is_refused_by_its_parameter(notebook):
    net = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2, device="meta")})
    assert refused(notebook, model=net).startswith("net.head.weight: a tensor on the meta device holds no data")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_and_functions_are_refused(notebook):
    script = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), script)
    assert refused(notebook, model=net) == "net[1]: a ScriptModule can't be sent to another process; use the Python module that it was made from"
    notebook.main.scripted = torch.jit.trace(lambda x: x + 1, torch.ones(1))
    notebook.cell("def step(x):\n    return scripted(x)\n")
    assert refused(notebook, hooks={"training_step": notebook["step"]}).startswith("training_step -> scripted: torch.ScriptFunction can't be sent")


def test_compiled_function_is_refused(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it where it is not set
    notebook.cell("import torch\n@torch.compile(backend='eager')\ndef mse(x, y):\n    return (x - y).square().mean()\ndef loss(x, y):\n    return mse(x, y)\n")
    text = refused(notebook, hooks={"loss": notebook["loss"]})
    assert text == "loss -> mse: a function made by torch.compile can't be sent to another process; use the function that it was made from"


def test_cached_activation_of_a_model_is_refused(notebook):
    net = torch.nn.Linear(2, 2)
    net.last = net(torch.ones(1, 2))
    assert refused(notebook, model=net) == (
        "net.last: a tensor that is part of an autograd graph (AddmmBackward0) can't be sent to another process; keep it detached: .detach()"
    )


PATHS = {
    "a global of a function": ("lock = L()\ndef hook():\n    return lock\n", "hook -> lock"),
    "a global of a nested function": ("lock = L()\ndef hook():\n    return (lambda: lock)()\n", "hook -> lock"),
    "a closure": ("def make(lock):\n    return lambda: lock\nhook = make(L())\n", "hook -> lock"),
    "a default": ("def hook(a, lock=L()):\n    return lock\n", "hook(lock=...)"),
    "a helper's global": ("lock = L()\ndef helper():\n    return lock\ndef hook():\n    return helper()\n", "hook -> helper -> lock"),
    "a class attribute": ("class A:\n    shared = [0, L()]\nhook = A()\n", "hook -> A.shared[1]"),
    "a slot": ("class A:\n    __slots__ = ('lock',)\nhook = A()\nhook.lock = L()\n", "hook.lock"),
    "a method": ("class A:\n    def __init__(self):\n        self.lock = L()\n    def f(self):\n        pass\nhook = A().f\n", "hook.__self__.lock"),
    "a partial": ("import functools\nhook = functools.partial(print, 1, file=L())\n", "hook.keywords['file']"),
    "a named tuple": ("from collections import namedtuple\nhook = namedtuple('P', 'x lock')(1, L())\n", "hook.lock"),
    "an array of objects": ("import numpy as np\nhook = np.array([[1, L()]], dtype=object)\n", "hook[0, 1]"),
    "a property of a class": ("lock = L()\nclass A:\n    @property\n    def p(self):\n        return lock\nhook = A()\n", "hook -> A.p -> lock"),
    "a set": ("hook = {L()}\n", "hook[...]"),
    "a module's hook": (
        "import torch\nlock = L()\nhook = torch.nn.Linear(1, 1)\nhook.register_forward_hook(lambda *a: lock)\n",
        "hook._forward_hooks[*] -> lock",
    ),
}


@pytest.mark.parametrize("kind", PATHS)
def test_path_to_the_culprit(notebook, kind):
    source, path = PATHS[kind]
    notebook.cell("from threading import Lock as L\n" + source)
    text = refused(notebook, hooks={"other": 1, "hook": notebook["hook"]})
    assert re.sub(r"_hooks\[\d+\]", "_hooks[*]", text).startswith(f"{path}: threading.Lock can't be sent"), text


def test_hidden_culprit_is_named_by_what_holds_it(notebook):
    notebook.cell("import threading\nclass A:\n    def __getstate__(self):\n        return {'made': [threading.Lock()]}\ndata = [A()]\n")
    assert refused(notebook, train=notebook["data"]).startswith("train_set[0]: threading.Lock can't be sent")


def test_error_of_the_user_s_own_getstate_is_told(notebook):
    notebook.cell("class A:\n    def __getstate__(self):\n        raise KeyError('no key')\ndata = {'a': A()}\n")
    assert refused(notebook, train=notebook["data"]).startswith("train_set['a']: A can't be sent to another process ('no key'); ")


def test_deep_nesting_is_refused(notebook):
    notebook.cell("class Link:\n    def __init__(self, next):\n        self.next = next\nchain = None\nfor _ in range(100_000):\n    chain = Link(chain)\n")
    text = refused(notebook, train=notebook["chain"])
    assert re.match(r"train_set\.next\.next.{20,140}: nested too deeply to be sent to another process; keep such chains flat, in a list$", text), text


def test_memory_map_of_a_file_that_is_gone_is_refused(notebook, tmp_path):
    np.arange(5000).tofile(tmp_path / "a.bin")
    array = np.memmap(tmp_path / "a.bin", dtype="i8", mode="r")
    (tmp_path / "a.bin").unlink()
    assert re.match(
        r"train_set\.x: an array that is mapped from .*a\.bin can't be sent, since that file no longer exists; ",
        refused(notebook, train=SimpleNamespace(x=array)),
    )


def test_h5py_subclass_that_knows_how_to_be_pickled_is_sent(notebook, tmp_path):
    notebook.cell(
        "import h5py\nclass Reopened(h5py.File):\n    def __reduce__(self):\n        return Reopened, (self.filename, 'r')\n"
        f"with h5py.File({str(tmp_path / 'b.h5')!r}, 'w') as f:\n    f['a'] = [1, 2]\n"
        f"file = Reopened({str(tmp_path / 'b.h5')!r}, 'r')\n"
    )
    shipped = notebook.ship(train=notebook["file"])
    notebook["file"].close()
    assert shipped.opened("result = loaded.datasets['train']['a'][:].tolist()") == [1, 2]


def test_refused_model_leaves_no_data_behind(notebook):
    text = refused(notebook, model=holding(threading.Lock()), train=torch.ones(1000))
    assert text.startswith("net.items[1]['x']: ")


def test_error_is_one_line_in_a_notebook(notebook):
    with pytest.raises(BundleError) as caught:
        notebook.ship(train=threading.Lock())
    assert caught.value._render_traceback_() == [f"BundleError: {caught.value}"]
    assert json.dumps(str(caught.value)).startswith('"train_set: threading.Lock ')
