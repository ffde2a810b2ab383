"""From `%load_ext nbddp` to trained weights: in a notebook, saved and open, in a script, and in a terminal's IPython."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from support.example import ENDLESS, EXAMPLE, start

pytestmark = pytest.mark.kernel

WIDGET = "application/vnd.jupyter.widget-view+json"

LOAD = """
import sys, time
began = time.perf_counter()
%load_ext nbddp
load_s = time.perf_counter() - began
"""


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)


@pytest.fixture
def before(nb):
    nb.run("net = make_net()\nbefore = weights(net)\nglobals().pop('run', None)", check=True)


def test_loading_is_quick_and_silent_and_warms_a_supervisor(notebook):
    nb = notebook()
    cell = nb.run(LOAD, check=True)
    assert cell.outputs == []
    assert nb.eval("load_s") < 0.3
    assert nb.eval("sorted({'torch', 'matplotlib', 'ipywidgets', 'pydantic'} & set(sys.modules))") == []
    nb.run("from nbddp.launch.local import standby\nfrom pathlib import Path\nwaiting = standby.template", check=True)
    # It comes to map torch, and the kernel does not.
    nb.run("def maps(pid):\n    return 'libtorch_cpu' in Path(f'/proc/{pid}/maps').read_text()", check=True)
    nb.until(lambda: nb.eval("maps(waiting.process.pid)"), timeout=30)
    assert nb.eval("waiting.alive() and waiting is standby.template and not maps('self')") is True


@pytest.mark.usefixtures("before")
def test_a_cell_trains_a_model_and_data_that_exist_only_in_the_notebook(nb):
    accuracy = nb.eval("accuracy(net)")
    cell = nb.run("%%ddp_train net samples --val held_out -n 2 --epochs 5 --batch-size 64 --lr 1e-2\nloss = nn.CrossEntropyLoss()", check=True)
    assert nb.eval("accuracy(net)") > max(0.7, accuracy + 0.2)
    assert cell.stderr == ""
    plan, *_, last = cell.text.splitlines()
    assert re.fullmatch(r"2 x CPU ranks · 64 = 2 x 32 · 8 steps/epoch · lr 0\.01 · fp32 \(auto\) · data 2\d KiB, staged", plan)
    assert re.fullmatch(r"net: epoch 5 \(val_loss 0\.\d+\)", last)

    (display,) = [output for output in cell.outputs if output["output_type"] == "display_data"]
    assert set(display["data"]) == {"text/html", "image/png", "text/plain"}
    assert last in display["data"]["text/html"]
    assert "finished" in display["data"]["text/plain"]
    assert nb.widgets == {}

    assert nb.eval("run is nbddp.last_run and isinstance(run, nbddp.Run)") is True
    assert nb.eval("(run.state, run.error, run.history['step'].tolist() == list(range(1, 41)))") == ("finished", None, True)
    assert nb.eval("[[round(float(v), 3) for v in run.epochs['val_loss']][-1]]") == [pytest.approx(float(last.split()[-1].rstrip(")")), abs=2e-3)]
    times = nb.eval("[run.timeline[name] for name in ('requested', 'bundled', 'launched', 'first_step', 'finished')]")
    assert times == sorted(times)
    assert nb.eval("run.duration_s") == pytest.approx(times[-1] - times[0])
    assert nb.eval("same(net.state_dict(), nbddp.load_checkpoint(run)) and net.training") is True


@pytest.mark.usefixtures("before")
def test_running_the_cell_again_goes_on_and_says_so(nb):
    source = "%%ddp_train net samples -n 2 --epochs 2 --batch-size 64 --lr 1e-2\nloss = nn.CrossEntropyLoss()"
    first = nb.run(source, check=True)
    loss = nb.eval("float(run.epochs['loss'][-1])")
    first_id = nb.eval("run.id")[-4:]
    assert "starts from" not in first.text
    again = nb.run(source, check=True)
    assert re.search(rf"net starts from run {first_id}, epoch 2 · data 2\d KiB, staged before\n", again.text)
    assert nb.eval("float(run.epochs['loss'][0])") < loss


@pytest.mark.usefixtures("before")
def test_the_view_while_it_trains(nb):
    body = "def training_step(model, batch):\n    print('a line of rank', rank())\n    time.sleep(0.01)\n    return step(model, batch)"
    cell = start(nb, f"net samples {ENDLESS}", body)

    def shown():
        return "".join(str(state.get("value")) for state in nb.widgets.values() if state.get("_model_name") == "HTMLModel")

    parts = ["running", "2 x CPU ranks", "step", "loss", "data", "forward", "backward", "sync", "optimizer", "time of a step", "samples/s", "a line of rank 0"]
    nb.until(lambda: all(part in shown() for part in parts))
    assert "a line of rank 1" not in shown()
    nb.until(lambda: "<img alt=\"loss over steps" in shown())
    assert [WIDGET in output["data"] for output in cell.outputs if output["output_type"] == "display_data"] == [True]
    nb.interrupt()
    nb.wait()
    assert cell.error is None
    assert nb.widgets == {}
    assert nb.eval("'a line of rank 1' in run.log(1) and 'a line of rank 0' in run.log()") is True


@pytest.mark.usefixtures("before")
def test_the_same_from_python(nb):
    cell = nb.run("fitted = nbddp.train(net, samples, held_out, loss=nn.CrossEntropyLoss(), nproc=2, epochs=3, batch_size=64, lr=1e-2)", check=True)
    assert cell.text.splitlines()[0].startswith("2 x CPU ranks · 64 = 2 x 32 · 8 steps/epoch")
    assert cell.text.splitlines()[-1].startswith("net: epoch 3 (val_loss ")
    (card,) = [output for output in cell.outputs if output["output_type"] == "display_data"]
    assert set(card["data"]) == {"text/html", "image/png", "text/plain"}
    assert nb.eval("fitted is nbddp.last_run and fitted.state == 'finished' and 'run' not in globals()") is True
    assert nb.eval("fitted.spec['cell']['source'].startswith('fitted = nbddp.train(')") is True
    assert nb.eval("(fitted.spec['model_name'], fitted.spec['data_name'], fitted.spec['val_name'])") == ("net", "samples", "held_out")
    (nb.folder / "options.yaml").write_text("epochs: 1\nbatch_size: 128\n")
    nb.run("fitted = nbddp.train(net, samples, loss=nn.CrossEntropyLoss(), config='options.yaml', nproc=2, batch_size=64)", check=True)
    assert nb.eval("(fitted.config.epochs, fitted.config.batch_size, fitted.config.nproc)") == (1, 64, 2)
    error = nb.run("nbddp.train(net, samples, nproc=2)").error
    assert error.traceback.startswith("ConfigError: neither loss nor training_step is given")


@pytest.mark.usefixtures("before")
def test_a_dataloader_in_place_of_the_dataset(nb):
    nb.run("loader = DataLoader(samples, batch_size=128, shuffle=True, num_workers=2)\nval_loader = DataLoader(held_out, batch_size=32)", check=True)
    cell = nb.run("%%ddp_train net loader --val val_loader -n 2\ntraining_step = step", check=True)
    assert cell.text.splitlines()[0].startswith("2 x CPU ranks · 128 = 2 x 64 · 4 steps/epoch")
    assert "loader: taken from the DataLoader: dataset, batch_size 128, shuffle True, drop_last False, num_workers 2" in cell.text
    assert "val_loader: taken from the DataLoader: dataset, val_batch_size 32" in cell.text


@pytest.mark.usefixtures("before")
def test_a_name_that_is_taken_stays_and_the_run_is_found_all_the_same(nb):
    nb.run("run = 5", check=True)
    cell = nb.run("%%ddp_train net samples -n 1 --batch-size 64 --max-steps 2\ntraining_step = step", check=True)
    assert "run is a variable of yours (int) and stays" in cell.text
    assert nb.eval("(run, nbddp.last_run.state)") == (5, "finished")
    nb.run("del run", check=True)


def test_a_saved_notebook_keeps_the_card_and_no_widget(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    sources = [
        "%load_ext nbddp\nimport torch\nfrom torch import nn\nX = torch.randn(128, 4)",
        "samples = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))\nnet = nn.Linear(4, 1)",
        "%%ddp_train net samples -n 2 --epochs 3 --batch-size 32\nloss = nn.MSELoss()",
        "assert run.state == 'finished'",
        "%%ddp_train net samples -n 2 --epochs 3 --batch-size 33\nloss = nn.MSELoss()",
    ]
    book = new_notebook(cells=[new_code_cell(source) for source in sources])
    client = NotebookClient(book, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}, allow_errors=True)
    client.execute()
    nbformat.write(book, tmp_path / "executed.ipynb")
    saved = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    nbformat.validate(saved)
    assert [output["output_type"] for output in saved.cells[2].outputs].count("display_data") == 1
    card = next(output for output in saved.cells[2].outputs if output["output_type"] == "display_data")
    assert set(card["data"]) == {"text/html", "image/png", "text/plain"}
    assert "net: epoch 3" in card["data"]["text/plain"]
    assert saved.cells[3].outputs == []
    # A cell whose line is wrong counts as failed, as Run All and papermill want it.
    assert [output["ename"] for output in saved.cells[4].outputs] == ["ConfigError"]
    text = json.dumps(saved)
    assert WIDGET not in text
    assert "Loading widget" not in text


SCRIPT = """
import sys
import torch
from torch import nn
import nbddp

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.full((1,), i / 64)
        return x, x ** 2

