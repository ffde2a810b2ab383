"""The tutorial on the configuration panel, worked through in JupyterLab as its text says; the pictures in it are these screenshots, made small."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from support.lab import ARTEFACTS

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Locator

    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "08_widget_configuration.ipynb"
CODE = [cell for cell in nbformat.read(SOURCE, as_version=4).cells if cell.cell_type == "code"]


def place(beginning: str) -> int:
    """Which code cell begins so, counted from 0."""
    (found,) = [index for index, cell in enumerate(CODE) if cell.source.startswith(beginning)]
    return found


def panel_of(book: LabNotebook, index: int) -> Locator:
    return book.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".nbddp-panel")


def box(element: Locator) -> FloatRect:
    found = element.bounding_box()
    assert found is not None
    return found


def cut(book: LabNotebook, name: str, within: Locator, begin: Locator, end: Locator, *, before: bool = False) -> None:
    """A screenshot as wide as an element, from one of its parts to the end of another, or to where that begins."""
    begin.evaluate("element => element.scrollIntoView()")
    top, last, whole = box(begin)["y"], box(end), box(within)
    bottom = last["y"] - 2 if before else last["y"] + last["height"] + 2
    ARTEFACTS.mkdir(exist_ok=True)
    book.page.screenshot(path=ARTEFACTS / f"{name}.png", clip={"x": whole["x"], "y": top, "width": whole["width"], "height": bottom - top})


def test_the_tutorial_holds_in_a_browser(lab: Lab) -> None:
    shutil.copy(SOURCE, lab.folder)
    book = lab.reopen(SOURCE.name)
    page = book.page
    page.set_viewport_size({"width": 1240, "height": 1500})
    assert page.get_by_text("configuration panel of net and train_set").count() == 3, "what the saved file shows where no panel is"
    for index in (0, 1):
        book.run_cell(index)
        book.idle()

    first = place("%ddp_config net train_set --val val_set -n 2 --as first")
    book.run_cell(first)
    panel = panel_of(book, first)
    panel.get_by_text("2 x CPU ranks · 64 = 2 x 32 (default) · 22 steps/epoch").wait_for()
    panel.get_by_text("2 become SyncBatchNorm").wait_for()
    book.screenshot("08_panel", of=panel)

    panel.get_by_label("batch_size", exact=True).fill("101")
    refused = CODE[place("%ddp_plan")].outputs[0].evalue
    panel.get_by_role("alert").get_by_text(refused, exact=True).wait_for()
    panel.get_by_role("tab", name="ranks and batch \u27171").wait_for()
    cut(book, "08_error", panel, panel.get_by_text("trained on train_set"), panel.get_by_label("val", exact=True), before=True)

    second = place("%ddp_config net train_set --val val_set -n 2 --epochs 4")
    book.run_cell(second)
    panel = panel_of(book, second)
    panel.get_by_text("0.002 x 96/48", exact=True).wait_for()
    cut(book, "08_figures", panel, panel.get_by_text("per-rank batch").first, panel.get_by_label("val", exact=True), before=True)

    panel.get_by_role("button", name="Write cell").click()
    written = panel.get_by_label("cell", exact=True)
    put = place("%ddp_config --cell")
    page.wait_for_function("([area, text]) => area.value === text", arg=[written.element_handle(), CODE[put + 1].source])
    cut(book, "08_cell", panel, panel.get_by_label("body of the cell", exact=True), written)
    book.run_cell(put)
    new = page.locator(".jp-Notebook .jp-CodeCell").nth(put + 1).locator(".cm-content")
    page.wait_for_function("count => document.querySelectorAll('.jp-Notebook .jp-CodeCell').length === count", arg=len(CODE) + 1)
    assert new.inner_text() == CODE[put + 1].source
    book.run_cell(put + 1)
    page.locator(".jp-Notebook .jp-CodeCell").nth(put + 1).get_by_text("60 · epoch 4 of 4").wait_for(timeout=60_000)

    again = place("%ddp_config --from first") + 1  # one cell more by now
    book.run_cell(again)
    panel = panel_of(book, again)
    panel.get_by_text("0.0002 x 96/48", exact=True).wait_for()
    panel.get_by_role("tab", name="length").click()
    panel.get_by_label("epochs", exact=True).fill("400")
    panel.get_by_text("6,000 steps in all").wait_for()
    panel.get_by_role("button", name="Run").click()
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(again)
    view = cell.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Stop in order"))
    view.get_by_text(re.compile(r"^\d+ steps$")).nth(2).wait_for(timeout=60_000)  # the windows before the last one
    view.get_by_text("val_loss").first.wait_for()
    cut(book, "08_run", panel, panel.get_by_role("button", name="Run"), view)
    book.screenshot("08_view", of=view)
    view.get_by_role("button", name="Stop in order").click()
    cell.get_by_text("stopped as asked").wait_for(timeout=30_000)

    book.run_cell(place("%ddp_runs --sort best") + 1)
    book.screenshot("08_runs", of=book.output("2 runs ·"))
