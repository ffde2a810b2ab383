from __future__ import annotations

import base64
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kernel import Notebook

pytestmark = pytest.mark.kernel

TESTS = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"

SETUP = f"""
import sys, threading, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.fake_run import PLAN_LINE, FakeRun
from nbddp.kernel.card import make_card
from nbddp.kernel.follow import Follower, fold_all
from nbddp.kernel.view import in_kernel, open_view

def watch(run, holds="net: epoch 10"):
    follower = Follower(run.run_dir, lambda: None)
    view = open_view(run.run_dir, follower.state, plan_line=PLAN_LINE)
    follower.add_listener(view.update)
    follower.start()
    return follower, view

def finish(run, follower, view, holds="net: epoch 10"):
    follower.done.wait()
    follower.join()
    view.finish(make_card(run.run_dir, follower.state, plan_line=PLAN_LINE, holds=holds, error=None))

def write(run, gate):
    run.start()
    run.train(500)
    run.print("printed by rank 0 <b>")
    while not gate.exists():
        time.sleep(0.02)
    run.train(run.total_steps - run.step)
    run.end()
"""
WATCH = """
run = FakeRun(Path("nbddp_runs"))
writer = threading.Thread(target=write, args=(run, Path("gate")))
writer.start()
follower, view = watch(run)
finish(run, follower, view)
writer.join()
"""


def html(widgets: dict[str, dict[str, Any]]) -> str:
    """What the HTML widgets show, together."""
    return "".join(str(state["value"]) for state in widgets.values() if state.get("_model_name") == "HTMLModel")


