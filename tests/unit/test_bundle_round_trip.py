"""What is bundled arrives in another process as it was."""

from __future__ import annotations

import pytest

from support import bundle_cases
from support.bundled import CellNotebook

COMPARE = """
from support.bundle_cases import build_all, difference
sent = build_all()
result = {name: difference(name, arrived, sent[name]) for name, arrived in [*loaded.hooks.items(), *loaded.datasets["train"].items()]}
"""
NAMES = [*bundle_cases.TENSORS, *bundle_cases.ARRAYS, *bundle_cases.OTHERS]


@pytest.fixture(scope="module")
def arrived(tmp_path_factory):
    notebook = CellNotebook(tmp_path_factory.mktemp("cases"))
    built = bundle_cases.build_all()
    modules = {name: built.pop(name) for name in bundle_cases.MODULES}
    return notebook.ship(hooks=modules, train=built).opened(COMPARE)


@pytest.mark.parametrize("name", [*NAMES, *bundle_cases.MODULES])
def test_object_arrives_as_it_was(arrived, name):
    assert name in arrived
    assert arrived[name] is None


def test_old_style_norms_arrive(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(
        "import torch, warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "    net = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)), torch.nn.utils.spectral_norm(torch.nn.Linear(4, 2)))\n"
        "net(torch.ones(3, 4)).sum().backward()\n"  # leaves weights with an autograd history behind
        "net.eval()\n"  # spectral_norm changes its estimate at each forward otherwise
        "expected = net(torch.ones(3, 4)).tolist()\n"
    )
    program = """
import torch
net = loaded.model
before = net(torch.ones(3, 4))
before.sum().backward()
result = [before.tolist(), [p.grad is not None for p in net.parameters()]]
"""
    output, graded = notebook.ship(model=notebook["net"]).opened(program)
    assert output == notebook["expected"]
    assert all(graded)


def test_lstm_after_forward_under_old_weight_norm_arrives(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(
        "import torch, warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "    net = torch.nn.utils.weight_norm(torch.nn.LSTM(4, 3), 'weight_hh_l0')\n"
        "expected = net(torch.ones(5, 4))[0].tolist()\n"
    )
    program = "import torch; result = loaded.model(torch.ones(5, 4))[0].tolist()"
    assert notebook.ship(model=notebook["net"]).opened(program) == notebook["expected"]


def test_memory_mapped_files_are_mapped_again_and_not_copied(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(
        "import numpy as np\n"
        f"path = {str(tmp_path / 'values.bin')!r}\n"
        "np.arange(100_000, dtype='f4').tofile(path)\n"
        "whole = np.memmap(path, dtype='f4', mode='r', offset=8000)\n"
        "written = np.memmap(path, dtype='f4', mode='r+')\n"
        "data = {'whole': whole, 'view': whole[100:5000].reshape(70, 70)[::-1], 'plain': np.asarray(whole[7:50]), 'written': written,"
        " 'private': np.memmap(path, dtype='f4', mode='c')}\n"
        "data['private'][0] = -5\n"
        "written[3] = -1\n"
    )
    program = """
import numpy as np
d = loaded.datasets["train"]
assert [type(d[k]) for k in ("whole", "view", "written")] == [np.memmap] * 3
assert type(d["plain"]) is np.ndarray and isinstance(d["plain"].base, np.memmap)
assert not d["whole"].flags.writeable and not d["view"].flags.writeable and not d["plain"].flags.writeable
assert d["private"][0] == -5
d["written"][4] = -2  # seen in the file, as it would be in the notebook
result = {k: [list(v.shape), float(v.flat[0]), float(v.flat[-1])] for k, v in d.items()}
"""
    shipped = notebook.ship(train=notebook["data"])
    result = shipped.opened(program)
    assert result == {k: [list(v.shape), float(v.flat[0]), float(v.flat[-1])] for k, v in notebook["data"].items()}
    assert notebook["written"][4] == -2
    assert shipped.refs[0].bytes < 420_000  # the one private copy


def test_arrays_that_share_a_buffer_share_it_still(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(
        "import numpy as np, torch\n"
        "base = np.arange(10_000.0)\n"
        "data = {'base': base, 'bits': base.view('u8'), 'part': base[2000:9000], 'tensor': torch.from_numpy(base)}\n"
        "z = torch.zeros(5000, dtype=torch.complex64)\n"
        "data |= {'z': z, 'ri': torch.view_as_real(z)}\n"
    )
    program = """
d = loaded.datasets["train"]
d["base"][2000] = 0.5
d["ri"][3, 1] = 7
result = [int(d["bits"][2000]), float(d["part"][0]), float(d["tensor"][2000]), d["z"][3].imag.item()]
"""
    shipped = notebook.ship(train=notebook["data"])
    assert shipped.opened(program) == [0x3FE0000000000000, 0.5, 0.5, 7.0]
    assert shipped.refs[0].bytes < 80_000 + 40_000 + 5000


def test_a_small_slice_does_not_bring_its_buffer(tmp_path):
    notebook = CellNotebook(tmp_path)
    notebook.cell(
        "import numpy as np, torch\n"
        "big = torch.arange(1_000_000)\n"
        "data = {'a': big[10:20], 'b': big[10:20], 'c': big[500_003:500_010], 'column': np.zeros((100_000, 50))[:, 0]}\n"
    )
    program = """
d = loaded.datasets["train"]
d["a"][0] = -1
result = [d["b"].tolist(), d["c"].tolist()]
"""
    shipped = notebook.ship(train=notebook["data"])
    assert shipped.opened(program) == [[-1, *range(11, 20)], list(range(500_003, 500_010))]
    assert shipped.refs[0].bytes < 900_000
