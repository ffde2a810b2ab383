"""The magics in a real kernel, up to the point where training starts: loading, errors, completion, help."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.kernel

# Keeps what %%ddp_train asks for in `asked`, and starts nothing.
RECORD = """
from nbddp.kernel.cells import RunningCells as _RunningCells
from nbddp.kernel.magics import TrainMagics as _TrainMagics
asked = []
_cells = _RunningCells(get_ipython())
get_ipython().events.register("pre_run_cell", _cells.started)
get_ipython().events.register("post_run_cell", _cells.ended)
get_ipython().register_magics(_TrainMagics(get_ipython(), _cells, train=lambda request, bind: asked.append(request)))
net, train_set = "a net", [1, 2, 3]
"""

LOAD = """
import sys, time
began = time.perf_counter()
%load_ext nbddp
load_s = time.perf_counter() - began
"""


@pytest.fixture
def nb(notebook):
    nb = notebook(env={"NBDDP_WARM": "0"})
    assert nb.run("%load_ext nbddp", check=True).outputs == []
    nb.run(RECORD, check=True)
    return nb


def completions(nb, code):
    """What the kernel answers to Tab at the end of `code`: the matches, and the text that they replace."""
    reply = nb._client.complete(code, len(code), reply=True, timeout=30)["content"]
    assert reply["status"] == "ok"
    return reply["matches"], code[reply["cursor_start"] : reply["cursor_end"]]


def test_loading_is_quick_and_silent(notebook):
    nb = notebook()
    cell = nb.run(LOAD, check=True)
    assert cell.outputs == []
    assert nb.eval("load_s") < 0.3
    assert nb.eval("sorted({'torch', 'matplotlib'} & set(sys.modules))") == []


def test_it_may_be_loaded_again_and_unloaded(nb):
    cell = nb.run("%reload_ext nbddp\n%reload_ext nbddp\n%ddp_check", check=False)
    assert [output["output_type"] for output in cell.outputs] == ["error"]
    assert nb.eval("len([m for m in get_ipython().Completer.custom_matchers if m.matcher_identifier == 'nbddp'])") == 1
    assert nb.run("%unload_ext nbddp", check=True).outputs == []
    assert "not found" in nb.run("%ddp_check").stderr + nb.cells[-1].text
    assert nb.eval("get_ipython().Completer.custom_matchers") == []
    nb.run("%load_ext nbddp", check=True)
    assert nb.run("%ddp_check").error.ename == "ConfigError"


@pytest.mark.parametrize(
    "source, said",
    [
        ("%%ddp_train nett train_set\nloss = 1", "ConfigError: nett is not defined in the notebook. Did you mean net?"),
        ("%ddp_train net train_set --loss len --batchsize 3", "ConfigError: --batchsize is not an option of %ddp_train. Did you mean --batch-size"),
        ("%time %ddp_train net", "ConfigError: net is the model; the training data is missing"),
        ("%ddp_config", "ConfigError: model and training data are missing: %ddp_config MODEL DATA"),
        ("%ddp_config net train_set --dry-run", "ConfigError: --dry-run: a panel shows the plan"),
        ("%ddp_check net train_set", "ConfigError: %ddp_check is not available yet"),
        ("%ddp_export dir", "ConfigError: %ddp_export is not available yet"),
    ],
)
def test_a_wrong_line_is_one_line_and_an_error_of_the_cell(nb, source, said):
    error = nb.run(source).error
    assert error.ename == "ConfigError"
    assert error.traceback.startswith(said)
    assert "\n" not in error.traceback


def test_a_bundle_error_is_one_line_too(nb):
    nb.run("from nbddp.errors import BundleError", check=True)
    error = nb.run("%%ddp_train net train_set\nraise BundleError('train_set.file: a file')").error
    assert (error.ename, error.traceback) == ("BundleError", "BundleError: train_set.file: a file")


def test_code_of_the_body_stands_in_its_cell(nb):
    nb.run("%%time\n%%ddp_train net train_set\n\ndef loss(output, target):\n    return 1 / 0", check=True)
    error = nb.run("asked[-1].hooks['loss'](1, 2)").error
    assert re.search(r"Cell In\[3\], line 5", error.traceback)
    assert "----> 5     return 1 / 0" in error.traceback
    assert nb.eval("asked[-1].cell.number") == 3
    assert nb.eval("asked[-1].cell.filename == asked[-1].hooks['loss'].__code__.co_filename") is True
    assert nb.eval("asked[-1].cells[asked[-1].cell.filename].source.splitlines()[4]") == "    return 1 / 0"
    assert nb.run("import inspect\nprint(inspect.getsource(asked[-1].hooks['loss']))").text.strip().endswith("return 1 / 0")


def test_errors_of_the_body_are_the_cells_own(nb):
    error = nb.run("%%ddp_train net train_set\nx = 1\ny = x / 0").error
    assert error.ename == "ZeroDivisionError"
    assert "Cell In[3], line 3" in error.traceback
    error = nb.run("%%ddp_train net train_set\nx = 1\ny = = 2").error
    assert error.ename == "SyntaxError"
    assert "Cell In[4], line 3" in error.traceback
    assert "nbddp" not in error.traceback
    assert nb.eval("len(asked)") == 0


def test_an_empty_body_is_refused_with_the_line_magics_name(nb):
    cell = nb.run("%%ddp_train net train_set")
    assert "%ddp_train" in cell.stderr + cell.text + str(cell.error)
    assert nb.eval("len(asked)") == 0


def test_nothing_leaks_out_of_the_body(nb):
    nb.run("before = dict(globals())", check=True)
    nb.run("%%ddp_train net train_set\nhelper = 1\nnet = 2\nloss = len\n42", check=True)
    assert nb.eval("'helper' in globals() or 'loss' in globals()") is False
    assert nb.eval("net") == "a net"


def test_cells_are_found_quickly_among_a_thousand(nb):
    nb.run("for i in range(1000):\n    get_ipython().run_cell(f'def f{i}(): pass', store_history=True, silent=False)", check=True)
    nb.run("%ddp_train net train_set --loss f500", check=True)
    nb.run(
        "import time, torch\ncells = asked[-1].cells\nbegan = time.perf_counter()\nfound = dict(cells)\nspent_s = time.perf_counter() - began",
        check=True,
    )
    assert nb.eval("found[f500.__code__.co_filename].source") == "def f500(): pass\n"
    assert nb.eval("len(found) >= 1000 and spent_s < 0.5") is True


@pytest.mark.parametrize(
    "code, expected, replaced",
    [
        ("%%ddp_train net train_set --optimi", ["--optimizer"], "--optimi"),
        ("%%ddp_train net train_set --batch_s", ["--batch-size"], "--batch_s"),
        ("%ddp_train net train_set --schedule co", ["constant", "cosine"], "co"),
        ("%ddp_train net train_set --schedule=co", ["constant", "cosine"], "co"),
        ("%time %ddp_plan net train_set --on-nan ", ["skip", "stop", "warn"], ""),
        ("%%time\n%%ddp_train net train_set --drop-last f", ["false"], "f"),
        ("%%ddp_train net train_set --zzz", ["--zzz"], "--zzz"),
        ("%%ddp_train net train_set --config s", ["settings.yaml"], "s"),
    ],
)
def test_tab_offers_options_and_values_alone(nb, code, expected, replaced):
    (nb.folder / "settings.yaml").touch()
    assert completions(nb, code) == (expected, replaced)


def test_tab_offers_models_and_datasets(nb):
    assert completions(nb, "%%ddp_train ne") == (["ne"], "ne")
    assert nb.eval("'torch' in __import__('sys').modules") is False
    nb.run("import torch\nnet = torch.nn.Linear(1, 1)\nnext_set = torch.utils.data.TensorDataset(torch.zeros(1))", check=True)
    assert completions(nb, "%%ddp_train ne") == (["net"], "ne")
    assert completions(nb, "%%ddp_train net ne") == (["next_set"], "ne")
    assert completions(nb, "%%ddp_train net next_set --val ") == (["next_set"], "")


def test_the_body_and_other_magics_have_ipythons_completion(nb):
    assert "train_set" in completions(nb, "%%ddp_train net train_set\ntrain_s")[0]
    assert "%%ddp_train" in completions(nb, "%%ddp_tr")[0]
    assert "train_set" in completions(nb, "copy = train_s")[0]


@pytest.mark.parametrize("question", ["%%ddp_train?", "%ddp_train?", "%ddp_plan?"])
def test_a_question_mark_shows_the_help(nb, question):
    reply = nb._client.execute(question, reply=True, timeout=30)["content"]
    page = reply["payload"][0]["data"]["text/plain"]
    assert "%%ddp_train MODEL DATA [options]" in page
    assert "--batch-size N" in page


def test_the_line_stands_for_the_help_as_well(nb):
    text = nb.run("%ddp_train --help", check=True).text
    assert "names that the cell may define" in text
    assert "--val EXPR" in text


def test_terminal_ipython_shows_one_line_and_the_cells_own(tmp_path):
    """Under a terminal, where IPython reads, names and shows cells by other code than a kernel's."""
    script = "\n".join(
        [
            "%load_ext nbddp",
            "%ddp_train nett data",
            "%ddp_plan -h",
            "get_ipython().run_cell('%%ddp_train 1 2\\nx = 1\\ny = x / 0', store_history=True);",
            "exit",
            "",
        ]
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "NBDDP_WARM": "0", "TERM": "dumb"}
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "IPython", "--colors=nocolor", "--simple-prompt", "--no-banner"],
        stdin=subprocess.PIPE,
        stdout=follower,
        stderr=follower,
        env=environment,
        cwd=tmp_path,
    )
    os.close(follower)
    process.stdin.write(script.encode())
    process.stdin.close()
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # the terminal's end, on Linux
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    assert process.wait(30) == 0
    text = shown.decode().replace("\r\n", "\n")
    assert "ConfigError: nett is not defined in the notebook." in text
    assert "--batch-size N" in text
    assert "Traceback" in text.partition("--batch-size N")[2]
    assert "Traceback" not in text.partition("--batch-size N")[0]
    assert "line 3" in text
