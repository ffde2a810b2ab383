"""The body of a cell: what it sees, what it leaves, where its code says that it stands, which hooks it gives."""

from __future__ import annotations

import inspect
import traceback

import pytest

from nbddp.errors import ConfigError
from nbddp.kernel.request import HOOKS
from support import shell as shells


@pytest.fixture
def shell(tmp_path):
    with shells.running(tmp_path) as shell:
        shell.run("net, train_set, lr0 = object(), [1, 2], 0.5\ndef loss(output, target): return 0")
        yield shell


def refused(shell, source, kind="ConfigError"):
    """What the cell shows in place of a traceback: one line, without the name of the error."""
    shell.run(source, check=False)
    assert type(shell.error).__name__ == kind, shell.output
    lines = shell.output.strip().splitlines()
    assert len(lines) == 1, shell.output
    return lines[0].removeprefix(f"{kind}: ")


def line_of(function):
    """Line that a function fails in, by its traceback."""
    try:
        function()
    except ZeroDivisionError as error:
        return traceback.extract_tb(error.__traceback__)[-1].lineno
    raise AssertionError(function)


# -- names


def test_helpers_see_each_other_and_the_notebook(shell):
    request = shell.run("%%ddp_train net train_set\ndef twice(x):\n    return 2 * x * lr0\ndef training_step(model, batch):\n    return twice(batch)")
    assert request.hooks["training_step"](None, 3) == 3.0
    assert list(request.hooks) == ["training_step"]


def test_nothing_leaks_out(shell):
    before = dict(shell.ip.user_ns)
    shell.run("%%ddp_train net train_set\nimport json as j\nx: int = 3\nlr0 = 7\nloss = loss\n_ = 5\ndel net\n42")
    after = dict(shell.ip.user_ns)
    assert {name for name in after if name not in before} <= {"run", "_i2", "_i", "_ii", "_iii"}
    assert all(after[name] is before[name] for name in ("net", "lr0", "loss", "_"))
    assert "__annotations__" not in after


def test_annotations_of_the_notebook_stay_as_they_are(shell):
    shell.run("y: int = 1")
    shell.run("%%ddp_train net train_set\nz: int = 1\nloss = loss")
    assert list(shell.ip.user_ns["__annotations__"]) == ["y"]


def test_magics_and_shell_commands_work_in_the_body(shell):
    request = shell.run("%%ddp_train net train_set\nfactor = 3\nlines = !echo {factor} {lr0}\n%precision 3\nloss = lines[0]")
    assert request.hooks["loss"] == "3 0.5"


def test_future_statements_of_earlier_cells_hold(shell):
    shell.run("from __future__ import annotations")
    request = shell.run("%%ddp_train net train_set\ndef loss(output: Undefined, target): pass")
    assert request.hooks["loss"].__annotations__ == {"output": "Undefined"}
    assert shell.run("%%ddp_train net train_set\nfrom __future__ import annotations\nloss = loss").hooks


# -- hooks


def test_only_what_the_body_binds_is_a_hook(shell):
    shell.run("optimizer = scheduler = len")
    request = shell.run("%%ddp_train net train_set\nloss = loss\nif False:\n    optimizer = 1\nfrom os.path import join as collate_fn\nscheduler = None")
    assert set(request.hooks) == {"loss", "collate_fn"}
    assert request.hooks["loss"] is shell.ip.user_ns["loss"]


def test_a_hook_that_is_deleted_again_is_none(shell):
    assert "neither loss nor training_step" in refused(shell, "%%ddp_train net train_set\nloss = loss\ndel loss")


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_reaches_the_request(shell, name):
    given = "" if name in ("loss", "training_step") else "loss = loss\n"
    request = shell.run(f"%%ddp_train net train_set\n{given}{name} = [lr0]")
    assert request.hooks[name] == [0.5]
    assert set(request.hooks) == {name, "loss"} if given else {name}


def test_a_loss_of_the_notebook_is_hinted_at(shell):
    assert "write `loss = loss` in the cell, or --loss loss" in refused(shell, "%%ddp_train net train_set\nx = 1")
    assert "write --loss loss." in refused(shell, "%ddp_train net train_set")
    shell.run("criterion = loss\ndel loss")
    assert "write `loss = criterion` in the cell, or --loss criterion" in refused(shell, "%%ddp_train net train_set\nx = 1")


def test_without_any_loss_an_example_is_given(shell):
    shell.run("del loss")
    assert "Write for instance `loss = nn.CrossEntropyLoss()` in the cell" in refused(shell, "%%ddp_train net train_set\nx = 1")
    assert '--loss "nn.CrossEntropyLoss()"' in refused(shell, "%ddp_train net train_set")
    assert "Is criterion the loss? Then call it loss." in refused(shell, "%%ddp_train net train_set\ncriterion = len")
    assert "Is training_stp the training_step?" in refused(shell, "%%ddp_train net train_set\ndef training_stp(): pass")


