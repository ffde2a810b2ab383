"""Compiled steps from a notebook: from the flag to the weights, and the error of a cell's own line."""

from __future__ import annotations

import json

import pytest

from support.example import EXAMPLE

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

LINE = "%%ddp_train net samples --val held_out -n 2 --devices cpu --batch-size 64 --lr 1e-2 --compile --compile-cache-dir compiled"


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture
def before(nb):
    nb.run("net = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)


@pytest.mark.usefixtures("before")
def test_a_compiled_cell_trains_and_leaves_the_names_of_parameters(nb):
    nb.run("from torch.nn import functional as functional_of_the_notebook\nTWICE = 2.0", check=True)
    body = """
def weighted(output, target):
    return functional_of_the_notebook.cross_entropy(output, target) * TWICE / OF_THE_CELL
OF_THE_CELL = 2.0
def training_step(model, batch):
    return weighted(model(batch[0]), batch[1]) * TWICE / 2"""
    nb.run(f"{LINE} --epochs 3{body}", timeout=180, check=True)
    assert nb.eval("list(net.state_dict()) == list(before) and not same(weights(net), before)") is True
    assert nb.eval("bool((run.history['loss'][-4:] < run.history['loss'][0]).all())") is True
    folder = nb.folder / nb.eval("str(run.dir)")
    kinds = [json.loads(line) for line in (folder / "events/rank-00000.0.jsonl").read_text().splitlines()]
    phases = [event["data"]["phase"] for event in kinds if event["kind"] == "phase"]
    assert phases[phases.index("compiling") + 1] == "training"


@pytest.mark.usefixtures("before")
def test_an_error_of_the_cell_keeps_its_line(nb):
    cell = nb.run(
        f"""{LINE} --epochs 30
def training_step(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    if float(loss) < 1.2:
        raise KeyError("low enough")
    return loss""",
        timeout=180,
    )
    assert cell.error is not None
    assert cell.error.ename == "WorkerError"
    assert "KeyError: 'low enough'" in cell.error.evalue
    assert nb.eval("run.error.line") == 6
    assert "---->   6" in nb.eval("run.error.remote_traceback")
    cell = nb.run(f"{LINE}\ndef training_step(model, batch):\n    return F.cross_entropy(model(batch[0][:, 1:]), batch[1])", timeout=180)
    assert cell.error is not None
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x7 and 8x32)" in cell.error.evalue
    assert "---->   3     return F.cross_entropy" in nb.eval("run.error.remote_traceback")
