"""Every notebook of the repository runs from top to bottom in a real kernel, and leaves no widget behind in the saved file."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
SAID = {
    "05_normalization": (
        "uses the statistics of each rank's 4 samples, which is small; rank 0's running statistics are kept",
        "is synchronised over the 2 ranks: statistics of the global batch",
        "3 BatchNorm layers became SyncBatchNorm, as in the run",
        "2 BatchNorm layers became GroupNorm, 1 LayerNorm, as in the run",
        "would let output 0 depend on input 0 (of transform.transforms.0.hyper), which the masks hide",
        "is refused: output 0 would depend on input 0",
        "swap first, then load",
    )
}
"""What the text of a notebook speaks of, and its outputs have to show."""

pytestmark = pytest.mark.kernel


@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(source, tmp_path, monkeypatch):
    shutil.copy(source, tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(tmp_path / source.name, as_version=4)
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if WIDGET in output.get("data", {})]
    expected = {cell.id for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", [])}
    raised = {cell.id for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"}
    assert raised == expected
    shown = "\n".join(shown_text(output) for output in outputs)
    assert not [said for said in SAID.get(source.stem, ()) if said not in shown]


def shown_text(output):
    """What an output of a cell says, as text."""
    return {"stream": lambda: output.text, "error": lambda: output.evalue}.get(output.output_type, lambda: output.data.get("text/plain", ""))()


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_outputs_and_no_folder_of_the_machine(source):
    notebook = nbformat.read(source, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)
    text = source.read_text()
    assert str(ROOT) not in text
    assert "/tmp/" not in text
    assert WIDGET not in text