def test_the_loss_is_given_once(shell):
    assert refused(shell, "%%ddp_train net train_set --loss loss\nloss = loss") == "--loss and the cell's loss: keep one of the two"


def test_names_that_look_like_hooks_are_mentioned(shell):
    shell.run("%%ddp_train net train_set\nloss = loss\ndef validation_stpe(): pass\ndef helper(): pass\nlosses = []\n_losss = len")
    assert shell.output == "validation_stpe in the cell has no meaning for the run; if the validation_step is meant, call it validation_step\n"
    shell.run("%%ddp_train net train_set\nloss_fn = len\ndef training_step(): pass")
    assert shell.output == ""


# -- where code stands

CELLS = {
    "plain": "%%ddp_train net train_set\ndef loss():\n    1 / 0",
    "blank lines above": "\n\n%%ddp_train net train_set\ndef loss():\n    1 / 0",
    "blank lines below the magic": "%%ddp_train net train_set\n\n  \n\ndef loss():\n    1 / 0",
    "blank lines at the end": "%%ddp_train net train_set\ndef loss():\n    1 / 0\n\n\n",
    "under time": "%%time\n%%ddp_train net train_set\ndef loss():\n    1 / 0",
    "under capture": "%%capture\n%%ddp_train net train_set\n\ndef loss():\n    1 / 0",
    "under both": "\n%%capture\n%%time\n%%ddp_train net train_set\ndef loss():\n    1 / 0",
    "Windows line ends": "%%ddp_train net train_set\r\n\r\ndef loss():\r\n    1 / 0\r\n",
    "indented": "  %%ddp_train net train_set\n  def loss():\n      1 / 0",
    "a form feed": "%%ddp_train net train_set\nx = '\x0c'\ndef loss():\n    1 / 0",
    "magics before": "%%ddp_train net train_set\n%precision 3\nx = !true\ndef loss():\n    1 / 0",
}


@pytest.mark.parametrize("name", CELLS)
def test_lines_count_from_the_cells_first(shell, name):
    source = CELLS[name]
    request = shell.run(source)
    loss = request.hooks["loss"]
    lines = source.replace("\r\n", "\n").split("\n")
    expected = next(number for number, line in enumerate(lines, 1) if "1 / 0" in line)
    assert line_of(loss) == expected
    assert request.cell.number == 2
    assert request.cell.source == source.replace("\r\n", "\n")
    assert request.cell.filename == loss.__code__.co_filename
    assert shell.ip.compile._filename_map[loss.__code__.co_filename] == 2
    assert inspect.getsource(loss).strip().endswith("1 / 0")


def test_cells_are_known_by_the_file_names_of_their_code(shell):
    request = shell.run("%%ddp_train net train_set\nloss = loss")
    name = shell.ip.user_ns["loss"].__code__.co_filename
    assert (request.cells[name].cell, request.cells[name].source.splitlines()[1]) == (1, "def loss(output, target): return 0")
    assert request.cells[request.cell.filename].source == "%%ddp_train net train_set\nloss = loss\n"
    assert set(request.cells) == {name, request.cell.filename}
    assert len(request.cells) == 2
    assert "elsewhere" not in request.cells


def test_a_magic_called_by_a_program_has_a_cell_of_its_own(shell):
    request = shell.run("get_ipython().run_cell_magic('ddp_train', 'net train_set', 'def loss():\\n    1 / 0\\n')")
    assert request.cell.source == "%%ddp_train net train_set\ndef loss():\n    1 / 0\n"
    assert request.cell.number == 2
    assert line_of(request.hooks["loss"]) == 3


def test_lambdas_of_the_line_stand_there_too(shell):
    request = shell.run("\n%%time\n%%ddp_train net train_set --loss 'lambda: 1 / 0'\nx = 1")
    assert line_of(request.hooks["loss"]) == 3
    assert request.hooks["loss"].__code__.co_filename == request.cell.filename


def test_lines_that_ipython_joins_are_shown_as_it_runs_them(shell):
    request = shell.run("%%ddp_train net train_set\n%precision \\\n  3\ndef loss():\n    1 / 0")
    assert inspect.getsource(request.hooks["loss"]).strip().endswith("1 / 0")


# -- errors of the body


def test_an_exception_shows_cell_and_line(shell):
    shell.run("%%ddp_train net train_set\nx = 1\ny = x / 0", check=False)
    assert isinstance(shell.error, ZeroDivisionError)
    assert "Cell In[2], line 3" in shell.output
    assert "----> 3 y = x / 0" in shell.output
    assert "kernel/body.py" not in shell.output
    assert shell.requests == []