def test_a_run_is_shown_while_it_goes_on_and_its_card_afterwards(notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    kernel = notebook()
    kernel.run(SETUP, check=True)
    assert kernel.eval("in_kernel()") is True
    cell = kernel.start(WATCH)
    parts = ["running", "step 500 of 3,900", "epoch 2 of 10", "to go", "val_loss", "samples/s", "a step", "rank 1 is the slowest", "412 MiB"]
    parts += ["printed by rank 0 &lt;b&gt;"]
    kernel.until(lambda: all(part in html(kernel.widgets) for part in parts))
    assert [WIDGET in output["data"] for output in cell.outputs] == [True]
    assert cell.outputs[0]["data"]["text/plain"].count("CPU ranks") == 1
    kernel.until(lambda: "<img alt=" in html(kernel.widgets))

    (tmp_path / "gate").touch()
    kernel.wait()
    assert cell.error is None
    (output,) = cell.outputs
    assert set(output["data"]) == {"text/html", "image/png", "text/plain"}
    assert "3,900 · epoch 10 of 10" in output["data"]["text/plain"]
    assert "net: epoch 10" in output["data"]["text/html"]
    assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
    assert kernel.widgets == {}
    assert (cell.text, cell.stderr) == ("", "")
    assert kernel.eval("follower.view_error") is None
    assert kernel.eval("'matplotlib.pyplot' in sys.modules") is False


def test_a_view_goes_on_after_its_cell_and_below_others(notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    kernel = notebook()
    kernel.run(SETUP, check=True)
    first = kernel.run(
        """
run = FakeRun(Path("nbddp_runs"))
writer = threading.Thread(target=write, args=(run, Path("gate")))
writer.start()
follower, view = watch(run)
closer = threading.Thread(target=finish, args=(run, follower, view))
closer.start()
""",
        check=True,
    )
    second = kernel.run("print('another cell')", check=True)
    kernel.until(lambda: "step 500 of 3,900" in html(kernel.widgets))
    (tmp_path / "gate").touch()
    kernel.until(lambda: "3,900 · epoch 10 of 10" in first.outputs[0]["data"]["text/plain"])
    kernel.run("closer.join(); writer.join()", check=True)
    assert kernel.widgets == {}
    assert len(first.outputs) == 1
    assert [output["output_type"] for output in second.outputs] == ["stream"]
    assert second.text == "another cell\n"


def test_updates_after_the_card_and_a_second_card_do_nothing(notebook: Callable[..., Notebook]) -> None:
    kernel = notebook()
    kernel.run(SETUP, check=True)
    cell = kernel.run(
        """
run = FakeRun(Path("nbddp_runs"))
run.start(); run.train(100)
state = fold_all(run.run_dir)
view = open_view(run.run_dir, state, plan_line=PLAN_LINE)
run.end()
for holds in ("first", "second"):
    view.finish(make_card(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, holds=holds, error=None))
    view.update(state)
""",
        check=True,
    )
    (output,) = cell.outputs
    assert "first" in output["data"]["text/plain"]
    assert kernel.widgets == {}


def test_the_browser_gets_four_updates_and_60_kilobytes_a_second_at_most(notebook: Callable[..., Notebook]) -> None:
    """500 steps a second on 8 ranks, all of which print, with the log of one of them open."""
    kernel = notebook()
    kernel.run(SETUP, check=True)
    kernel.run(
        """
import json
from ipykernel.comm.comm import BaseComm
sent, publish = [], BaseComm.publish_msg
def counted(self, msg_type, data=None, metadata=None, buffers=None, **keys):
    sent.append((time.monotonic(), msg_type, len(json.dumps([data, metadata])) + sum(map(len, buffers or []))))
    return publish(self, msg_type, data=data, metadata=metadata, buffers=buffers, **keys)
BaseComm.publish_msg = counted
run = FakeRun(Path("nbddp_runs"), nproc=8, epochs=1000, report_steps=125)
run.start()
follower, view = watch(run)
view._logs.tab.selected_index = 3
began = time.monotonic()
for quarter in range(1, 33):
    run.train(125)
    for rank in range(8):
        run.print("".join(f"\\x1b[3{n}mline {n}\\x1b[m of step {run.step} {'x' * 60}\\n" for n in range(8)), rank=rank)
    time.sleep(max(0, began + quarter / 4 - time.monotonic()))
run.end("stopped")
follower.join()
updates = [(when - began, size) for when, kind, size in sent if kind == "comm_msg" and when > began + 0.5]
finish(run, follower, view)
""",
        check=True,
    )
    assert kernel.eval("follower.view_error") is None
    updates = kernel.eval("updates")
    assert len(updates) > 16
    for begin, _ in updates:
        second = [size for when, size in updates if begin <= when < begin + 1]
        # Besides, the curve appears and its axis follows the losses, once each.
        assert len(second) <= 4 + 2 * (begin < 2)
        assert sum(second) <= 60_000


BLOCKING = """
run = FakeRun(Path("nbddp_runs"))
writer = threading.Thread(target=write, args=(run, Path("gate")))
writer.start()
follower = Follower(run.run_dir, lambda: None)
view = open_view(run.run_dir, follower.state, plan_line=PLAN_LINE, blocking=True)
follower.add_listener(view.update)
follower.start()
finish(run, follower, view)
writer.join()
"""


def test_a_page_that_is_opened_while_the_cell_blocks_gets_the_widgets(notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    kernel = notebook()
    kernel.run(SETUP, check=True)
    cell = kernel.start(BLOCKING)
    kernel.until(lambda: "step 500 of 3,900" in html(kernel.widgets))
    with kernel.another_client() as page:

        def ask(kind: str, content: dict[str, Any], **metadata: str) -> str:
            message = page.session.msg(kind, content, metadata=metadata)
            page.shell_channel.send(message)
            return str(message["header"]["msg_id"])

        asked = [ask("kernel_info_request", {}), ask("comm_info_request", {"target_name": "jupyter.widget"})]
        replies = [page.get_shell_msg(timeout=10) for _ in asked]
        assert [reply["parent_header"]["msg_id"] for reply in replies] == asked
        assert replies[0]["content"]["implementation"] == "ipython"
        assert set(replies[1]["content"]["comms"]) >= set(kernel.widgets)
        ask("comm_open", {"comm_id": "mine", "target_name": "jupyter.widget.control", "data": {}}, version="1.0.0")
        ask("comm_msg", {"comm_id": "mine", "data": {"method": "request_states"}})
        idle, states = set(), None
        while states is None or not set(asked) <= idle:
            message = page.get_iopub_msg(timeout=10)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                idle.add(message["parent_header"]["msg_id"])
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "mine":
                states = message["content"]["data"]["states"]
        assert set(states) >= set(kernel.widgets)
        assert "step 500 of 3,900" in html({key: {**state["state"], "_model_name": state["model_name"]} for key, state in states.items()})
        assert not cell.done

        waiting = ask("execute_request", {"code": "'after the cell'", "silent": False, "user_expressions": {}, "allow_stdin": False})
        (tmp_path / "gate").touch()
        kernel.wait()
        assert cell.error is None
        assert page.get_shell_msg(timeout=10)["parent_header"]["msg_id"] == waiting  # whatever else came meanwhile is not lost
        asked = [ask("kernel_info_request", {})]
        assert page.get_shell_msg(timeout=10)["parent_header"]["msg_id"] == asked[0]
    assert kernel.eval("get_ipython().kernel.shell_stream._recv_callback.__name__") == kernel.eval("get_ipython().kernel.shell_channel_thread_main.__name__")


def test_an_executed_notebook_holds_the_card_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = new_notebook(cells=[new_code_cell(SETUP), new_code_cell("Path('gate').touch()\n" + WATCH)])
    client = NotebookClient(book, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    (output,) = book.cells[1].outputs
    assert set(output["data"]) == {"text/html", "image/png", "text/plain"}
    saved = json.dumps(book)
    assert WIDGET not in saved
    assert len(json.dumps(book.metadata)) < 20_000
    nbformat.validate(book)
    page, _ = HTMLExporter().from_notebook_node(book)
    assert "net: epoch 10" in page
    assert "Loading widget" not in page
    assert not re.search(r"VBox\(", page)


def test_papermill_and_its_log_get_a_line_and_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = new_notebook(cells=[new_code_cell(SETUP), new_code_cell("Path('gate').touch()\n" + WATCH)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    source, target = tmp_path / "source.ipynb", tmp_path / "target.ipynb"
    nbformat.write(book, source)
    with caplog.at_level(logging.INFO, logger="papermill"):
        papermill.execute_notebook(source, target, log_output=True, progress_bar=False, cwd=tmp_path)
    lines = [line for record in caplog.records for line in record.getMessage().splitlines() if "step" in line]
    assert len(lines) <= 2
    (output,) = nbformat.read(target, as_version=4).cells[1].outputs
    assert set(output["data"]) == {"text/html", "image/png", "text/plain"}
    assert WIDGET not in target.read_text()