def loss(output, target):
    return ((output - target) ** 2).mean()

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
before = net[0].weight.detach().clone()
run = nbddp.train(net, Squares(), loss=loss, nproc=2, epochs=2, batch_size=16)
print(run.state, run.history["step"].size, bool((net[0].weight != before).any()), "IPython" in sys.modules)
"""


def test_a_plain_script_without_a_main_guard(tmp_path):
    (tmp_path / "fit.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "fit.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "finished 8 True False"
    assert sum("2 x CPU ranks · 16 = 2 x 8 · 4 steps/epoch" in line for line in (done.stdout + done.stderr).splitlines()) <= 2
    assert "net: epoch 2" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_failure_in_a_script_is_an_exception_with_the_scripts_line(tmp_path):
    (tmp_path / "fit.py").write_text(SCRIPT.replace("return ((output", "return 1 / 0 + ((output"))
    done = subprocess.run([sys.executable, "fit.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    line = SCRIPT.splitlines().index("    return ((output - target) ** 2).mean()") + 1
    said = done.stderr.rstrip().splitlines()
    (message,) = [index for index, text in enumerate(said) if text.endswith(f"raised ZeroDivisionError: division by zero ({tmp_path}/fit.py, line {line})")]
    assert any("return 1 / 0 + ((output" in text for text in said[message:]), "the rank's own traceback follows"


def test_ipython_in_a_terminal_trains_and_stops(tmp_path):
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "TERM": "dumb"}
    words = ["-m", "IPython", "--simple-prompt", "--colors=nocolor", "--no-banner"]
    shell = pexpect.spawn(sys.executable, words, cwd=str(tmp_path), env=env, timeout=60, encoding="utf-8")
    try:
        for number, line in enumerate(
            [
                "%load_ext nbddp",
                "import torch; from torch import nn; from torch.nn import functional as F",
                "net, X = nn.Linear(4, 1), torch.randn(64, 4); samples = torch.utils.data.TensorDataset(X, X[:, :1])",
            ],
            start=1,
        ):
            shell.expect_exact(f"In [{number}]: ")
            shell.sendline(line)
        shell.expect_exact("In [4]: ")
        shell.sendline("%ddp_train net samples -n 2 --batch-size 16 --epochs 2 --loss F.mse_loss")
        shell.expect(r"(?s)finished.*net: epoch 2.*In \[5\]: ")
        assert "Traceback" not in shell.before
        shell.sendline("%ddp_train net samples -n 2 --batch-size 16 --max-time 100 --loss F.mse_loss")
        shell.expect("running.*step")
        shell.sendintr()
        shell.expect("stopping in order")
        shell.expect_exact("In [6]: ")
        assert "Traceback" not in shell.before
        assert "KeyboardInterrupt" not in shell.before
        shell.sendline("print(run.state, '=', 6 * 7)")
        shell.expect_exact("stopped = 42")
        shell.expect_exact("In [7]: ")
        shell.sendline("exit")
        shell.expect(pexpect.EOF)
    finally:
        shell.close(force=True)
    assert shell.exitstatus == 0
    assert Path(tmp_path, "nbddp_runs").is_dir()


def test_a_precision_of_products_that_the_notebook_set_is_in_effect_and_said(nb):
    nb.run("torch.set_float32_matmul_precision('high')", check=True)
    try:
        assert "· matmul high (the notebook's)" in nb.run("%ddp_plan net samples -n 2 --batch-size 64").text
        assert "(the notebook's)" not in nb.run("%ddp_plan net samples -n 2 --batch-size 64 --matmul-precision medium").text
    finally:
        nb.run("torch.set_float32_matmul_precision('highest')", check=True)
    assert "matmul" not in nb.run("%ddp_plan net samples -n 2 --batch-size 64").text
