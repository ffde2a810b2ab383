"""Every notebook of the repository runs from top to bottom in a real kernel, and leaves no widget behind in the saved file."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PANEL = "%ddp_config"
WIDGET = "application/vnd.jupyter.widget-view+json"
SAID = {
    "03_reading_the_timings": (
        "is waiting for data, which the ranks make themselves between their steps: loader workers make it meanwhile (--num-workers ",
        "rank 0 (cpu) is the slowest in ",
        "Its step does what the others' does not",
        "4 samples per rank (8 = 2 x 4): as many steps as on one rank",
        "A batch 8 times as large takes 8 times fewer steps; lr grows with it (--batch-size 64 --lr-scale sqrt --base-batch-size 8)",
    ),
    "05_normalization": (
        "uses the statistics of each rank's 4 samples, which is small; rank 0's running statistics are kept",
        "is synchronised over the 2 ranks: statistics of the global batch",
        "3 BatchNorm layers became SyncBatchNorm, as in the run",
        "2 BatchNorm layers became GroupNorm, 1 LayerNorm, as in the run",
        "would let output 0 depend on input 0 (of transform.transforms.0.hyper), which the masks hide",
        "is refused: output 0 would depend on input 0",
        "swap first, then load",
    ),
    "08_widget_configuration": (
        "batch_size=101 is the global batch and must divide by 2 ranks: use 100 or 102",
        "2 x CPU ranks · 96 = 2 x 48 · 15 steps/epoch · lr 0.004",
        "loss at the end",
        "differ in: lr, init",
    ),
}
"""What the text of a notebook speaks of, and its outputs have to show."""
FOLLOWED = {"slow": ("is waiting for data", "fed"), "uneven": ("is the slowest in", "even"), "small": ("samples per rank (8 = 2 x 4)", "scaled")}
"""In 03: what the card of a run advises, and the run that follows the advice."""
PICTURE_BYTES = 80_000

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
    put: list[tuple[int, str]] = []
    client.on_cell_executed = lambda cell, cell_index, execute_reply: put.extend(
        (cell_index, asked["text"]) for asked in execute_reply["content"].get("payload", []) if asked["source"] == "set_next_input"
    )
    client.execute()
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    widgets = [cell.source for cell in notebook.cells for output in cell.get("outputs", []) if WIDGET in output.get("data", {})]
    assert all(source.startswith(PANEL) for source in widgets), "a run leaves none, a panel is one"
    assert len(put) == sum(cell.source.startswith(PANEL) and "--cell" in cell.source for cell in notebook.cells)
    for index, text in put:
        assert next(cell.source for cell in notebook.cells[index + 1 :] if cell.cell_type == "code") == text
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


def test_advice_that_is_followed_is_gone_from_the_next_card():
    notebook = nbformat.read(ROOT / "notebooks" / "03_reading_the_timings.ipynb", as_version=4)
    cards = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and (name := re.match(r"%%ddp_train .* --as (\w+)$", cell.source.splitlines()[0])):
            (cards[name[1]],) = [output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data"]
    for before, (said, after) in FOLLOWED.items():
        assert [line for line in cards[before].splitlines() if line.strip().startswith("advice: ") and said in line]
        assert [line for line in cards[after].splitlines() if line.strip().startswith("advice: ") and said in line] == []


def test_pictures_are_there_small_described_and_shown():
    texts = {ROOT / "README.md": (ROOT / "README.md").read_text()}
    for source in NOTEBOOKS:
        texts[source] = "\n".join(cell.source for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "markdown")
    shown = set()
    for source, text in texts.items():
        pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
        assert all(len(description) > 20 for description, _ in pictures)
        shown |= {source.parent / path for _, path in pictures}
    assert shown == set((ROOT / "notebooks" / "pictures").iterdir())
    for picture in shown:
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < PICTURE_BYTES
