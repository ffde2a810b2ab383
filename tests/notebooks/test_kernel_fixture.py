"""The kernel that notebook tests run in behaves as a front end expects, and notices what it leaves behind."""

from __future__ import annotations

import subprocess

import pytest

from support import processes

pytestmark = pytest.mark.kernel


def test_a_cell_has_its_output_streams_and_count(notebook, tmp_path):
    nb = notebook()
    cell = nb.run("import os, sys\nprint(os.getcwd())\nprint('careful', file=sys.stderr)\n6 * 7")
    assert cell.text == f"{tmp_path}\n"
    assert cell.stderr == "careful\n"
    assert cell.shown() == ["42"]
    assert (cell.error, cell.execution_count) == (None, 1)
    assert nb.run("1").execution_count == 2


def test_an_exception_is_returned_without_colours_and_the_next_cell_runs(notebook):
    nb = notebook()
    cell = nb.run("def f(x):\n    return 1 / x\nf(0)")
    assert (cell.error.ename, cell.error.evalue) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / x" in cell.error.traceback
    assert "\x1b" not in cell.error.traceback
    with pytest.raises(AssertionError, match="NameError"):
        nb.run("undefined", check=True)
    assert nb.run("'still here'", check=True).shown() == ["'still here'"]


def test_an_interrupt_ends_the_running_cell(notebook):
    nb = notebook()
    cell = nb.start("import time\nprint('waiting', flush=True)\ntime.sleep(60)")
    nb.until(lambda: "waiting" in cell.text)
    nb.interrupt()
    assert nb.wait(timeout=10).error.ename == "KeyboardInterrupt"
    assert nb.eval("6 * 7") == 42


def test_displays_are_updated_in_place_also_by_a_later_cell(notebook):
    nb = notebook()
    first = nb.run("handle = display('one', display_id=True)\nhandle.update('two')")
    assert first.shown() == ["'two'"]
    later = nb.run("handle.update('three')\nprint('updated')")
    assert first.shown() == ["'three'"]
    assert later.shown() == []


def test_cleared_output_is_gone(notebook):
    cell = notebook().run("from IPython.display import clear_output\nprint('a')\nclear_output(wait=True)\nprint('b')")
    assert cell.text == "b\n"


def test_states_of_widgets_are_followed(notebook):
    nb = notebook()
    nb.run("import ipywidgets\nhtml = ipywidgets.HTML('before')\nhtml", check=True)
    nb.run("html.value = 'after'", check=True)
    assert [state["value"] for state in nb.widgets.values() if state.get("_model_name") == "HTMLModel"] == ["after"]


def test_eval_returns_python_values_and_reports_errors(notebook):
    nb = notebook(env={"NBDDP_EXAMPLE": "it's"})
    nb.run("import os\nvalues = {'a': [1, 2.5, None], 'b': os.environ['NBDDP_EXAMPLE']}", check=True)
    assert nb.eval("values") == {"a": [1, 2.5, None], "b": "it's"}
    with pytest.raises(RuntimeError, match="missing: NameError"):
        nb.eval("missing")


def test_a_dead_kernel_is_noticed(notebook):
    nb = notebook()
    nb.start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RuntimeError, match="the kernel has died"):
        nb.wait()


def test_a_cell_that_goes_on_too_long_shows_what_it_had_printed(notebook):
    nb = notebook()
    nb.start("import time\nprint('so far', flush=True)\ntime.sleep(60)")
    with pytest.raises(TimeoutError, match="so far"):
        nb.wait(timeout=1)


def test_closing_finds_what_moved_into_another_session_and_ends_it(notebook, monkeypatch):
    monkeypatch.setattr("support.kernel.ENDING_S", 0.5)
    nb = notebook()
    nb.run("import subprocess\nchild = subprocess.Popen(['sleep', '300'], start_new_session=True)", check=True)
    child = nb.eval("child.pid")
    assert child in {process.pid for process in nb.processes()}
    with pytest.raises(AssertionError, match=rf"there were still:\n  pid {child}, .*sleep 300"):
        nb.close()
    assert processes.alive(process for process in nb.processes() if process.pid == child) == set()


def test_a_child_of_the_kernel_alone_is_no_survivor(notebook):
    nb = notebook()
    nb.run("import subprocess\nsubprocess.run(['true'])", check=True)
    nb.close()
    assert subprocess.run(["kill", "-0", str(nb.kernel_pid)], capture_output=True, check=False).returncode != 0
