"""Classes and functions of a notebook in the process that opens the bundle: bound in its ``__main__``, found by pickle and by loader workers, with sources."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from packaging.version import Version

from nbddp.bundle.loader import load_model
from support.bundled import CellNotebook

CELLS = '''
import dataclasses, enum, functools, pickle
import torch
from torch.utils.data import DataLoader, Dataset

SCALE = 3

class Base(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

class Net(Base):
    """A net."""
    kind = "net"

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("scale", torch.tensor(float(SCALE)))

    def forward(self, x):
        return super().__repr__() and helper(self.layer(x))

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    label: str

    class Meta:
        version = 2

class Color(enum.Enum):
    RED = 1

@functools.lru_cache(maxsize=7)
def cached(n):
    return n * SCALE

def helper(x):
    return x * SCALE

class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return Batch(torch.tensor(helper(i) ** 2), str(i))

def make_collate(offset):
    def collate(samples):
        class Local:
            pass
        local = Local()
        local.x = torch.stack([s.x for s in samples]) + offset
        local.twice = lambda: local.x * 2
        return local
    return collate
'''


@pytest.fixture
def notebook(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(CELLS)
    return notebook


def test_cloudpickle_is_a_version_that_this_was_written_for():
    assert Version("3.1") <= Version(cloudpickle.__version__) < Version("3.2")


def test_classes_are_the_ones_in_main(notebook):
    notebook.cell("net = Net(2); data = Squares(); meta = Batch.Meta(); red = Color.RED")
    program = """
import pickle, sys
main = sys.modules["__main__"]
net, data = loaded.model, loaded.datasets["train"]
assert not hasattr(main, "__file__") and main.__spec__ is None
assert type(net) is main.Net and isinstance(net, main.Base) and type(data) is main.Squares and type(data[0]) is main.Batch
assert type(loaded.hooks["meta"]) is main.Batch.Meta and loaded.hooks["red"] is main.Color.RED
for obj in (data[3], loaded.hooks["meta"], loaded.hooks["red"], main.Net, main.helper):
    again = pickle.loads(pickle.dumps(obj))
    assert type(again) is type(obj)
    assert again == obj or isinstance(obj, main.Batch.Meta)
import torch
result = [net(torch.ones(1, 2)).shape, main.SCALE, main.Net.forward.__globals__ is vars(main), main.Net.__doc__, repr(net).splitlines()[0]]
"""
    hooks = {"meta": notebook["meta"], "red": notebook["red"]}
    result = notebook.ship(model=notebook["net"], train=notebook["data"], hooks=hooks).opened(program)
    assert result == [[1, 2], 3, True, "A net.", "Net("]


def test_functions_share_globals(notebook):
    notebook.cell("counter = [0]\ndef count():\n    counter[0] += 1\ndef read():\n    return counter[0]\ndef set_scale(s):\n    global SCALE\n    SCALE = s\n")
    program = """
h = loaded.hooks
h["count"](); h["count"](); h["set_scale"](10)
result = [h["read"](), h["helper"](1), h["cached"](2), h["cached"].cache_parameters()["maxsize"]]
"""
    hooks = {name: notebook[name] for name in ("count", "read", "set_scale", "helper", "cached")}
    assert notebook.ship(hooks=hooks).opened(program) == [2, 10, 20, 7]


def test_functions_of_another_namespace_keep_their_own_globals(notebook):
    # As the body of a cell that runs on a copy of the notebook's names.
    body = dict(vars(notebook.main))
    exec(
        compile(
            "SCALE = 100\nclass Own:\n    pass\ndef step(x):\n    return helper(x) + extra(x), Own\ndef extra(x):\n    return x * SCALE\n", "body.py", "exec"
        ),
        body,
    )
    program = """
