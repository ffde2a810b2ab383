"""What stands in the line and the body of the cell: defaults, sizes, names, and Python that is not the usual function or two."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.kernel

LOSS = "loss = nn.MSELoss()"


def refused(nb, source):
    """Run a cell that must be refused before anything is started; return the one line that it shows."""
    files, standby, last = nb.eval("run_files()"), nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")
    cell = nb.run(source)
    assert cell.error is not None, cell.text
    assert cell.error.ename == "ConfigError"
    assert nb.eval("run_files()") == files
    assert (nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")) == (standby, last)
    assert cell.text == ""
    assert "\n" not in cell.error.traceback
    return cell.error.traceback


def test_the_default_batch_size_is_said_in_the_plan_line(nb):
    nb.run("thousand = TensorDataset(torch.randn(1000, 4), torch.randn(1000, 2))\nnet = nn.Linear(4, 2)", check=True)
    plan = "2 x CPU ranks · 64 = 2 x 32 (default) · 15 steps/epoch, 40 samples dropped · lr 0.001 · fp32 (auto)"
    assert nb.run("%ddp_plan net thousand -n 2", check=True).text == plan + "\n"
    cell = nb.run(f"%%ddp_train net thousand -n 2\n{LOSS}", check=True)
    assert re.fullmatch(re.escape(plan) + r" · data 2\d KiB, staged", cell.text.splitlines()[0]), cell.text
    assert nb.eval("run.history['samples'].tolist()") == [64] * 15
    again = nb.run(f"%%ddp_train net thousand -n 2\n{LOSS}", check=True)
    assert re.fullmatch(re.escape(plan) + r" · net starts from run \w{4}, epoch 1 · data 2\d KiB, staged before", again.text.splitlines()[0]), again.text


def test_a_batch_that_does_not_divide_names_the_nearest_that_do(nb):
    nb.run("net, thousand = nn.Linear(4, 2), TensorDataset(torch.randn(1000, 4), torch.randn(1000, 2))", check=True)
    line = refused(nb, f"%%ddp_train net thousand -n 3 --batch-size 100\n{LOSS}")
    assert line == "ConfigError: batch_size=100 is the global batch and must divide by 3 ranks: use 99 or 102"
    for valid in (99, 102):
        assert f"{valid} = 3 x {valid // 3} · " in nb.run(f"%ddp_plan net thousand -n 3 --batch-size {valid}", check=True).text


def test_more_ranks_than_cores_is_a_warning(nb):
    nb.run("net, many = nn.Linear(4, 2), TensorDataset(torch.randn(10_000, 4), torch.randn(10_000, 2))\nall_cores = os.sched_getaffinity(0)", check=True)
    nb.run("os.sched_setaffinity(0, set(list(all_cores)[:2]))", check=True)
    cores = nb.eval("len(os.sched_getaffinity(0))")
    lines = nb.run("%ddp_plan net many -n 64", check=True).text.splitlines()
    nb.run("os.sched_setaffinity(0, all_cores)", check=True)
    assert lines[0].startswith("64 x CPU ranks · 2048 = 64 x 32 (default) · 4 steps/epoch, 1808 samples dropped")
    assert f"note: 64 ranks on {cores} cores: they take turns; -n {cores} is as fast" in lines


def test_devices_that_are_not_there_are_an_error(nb):
    nb.run("os.environ['CUDA_VISIBLE_DEVICES'] = ''\nnet = nn.Linear(4, 2)", check=True)
    try:
        line = refused(nb, f"%%ddp_train net train_set --devices 0,1\n{LOSS}")
    finally:
        nb.run("del os.environ['CUDA_VISIBLE_DEVICES']", check=True)
    assert line == "ConfigError: devices=0,1: this machine has no visible GPU; use --devices cpu for ranks on the CPU"


def test_a_variable_named_run_is_kept(nb):
    nb.run("run = 5\nnet = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))", check=True)
    cell = nb.run(f"%%ddp_train net train_set {{BY_HAND}}\n{LOSS}", check=True)
    assert nb.eval("run") == 5
    assert "run is a variable of yours (int) and stays; --as NAME names the run, nbddp.last_run is it" in cell.text.splitlines()
    assert nb.eval("(nbddp.last_run.state, len(nbddp.last_run.history['loss']))") == ("finished", 4)
    assert nb.eval("apart(net, expected)") < 1e-6
    nb.run(f"%%ddp_train net train_set {{BY_HAND}} --as second\n{LOSS}", check=True)
    assert nb.eval("(run, second.state, second is nbddp.last_run)") == (5, "finished", True)
    nb.run("del run\n", check=True)
    nb.run(f"%%ddp_train net train_set {{BY_HAND}}\n{LOSS}", check=True)
    assert nb.eval("run is nbddp.last_run") is True


def test_a_syntax_error_is_the_cells_own(nb):
    files = nb.eval("run_files()")
    error = nb.run("%%ddp_train net train_set -n 2\nloss = nn.MSELoss()\n\ndef training_step(model, batch)\n    return 0").error
    assert error.ename == "SyntaxError"
    assert re.search(rf"Cell In\[{nb.cells[-1].execution_count}\], line 4\n", error.traceback)
    assert "def training_step(model, batch)\n" in error.traceback
    assert "nbddp" not in error.traceback
    assert nb.eval("run_files()") == files


def test_line_magics_and_shell_commands_in_the_body(nb):
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))", check=True)
    cell = nb.run(
        """%%ddp_train net train_set {BY_HAND}
