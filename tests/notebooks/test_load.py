"""Weights into the notebook's models: of runs and of files, by magic and by function, and what differs between runs."""

from __future__ import annotations

import pytest

from support.example import BRIEF, EXAMPLE, STEP

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", autouse=True)
def runs(shared_kernel):
    """Two runs of the same model, `one` and `two`, of which the second has another learning rate."""
    shared_kernel.run(EXAMPLE, check=True)
    shared_kernel.run(f"%%ddp_train net samples --val held_out {BRIEF} --as one\n{STEP}", check=True)
    shared_kernel.run("net = make_net()", check=True)
    shared_kernel.run(f"%%ddp_train net samples --val held_out {BRIEF} --as two --lr 0.5\n{STEP}", check=True)
    shared_kernel.run("of_one, of_two = nbddp.load_checkpoint(one), nbddp.load_checkpoint(two)", check=True)


@pytest.fixture
def fresh(nb):
    nb.run("net = make_net()\nbefore = weights(net)", check=True)
    return nb


def refusal(nb, source):
    """What the front end shows, all of it, of a line that is refused."""
    error = nb.run(source).error
    assert error is not None
    assert error.ename in ("CheckpointError", "ConfigError")
    assert nb.eval("same(net.state_dict(), before)") is True
    assert "Traceback" not in error.traceback
    assert "---" not in error.traceback
    return error.traceback.removeprefix(f"{error.ename}: ")


def test_a_run_is_loaded_by_variable_by_id_and_as_the_last(fresh):
    for words, of in (("one", "one"), ("{one.id}", "one"), ("", "two"), ("{two.dir}", "two"), ("one --which best", "one")):
        fresh.run("net = make_net()", check=True)
        cell = fresh.run(f"%ddp_load net {words}", check=True)
        assert fresh.eval(f"same(net.state_dict(), of_{of})") is True
        assert fresh.eval(f"{of}.id") in cell.text
        assert len(cell.text.splitlines()) == 1
    for line in ("best = one.checkpoints['best']\n%ddp_load net best", "path = one.checkpoints['best'].path\n%ddp_load net path"):
        fresh.run(f"net = make_net()\n{line}", check=True)
        assert fresh.eval("same(net.state_dict(), nbddp.load_checkpoint(best.path))") is True
    fresh.run("%ddp_load net one --which initial", check=True)
    assert fresh.eval("same(net.state_dict(), of_one)") is False


def test_files_of_every_kind_are_loaded_by_one_line(fresh):
    fresh.run(
        """
import argparse, safetensors.torch
Path("my models").mkdir(exist_ok=True)
torch.save(nn.DataParallel(torch.compile(net)).state_dict(), "wrapped.pt")
torch.save({"model": {name: value.double() for name, value in of_one.items()}, "epoch": 3}, "my models/double.pth")
safetensors.torch.save_file(dict(of_one), "one.safetensors", metadata={"step": "12"})
torch.save({"state_dict": {f"net.{name}": value for name, value in of_one.items()}, "pytorch-lightning_version": "2.5.1", "epoch": 4, "global_step": 9,
            "hyper_parameters": {"args": argparse.Namespace(lr=0.1)}}, "lit.ckpt")
""",
        check=True,
    )
    expected = {
        "wrapped.pt": "net: wrapped.pt; names without _orig_mod. and module.\n",
        "'my models/double.pth'": "net: my models/double.pth; epoch 3; 4 from float64 to float32\n",
        "one.safetensors": "net: one.safetensors; step 12\n",
        "lit.ckpt --no-weights-only": "net: lit.ckpt; epoch 4, step 9; from what is below net. in it\n",
    }
    for words, said in expected.items():
        fresh.run("net = make_net()", check=True)
        assert fresh.run(f"%ddp_load net {words}", check=True).text == said
        if "wrapped" not in words:
            assert fresh.eval("same(net.state_dict(), of_one)") is True


def test_refusals_are_tables_without_a_traceback(fresh):
    fresh.run("torch.save({name.replace('layers', 'blocks'): value for name, value in of_one.items()}, 'renamed.pt')\nother = nn.LSTM(3, 4)", check=True)
    assert refusal(fresh, "%ddp_load net renamed.pt").splitlines()[:2] == [
        "renamed.pt does not fit Net; the model is unchanged:",
        "  missing     layers.0.weight  in the model alone; the file has blocks.0.weight",
    ]
    assert refusal(fresh, "%ddp_load net lit.ckpt").startswith("lit.ckpt can't be read: it holds pickled objects beside tensors (argparse.Namespace); ")
    assert refusal(fresh, "%ddp_load net renamd.pt").startswith("no checkpoint renamd.pt; the working directory has ")
    assert refusal(fresh, "%ddp_load net nosuchrun").startswith("no run nosuchrun in ")
    assert refusal(fresh, "%ddp_load net one --which 9").startswith(f"run {fresh.eval('one.id')} has no checkpoint 9: it has ")
    assert "does not fit LSTM; the model is unchanged:" in refusal(fresh, "%ddp_load other one")
    assert refusal(fresh, "nbddp.load_checkpoint('renamed.pt', net)").startswith("renamed.pt does not fit Net")


def test_a_run_is_loaded_by_its_id_in_python(fresh):
    assert fresh.eval("same(nbddp.load_checkpoint(one.id), of_one) and nbddp.load_checkpoint(one.id[-4:], net) is net") is True
    assert fresh.eval("same(nbddp.load_checkpoint(one.checkpoints['best']), nbddp.load_checkpoint(one.dir / 'checkpoints/best.pt'))") is True
    assert fresh.eval("same(net.state_dict(), of_one)") is True


def test_runs_are_compared(nb):
    cell = nb.run("one.diff(two)", check=True)
    lines = cell.shown()[0].splitlines()
    assert lines[0] == f"{nb.eval('one.id').split('-', 2)[-1]}, last → {nb.eval('two.id').split('-', 2)[-1]}, last"
    assert lines[1].startswith("options: lr ")
    assert lines[2] == "0 of 4 entries are equal bitwise; 4 differ in values"
    assert [line.split()[1] for line in lines[4:]] == ["values"] * 4
    (html,) = cell.shown("text/html")
    assert "4 differ in values" in html
    assert nb.eval("(one.diff(two).equal, list(one.diff(two).config), one.diff(one.id).equal, one.diff(of_one).max_abs)") == (False, ["lr"], True, 0.0)
    assert nb.eval("one.diff(two)['layers.0.bias'].max_abs == float((of_one['layers.0.bias'] - of_two['layers.0.bias']).abs().max())") is True


def test_checkpoints_are_a_table(nb):
    cell = nb.run("one.checkpoints", check=True)
    assert "best.pt" in cell.shown()[0]
    assert "best.pt" in cell.shown("text/html")[0]
    nb.run("gone = one.checkpoints['initial'].path\nkept = gone.read_bytes()\ngone.unlink()", check=True)
    assert nb.eval("sorted(entry.name for entry in one.checkpoints)") == ["best", "last"]
    nb.run("gone.write_bytes(kept)", check=True)
    assert nb.run("one.checkpoints['initail']").error.evalue.startswith("'no checkpoint initail; there are initial, ")
