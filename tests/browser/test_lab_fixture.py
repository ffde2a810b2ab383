"""A cell of a real notebook in a real browser."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser


def test_a_cell_runs_in_jupyterlab_and_its_output_is_saved(lab):
    notebook = lab.open(["print(6*7)", "import time\nprint('from here', flush=True)\ntime.sleep(60)", "print('and on')"])
    notebook.run_cell(0)
    notebook.output("42")
    notebook.run_cell(1)
    notebook.output("from here")
    notebook.interrupt()
    notebook.output("KeyboardInterrupt")
    notebook.run_cell(2)
    notebook.output("and on")
    assert notebook.screenshot("lab_fixture").stat().st_size > 10_000
    saved = notebook.save()
    assert saved.cells[0].outputs[0].text == "42\n"