%env FROM_THE_BODY=set
value = !echo from a shell
%time factor = 2
def training_step(model, batch):
    assert value == ["from a shell"] and factor == 2 and os.environ["FROM_THE_BODY"] == "set"
    return mse(model, batch)
""",
        check=True,
    )
    assert "env: FROM_THE_BODY=set" in cell.text
    assert nb.eval("apart(net, expected)") < 1e-6


def test_a_failing_step_below_a_line_magic_is_found_on_its_line(nb):
    nb.run("net = nn.Linear(4, 2)", check=True)
    error = nb.run(
        """

%%ddp_train net train_set {BY_HAND}

%env FROM_THE_BODY=again
def training_step(model, batch):
    return mse(model, batch) + torch.zeros(3) @ torch.zeros(4)
"""
    ).error
    count = nb.cells[-1].execution_count
    assert error.ename == "WorkerError"
    source = nb.cells[-1].source.lstrip("\n").splitlines()
    line = nb.eval("run.error.line")
    assert nb.eval("run.error.cell") == count
    assert "torch.zeros(3)" in nb.cells[-1].source.splitlines()[line - 1], (line, source)
    assert f"Cell In[{count}], line {line}" in error.traceback


def test_under_time(nb):
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))", check=True)
    cell = nb.run(f"%%time\n%%ddp_train net train_set {{BY_HAND}}\n{LOSS}", check=True)
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("run.state") == "finished"
    assert "Wall time: " in cell.text
    error = nb.run("%%time\n%%ddp_train net train_set {BY_HAND}\ndef training_step(model, batch):\n    return 1 / 0").error
    assert error.ename == "WorkerError"
    assert nb.eval("(run.error.cell, run.error.line, run.error.type_name)") == (nb.cells[-1].execution_count, 4, "ZeroDivisionError")


def test_an_empty_body_and_the_line_magic(nb):
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))\nfiles = run_files()", check=True)
    cell = nb.run("%%ddp_train net train_set {BY_HAND}")
    assert "%ddp_train" in cell.stderr + cell.text + (cell.error.traceback if cell.error else "")
    assert nb.eval("run_files() == files") is True
    nb.run("%ddp_train net train_set {BY_HAND} --loss nn.MSELoss()", check=True)
    assert nb.eval("apart(net, expected)") < 1e-6
    assert refused(nb, "%ddp_train net train_set {BY_HAND}").startswith("ConfigError: neither loss nor training_step is given: nothing says what to minimise. ")


def test_a_body_that_holds_a_comment_alone(nb):
    line = refused(nb, "%%ddp_train net train_set {BY_HAND}\n# nothing yet")
    assert line.startswith("ConfigError: neither loss nor training_step is given: nothing says what to minimise. ")
    assert "loss = nn.CrossEntropyLoss()" in line


def test_a_loss_of_the_notebook_is_hinted_at_and_not_taken(nb):
    nb.run("net, loss = nn.Linear(4, 2), nn.MSELoss()\nexpected = fit(net, mse, in_order(X, Y))", check=True)
    line = refused(nb, "%%ddp_train net train_set {BY_HAND}\nhelper = 1")
    assert "The notebook has loss, which is not taken by itself: write `loss = loss` in the cell, or --loss loss." in line
    nb.run("%%ddp_train net train_set {BY_HAND} --epochs 1\nloss = loss", check=True)
    assert nb.eval("apart(net, expected)") < 1e-6
    nb.run("expected = fit(net, mse, in_order(X, Y))", check=True)
    nb.run("%ddp_train net train_set {BY_HAND} --loss loss", check=True)
    assert nb.eval("apart(net, expected)") < 1e-6
    nb.run("del loss", check=True)


def test_nothing_of_the_body_leaks_and_names_of_the_notebook_stay(nb):
    nb.run("net, factor = nn.Linear(4, 2), 1", check=True)
    nb.run(f"%%ddp_train net train_set {{BY_HAND}}\nfactor, helper = 2, 3\n{LOSS}", check=True)
    assert nb.eval("(factor, 'helper' in globals(), 'loss' in globals())") == (1, False, False)
