"""A notebook without a browser: cells run one after the other in a real IPython kernel, as JupyterLab would run them.

The kernel is a process of its own session, its working directory is the notebook's folder, and interrupts go to its process group, as under a
Jupyter server. Outputs are kept the way a front end keeps them: updated displays and widget states included.
"""

from __future__ import annotations

import ast
import os
import queue
import re
import secrets
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from jupyter_client.manager import KernelManager

from support import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from jupyter_client.blocking.client import BlockingKernelClient

MARK = "NBDDP_TEST_KERNEL"
ENDING_S = 10.0
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell; ``traceback`` is what the front end shows, without colours."""

    ename: str
    evalue: str
    traceback: str


@dataclass
class Cell:
    """One execution of a cell, filled while it runs.

    Attributes:
        outputs: in the notebook format (``output_type`` and its fields); ``transient`` keeps the display id.
        payload: what the front end was asked to do at the cell's end, such as ``set_next_input``.
        done: the kernel has said that it is idle again and has answered.
    """

    source: str
    msg_id: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    execution_count: int | None = None
    payload: list[dict[str, Any]] = field(default_factory=list)
    replied: bool = False
    idle: bool = False
    clear_before_next: bool = False

    @property
    def done(self) -> bool:
        """Whether the execution is over and its outputs have arrived."""
        return self.replied and self.idle

    @property
    def text(self) -> str:
        """What the cell wrote to stdout."""
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        """What the cell wrote to stderr."""
        return self._stream("stderr")

    @property
    def error(self) -> CellError | None:
        """The exception that ended the cell."""
        for output in self.outputs:
            if output["output_type"] == "error":
                return CellError(output["ename"], output["evalue"], ANSI.sub("", "\n".join(output["traceback"])))
        return None

    def shown(self, mime: str = "text/plain") -> list[str]:
        """Return the displayed data of one MIME type, in order."""
        return [output["data"][mime] for output in self.outputs if mime in output.get("data", {})]

    def _stream(self, name: str) -> str:
        return "".join(output["text"] for output in self.outputs if output["output_type"] == "stream" and output["name"] == name)


class Notebook:
    """A kernel and the cells that ran in it; use it as a context manager.

    Args:
        folder: the kernel's working directory.
        state: where connection file, IPython's own folder and the kernel's log go; outside ``folder``, so that the notebook's folder is the user's alone.
        env: added to this process's environment for the kernel.
    """

    def __init__(self, folder: Path, state: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.cells: list[Cell] = []
        self.widgets: dict[str, dict[str, Any]] = {}
        self._mark = secrets.token_hex(8)
        self._log = state / "kernel.log"
        self._manager = KernelManager(connection_file=str(state / "connection.json"))
        # By path, since a kernel spec of the same name in the user's home may belong to another environment.
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        with self._log.open("wb") as log:
            self._manager.start_kernel(
                cwd=str(folder),
                env={**os.environ, "IPYTHONDIR": str(state / "ipython"), **(env or {}), MARK: self._mark},
                stdout=log,
                stderr=log,
            )
        self.kernel_pid: int = self._manager.provisioner.pid  # type: ignore[union-attr] # a started manager has one
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- running cells

    def run(self, source: str, timeout: float = 60, *, check: bool = False) -> Cell:
        """Run one cell to its end; with ``check``, a cell that raises is an AssertionError with its traceback."""
        cell = self.start(source)
        self.wait(timeout)
        if check and cell.error is not None:
            message = f"the cell raised:\n{source}\n{cell.error.traceback}"
            raise AssertionError(message)
        return cell

    def start(self, source: str) -> Cell:
        """Send one cell and return at once; `wait` and `until` follow it."""
        cell = Cell(source, self._client.execute(source, allow_stdin=False))
        self.cells.append(cell)
        return cell

    def wait(self, timeout: float = 60) -> Cell:
        """Wait for the last cell's end and return it."""
        cell = self.cells[-1]
        self.until(lambda: cell.done, timeout)
        return cell

    def until(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Take in the kernel's messages until ``condition()`` holds; TimeoutError with what the last cell had shown if it does not."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._receive():
                continue
            if not self._manager.is_alive():
                message = f"the kernel has died; its log ends:\n{self._log_tail()}"
                raise RuntimeError(message)
            if time.monotonic() > deadline:
                last = self.cells[-1]
                shown = f"stdout: {last.text[-2000:]}\nstderr: {last.stderr[-2000:]}\noutputs: {last.shown()}"
                message = f"after {timeout} s in the cell:\n{last.source}\n{shown}"
                raise TimeoutError(message)

    def interrupt(self) -> None:
        """Press Stop: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def eval(self, expression: str, timeout: float = 60) -> Any:
        """Return the value of an expression that is made of Python literals, without leaving a trace in the kernel's history."""
        msg_id = self._client.execute("", silent=True, user_expressions={"value": f"repr({expression})"})
        deadline = time.monotonic() + timeout
        while True:
            reply = self._client.get_shell_msg(timeout=max(0.01, deadline - time.monotonic()))
            self._take_reply(reply)
            if reply["parent_header"].get("msg_id") == msg_id:
                break
        value = reply["content"]["user_expressions"]["value"]
        if value["status"] != "ok":
            message = f"{expression}: {value['ename']}: {value['evalue']}"
            raise RuntimeError(message)
        return ast.literal_eval(ast.literal_eval(value["data"]["text/plain"]))

    # -- widgets

    def find_widget(self, **state: Any) -> str:
        """Return the id of the one widget with this state: ``find_widget(_model_name="ButtonModel", description="Run")``."""
        (found,) = [key for key, known in self.widgets.items() if all(known.get(name) == value for name, value in state.items())]
        return found

    def set_widget(self, model_id: str, **state: Any) -> None:
        """Set traits of a widget as a front end does when its user changes them; returns at once."""
        self._comm(model_id, {"method": "update", "state": state, "buffer_paths": []})
        self.widgets[model_id].update(state)

    def click(self, model_id: str) -> None:
        """Press a button; returns at once."""
        self._comm(model_id, {"method": "custom", "content": {"event": "click"}})

    def _comm(self, comm_id: str, data: dict[str, Any]) -> None:
        self._client.shell_channel.send(self._client.session.msg("comm_msg", {"comm_id": comm_id, "data": data}))

    # -- the end

    @contextmanager
    def another_client(self) -> Iterator[BlockingKernelClient]:
        """A second connection to the kernel, as of a page that is opened now; nothing is asked yet."""
        client = self._manager.blocking_client()
        client.session = type(client.session)(key=client.session.key, signature_scheme=client.session.signature_scheme)
        client.start_channels()
        try:
            yield client
        finally:
            client.stop_channels()

    def processes(self) -> processes.Processes:
        """Return what runs of this kernel's session and of everything that was started from it, the kernel included."""
        return processes.marked(MARK, self._mark) | processes.of_session(self.kernel_pid)

    def close(self) -> None:
        """Shut the kernel down as a server would; AssertionError if anything that it started is there 10 s later."""
        self._client.stop_channels()
        if self._manager.is_alive():
            self._manager.shutdown_kernel()
        self._manager.cleanup_resources()
        left = processes.gone(self.processes, ENDING_S)
        listed = processes.describe(left)
        processes.end(left)
        assert not left, f"{ENDING_S:.0f} s after its kernel's end there were still:\n{listed}"

    # -- messages

    def _receive(self) -> bool:
        """Take in what has arrived; return whether there was anything (waits a little for it)."""
        received = False
        while self._client.shell_channel.msg_ready():
            self._take_reply(self._client.get_shell_msg(timeout=1))
            received = True
        try:
            self._take_output(self._client.get_iopub_msg(timeout=0.05))
        except queue.Empty:
            return received
        return True

    def _cell(self, message: dict[str, Any]) -> Cell | None:
        parent = message["parent_header"].get("msg_id")
        return next((cell for cell in reversed(self.cells) if cell.msg_id == parent), None)

    def _take_reply(self, message: dict[str, Any]) -> None:
        cell = self._cell(message)
        if cell is not None and message["msg_type"] == "execute_reply":
            cell.replied = True
            cell.payload = message["content"].get("payload", [])
            cell.execution_count = message["content"].get("execution_count", cell.execution_count)

    def _take_output(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind in {"comm_open", "comm_msg"}:
            data = content["data"]
            if kind == "comm_open" or data.get("method") in {"update", "echo_update"}:
                self.widgets.setdefault(content["comm_id"], {}).update(data.get("state", {}))
        elif kind == "comm_close":
            self.widgets.pop(content["comm_id"], None)
        elif kind == "update_display_data":
            self._update_displays(content)
        elif (cell := self._cell(message)) is not None:
            self._take_cell_output(cell, kind, content)

    def _update_displays(self, content: dict[str, Any]) -> None:
        display_id = content["transient"]["display_id"]
        for cell in self.cells:
            for output in cell.outputs:
                if output.get("transient", {}).get("display_id") == display_id:
                    output.update(data=content["data"], metadata=content["metadata"])

    def _take_cell_output(self, cell: Cell, kind: str, content: dict[str, Any]) -> None:
        if kind == "status":
            cell.idle = cell.idle or content["execution_state"] == "idle"
        elif kind == "clear_output":
            if content["wait"]:
                cell.clear_before_next = True
            else:
                cell.outputs.clear()
        elif kind in {"stream", "display_data", "execute_result", "error"}:
            if cell.clear_before_next:
                cell.outputs.clear()
                cell.clear_before_next = False
            cell.outputs.append({"output_type": kind, **content})

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