@pytest.mark.parametrize(
    "source, kind, line, text",
    [
        ("%%ddp_train net train_set\nx = 1\ny = = 2", "SyntaxError", 3, "y = = 2"),
        ("%%time\n%%ddp_train net train_set\n\nfor x in y\n    pass", "SyntaxError", 4, "for x in y"),
        ("%%ddp_train net train_set\nif x:\ny = 1", "IndentationError", 3, "y = 1"),
        ("%%ddp_train net train_set\nreturn 3", "SyntaxError", 2, "return 3"),
    ],
)
def test_a_syntax_error_is_the_cells_own(shell, source, kind, line, text):
    shell.run(source, check=False)
    assert type(shell.error).__name__ == kind
    assert f"Cell In[2], line {line}\n" in shell.output
    assert text in shell.output
    assert "nbddp" not in shell.output
    assert "interactiveshell" not in shell.output
    assert shell.requests == []


def test_a_cell_magic_in_the_body_is_refused(shell):
    assert refused(shell, "%%ddp_train net train_set\n\n%%time\nloss = loss") == "%%time inside the cell of a magic: put it on a line above the magic"


# -- the request and its name


def test_everything_written_is_in_the_request(shell):
    request = shell.run("%%ddp_train net train_set --val train_set[:1] --lr {lr0} -n 2 --note 'a b' --background --num-epochs 3\nloss = loss")
    assert (request.model.name, request.model.value) == ("net", shell.ip.user_ns["net"])
    assert (request.data.name, request.data.value, request.val.name, request.val.value) == ("train_set", [1, 2], "train_set[:1]", [1])
    assert request.options == {"lr": 0.5, "nproc": 2, "epochs": 3}
    assert (request.note, request.background) == ("a b", True)
    assert request.main is shell.ip.user_module
    assert shell.output == "--num-epochs is --epochs here\n"
    shell.run("%%ddp_train net train_set --num-epochs 3\nloss = loss")
    assert shell.output == ""


def test_a_function_may_hold_the_line_magic(shell):
    request = shell.run("def f(data, k):\n    %ddp_train net data --loss loss --lr {k}\nf([3], 0.25)")
    assert (request.data.value, request.options) == ([3], {"lr": 0.25})


def test_requested_is_when_the_cell_began(shell):
    shell.run("import time")
    request = shell.run("began = time.time()\nwhile time.time() < began + 0.2: pass\n%ddp_train net train_set --loss loss")
    assert abs(request.requested - shell.ip.user_ns["began"]) < 0.1


def test_a_settings_file_gives_way_to_the_line(shell, tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 0.5\nepochs: 3\n", encoding="utf-8")
    request = shell.run(f"%ddp_train net train_set --loss loss --config {tmp_path}/a.yaml --epochs 5")
    assert request.options == {"lr": 0.5, "epochs": 5}


def test_wrong_values_are_refused_before_the_body_runs(shell):
    said = refused(shell, "%%ddp_train net train_set --lr lr0\n1 / 0")
    assert said == "lr='lr0' must be a valid number, unable to parse string as a number; lr0 is a variable of the notebook: write {lr0} for its value"
    assert refused(shell, "%%ddp_train nett train_set\n1 / 0") == "nett is not defined in the notebook. Did you mean net?"


def test_plans_need_no_loss_and_start_nothing(shell):
    shell.run("%ddp_plan net train_set -n 2")
    shell.run("%%ddp_plan net train_set\ndef optimizer(model): pass")
    shell.run("%ddp_train net train_set --dry-run")
    assert [request.options for request in shell.plans] == [{"nproc": 2}, {}, {}]
    assert list(shell.plans[1].hooks) == ["optimizer"]
    assert shell.requests == []
    assert "run" not in shell.ip.user_ns


def test_the_run_gets_its_name(shell):
    shell.run("%ddp_train net train_set --loss loss")
    shell.run("%ddp_train net train_set --loss loss --as first")
    first, default = shell.ip.user_ns["first"], shell.ip.user_ns["run"]
    assert isinstance(first, shells.StandInRun)
    assert isinstance(default, shells.StandInRun)
    shell.run("%ddp_train net train_set --loss loss")
    assert shell.ip.user_ns["run"] is not default
    assert shell.output == ""


def test_a_variable_that_is_no_run_stays(shell):
    shell.run("run = 5\n%ddp_train net train_set --loss loss")
    assert shell.ip.user_ns["run"] == 5
    assert shell.output == "run is a variable of yours (int) and stays; --as NAME names the run, nbddp.last_run is it\n"


def test_help_is_printed(shell):
    shell.run("%ddp_train -h")
    assert "%%ddp_train MODEL DATA [options]" in shell.output
    assert "-n, --nproc N" in shell.output
    assert max(map(len, shell.output.splitlines())) <= 120
    assert shell.requests == []


def test_config_errors_are_value_errors(shell):
    shell.run("%ddp_train", check=False)
    assert isinstance(shell.error, ConfigError)
    assert isinstance(shell.error, ValueError)
