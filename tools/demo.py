"""Execute the first notebook in a kernel of its own, and say how well it did: ``python tools/demo.py [NOTEBOOK]``.

The executed copy, outputs included, is written to artefacts/ whether or not every cell succeeded. The notebook prints a line ``accuracy 0.97``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 600


def accuracy_line(notebook: nbformat.NotebookNode) -> str | None:
    """Return the last line ``accuracy X`` that a cell printed."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    found = re.findall(r"^accuracy\s+[0-9.]+.*$", printed, flags=re.MULTILINE)
    return found[-1] if found else None


def main(source: Path) -> int:
    """Execute ``source`` in its own folder; return the exit status."""
    if not source.exists():
        print(f"there is no notebook {source}", file=sys.stderr)
        return 1
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(source.parent)}})
    executed = ROOT / "artefacts" / source.name
    executed.parent.mkdir(exist_ok=True)
    try:
        client.execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        nbformat.write(notebook, executed)
        print(accuracy_line(notebook) or f"{source.name} printed no line `accuracy ...`")
        print(f"executed notebook: {executed}", flush=True)
    return 0 if accuracy_line(notebook) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "notebooks" / "01_first_run.ipynb"))