import pickle
value, own = loaded.hooks["step"](1)
assert type(pickle.loads(pickle.dumps(own()))) is own  # found in __main__, since the notebook has no other thing of that name
result = [value, loaded.hooks["helper"](1)]
"""
    assert notebook.ship(hooks={"step": body["step"], "helper": notebook["helper"]}).opened(program) == [103, 3]


def test_redefined_class_stays_what_it_was(notebook):
    notebook.cell("old = Squares()")
    notebook.cell("class Squares(Dataset):\n    def __len__(self):\n        return 1\n    def __getitem__(self, i):\n        return 'new'\nnew = Squares()\n")
    program = """
import sys
from torch.utils.data import DataLoader
old, new = loaded.datasets["train"], loaded.datasets["val"]
main = sys.modules["__main__"]
batches = [b for b in DataLoader(old, batch_size=2, num_workers=2, collate_fn=lambda samples: (old, samples))]
result = [type(new) is main.Squares, type(old) is main.Squares, type(old).__name__, len(old), new[0], len(batches[0][0]), type(batches[0][0]) is type(old)]
"""
    assert notebook.ship(train=notebook["old"], val=notebook["new"]).opened(program) == [True, False, "Squares", 6, "new", 6, True]


def test_loader_workers_take_lambdas_and_return_local_classes(notebook):
    notebook.cell("data = Squares(); collate = make_collate(5); short = lambda samples: [s.label for s in samples]")
    program = """
from torch.utils.data import DataLoader
def run(name):
    return list(DataLoader(loaded.datasets["train"], batch_size=3, num_workers=2, collate_fn=loaded.hooks[name]))
locals_, labels = run("collate"), run("short")
result = [[b.x.tolist() for b in locals_], [b.twice().tolist() for b in locals_], labels]
"""
    shipped = notebook.ship(train=notebook["data"], hooks={"collate": notebook["collate"], "short": notebook["short"]})
    values = [[5, 14, 41], [86, 149, 230]]
    assert shipped.opened(program) == [values, [[2 * v for v in row] for row in values], [["0", "1", "2"], ["3", "4", "5"]]]


def test_sources_are_found(notebook):
    filename = notebook.cell("def step(x):\n    # a comment\n    y = x + 1\n    return y / 0\n")
    always = notebook.cell("'a cell that no code refers to'")
    notebook.cell("'another one'")
    program = """
import inspect, sys, traceback
try:
    loaded.hooks["step"](1)
except ZeroDivisionError as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
main = sys.modules["__main__"]
result = [inspect.getsource(loaded.hooks["step"]), inspect.getsource(main.Net.forward), frame.filename, frame.lineno, frame.line,
          {name: cell.cell for name, cell in loaded.cells.items()}]
