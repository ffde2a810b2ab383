"""A real notebook kernel to run cells in."""

from __future__ import annotations

import ast
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from jupyter_client.manager import start_new_kernel


class Kernel:
    """Runs cells; a cell that raises raises here."""

    def __init__(self, client: object) -> None:
        self._client = client

    def run(self, source: str, timeout: float = 300) -> str:
        """Run a cell and return what it printed."""
        printed: list[str] = []

        def take(message: dict) -> None:  # type: ignore[type-arg]
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))

        self._client.execute_interactive(source, timeout=timeout, output_hook=take)  # type: ignore[attr-defined]
        return "".join(printed)

    def value(self, expression: str) -> object:
        """The value of an expression made of literals."""
        return ast.literal_eval(self.run(f"print(repr({expression}))").strip())


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel whose notebook stands in `folder`, with this folder's parent importable."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), stderr=subprocess.DEVNULL)
    try:
        running = Kernel(client)
        running.run(f"import sys; sys.path.append({str(Path(__file__).resolve().parents[1])!r})")
        yield running
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