"""
    shipped = notebook.ship(model=notebook["Net"](2), hooks={"step": notebook["step"]}, always=(always,))
    step, method, name, line, text, cells = shipped.opened(program)
    assert step == notebook.cells[filename].source
    assert method == "    def forward(self, x):\n        return super().__repr__() and helper(self.layer(x))\n"
    assert (name, line, text) == (filename, 4, "return y / 0")
    assert cells == {next(iter(notebook.cells)): 1, filename: 2, always: 3}


def test_sources_of_a_dataset_s_class_are_in_the_bundle(notebook):
    notebook.cell("data = Squares()")
    program = "import inspect; result = inspect.getsource(type(loaded.datasets['train']).__getitem__)"
    assert notebook.ship(train=notebook["data"]).opened(program).startswith("    def __getitem__(self, i):")


def test_environment_stays_out_of_the_bundle(notebook, monkeypatch):
    monkeypatch.setenv("NBDDP_TEST_SECRET", "swordfish")
    notebook.cell("from os import environ\nimport sys\ndef step():\n    return sorted(environ)[:0], log is sys.stderr\nlog = sys.stderr\n")
    shipped = notebook.ship(hooks={"step": notebook["step"]})
    assert b"swordfish" not in shipped.path.read_bytes()
    assert shipped.opened("import os; g = loaded.hooks['step'].__globals__; result = [g['environ'] is os.environ, loaded.hooks['step']()]") == [
        True,
        [[], True],
    ]


def test_helper_module_is_found_after_a_change_of_directory(notebook, tmp_path, monkeypatch):
    (tmp_path / "beside").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside" / "nbddp_test_helper.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path / "beside")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    notebook.cell("import nbddp_test_helper\ndef step(x):\n    return nbddp_test_helper.double(x)\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    try:
        shipped = notebook.ship(hooks={"step": notebook["step"]})
    finally:
        del sys.modules["nbddp_test_helper"]
    assert shipped.opened("import os; result = [loaded.hooks['step'](4), os.getcwd()]") == [8, str(tmp_path / "elsewhere")]


def test_what_fails_while_it_is_rebuilt_says_in_what(notebook):
    notebook.cell(
        "class Fussy:\n    def __setstate__(self, state):\n        raise ValueError('not today')\n"
        "    def __getstate__(self):\n        return 1\nfussy = Fussy()\n"
    )
    with pytest.raises(AssertionError, match=r"ValueError: not today\nwhile train_set was rebuilt on the rank"):
        notebook.ship(train=notebook["fussy"]).opened("")


def test_model_is_rebuilt_in_a_kernel_without_touching_its_names(notebook):
    notebook.cell("net = Net(2); x = torch.ones(1, 2); expected = net(x)")
    shipped = notebook.ship(model=notebook["net"], hooks={"net": notebook["net"]})
    main = sys.modules["__main__"]
    names, forward = dict(vars(main)), notebook["Net"].forward
    model = load_model(shipped.path)
    assert vars(main) == names
    assert sys.modules["__main__"] is main
    assert type(model) is notebook["Net"]  # the kernel's own class, not a copy
    assert notebook["Net"].forward is forward
    assert model is not notebook["net"]
    assert model(notebook["x"]).tolist() == notebook["expected"].tolist()


DEFINITIONS = {
    "an autograd function": (
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        return grad * 7\n"
        "def hook():\n    x = torch.ones(2, requires_grad=True)\n    Double.apply(x).sum().backward()\n    return x.grad.tolist()\n",
        [7, 7],
    ),
    "a cached property": ("class A:\n    @functools.cached_property\n    def p(self):\n        return SCALE\ndef hook():\n    return A().p\n", 3),
    "a frozen dataclass with slots": ("@dataclasses.dataclass(slots=True, frozen=True)\nclass D:\n    x: int = 3\nd = D()\ndef hook():\n    return d.x\n", 3),
    "a generic dataset": ("class D(Dataset[int]):\n    def __len__(self):\n        return 2\nd = D()\ndef hook():\n    return len(d)\n", 2),
    "classes that refer to each other": (
        "class A:\n    def b(self):\n        return B()\nclass B(A):\n    pass\ndef hook():\n    return type(A().b()).__name__\n",
        "B",
    ),
    "a decorated function": (
        "@torch.no_grad()\ndef f(x):\n    return x * 2\ndef hook():\n    return f(torch.ones(1, requires_grad=True)).requires_grad\n",
        False,
    ),
    "a coroutine function": ("import asyncio\nasync def f():\n    return 3\ndef hook():\n    return asyncio.run(f())\n", 3),
    "IPython's own open": (
        "from IPython.core.interactiveshell import _modified_open as open\nimport sys\n"
        "def hook():\n    with open('/proc/self/status') as file:\n        return file.read(5), 'IPython' in sys.modules\n",
        ["Name:", False],
    ),
    "a compiled module": (
        "net = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend='eager'))\ndef hook():\n    return list(net(torch.ones(1, 2)).shape)\n",
        [1, 2],
    ),
}


@pytest.fixture(scope="module")
def defined(tmp_path_factory):
    hooks = {}
    notebook = None
    for name, (source, _) in DEFINITIONS.items():
        # A namespace for each, as bodies of cells have: the names of one are not those of another.
        notebook = CellNotebook(tmp_path_factory.mktemp("definitions"))
        notebook.cell(CELLS)
        notebook.cell(source)
        hooks[name] = notebook["hook"]
    return notebook.ship(hooks=hooks).opened("result = {name: hook() for name, hook in loaded.hooks.items()}")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition_works(defined, name):
    assert defined[name] == DEFINITIONS[name][1]
