"""The configuration panel in JupyterLab: typed into, read, pressed, and looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from support.example import ALONE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

SETUP = (
    ALONE
    + """
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
criterion = nn.CrossEntropyLoss()
"""
)
PANEL = "%ddp_config net samples -n 2 --num-workers 2"
OVERFLOWS = (
    "element => [element, ...element.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > element.getBoundingClientRect().right + 1).length"
)
NAMELESS = """panel => [...panel.querySelectorAll('input, select, textarea, button')].filter(e =>
    !(e.labels && [...e.labels].some(label => label.textContent.trim())) && !e.textContent.trim() && !e.getAttribute('aria-label')).length"""


def opened(lab: Lab, *more: str) -> tuple[LabNotebook, Locator]:
    """A notebook with a panel, and the panel."""
    book = lab.open([SETUP, PANEL, *more])
    book.page.set_viewport_size({"width": 1100, "height": 1300})
    book.run_cell(0)
    book.run_cell(1)
    panel = book.page.locator(".nbddp-panel")
    panel.get_by_text("64 = 2 x 32 (default)").wait_for()
    return book, panel


def tab(panel: Locator, name: str) -> Locator:
    return panel.get_by_role("tab", name=re.compile(f"^{name}"))


def test_errors_and_figures_move_as_one_types(lab: Lab) -> None:
    book, panel = opened(lab)
    box = panel.get_by_label("batch_size", exact=True)
    box.fill("101")
    alert = panel.get_by_role("alert")
    alert.get_by_text("batch_size=101 is the global batch and must divide by 2 ranks: use 100 or 102").wait_for()
    assert alert.count() == 1
    assert tab(panel, "ranks and batch").inner_text() == "ranks and batch (1 wrong)"
    book.screenshot("panel-error", of=panel)
    box.press("Control+a")
    box.press_sequentially("100", delay=30)
    panel.get_by_text("100 = 2 x 50").wait_for()
    assert panel.get_by_role("alert").count() == 0
    panel.get_by_label("nproc", exact=True).fill("1")
    panel.get_by_text("1 x CPU rank · 100 = 1 x 100").wait_for()
    panel.get_by_text("1 ranks x 2 workers x 2 batches").wait_for()
    tab(panel, "optimisation").click()
    panel.get_by_label("optimizer", exact=True).select_option("sgd")
    panel.get_by_label("fused", exact=True).check()
    panel.get_by_text(re.compile("sgd, fused")).wait_for()
    panel.get_by_label("optimizer", exact=True).select_option("rmsprop")
    panel.get_by_role("alert").get_by_text("fused=True: rmsprop has no fused kernels").wait_for()


def test_the_written_cell_is_copied_or_put_into_the_next_one(lab: Lab) -> None:
    book, panel = opened(lab, "%ddp_config --cell")
    tab(panel, "length").click()
    panel.get_by_label("epochs", exact=True).fill("3")
    panel.get_by_text("24 steps in all").wait_for()
    panel.get_by_role("button", name="Write cell").click()
    cell = panel.get_by_label("cell", exact=True)
    cell.wait_for()
    text = "%%ddp_train net samples -n 2 --epochs 3 --num-workers 2\nloss = criterion"
    book.page.wait_for_function("([area, text]) => area.value === text", arg=[cell.element_handle(), text])
    panel.get_by_label("epochs", exact=True).fill("2")
    text = text.replace("3", "2", 1)
    book.page.wait_for_function("([area, text]) => area.value === text", arg=[cell.element_handle(), text])
    book.run_cell(2)
    book.page.locator(".jp-Notebook .jp-CodeCell").nth(3).wait_for()
    saved = book.save()
    assert [source for source in (cell.source for cell in saved.cells) if source] == [SETUP, PANEL, "%ddp_config --cell", text]


def test_run_opens_the_view_below_and_its_card_stays(lab: Lab) -> None:
    book, panel = opened(lab, "run.wait().state")
    panel.get_by_role("button", name="Run").click()
    panel.get_by_text("goes on in the background: its view is below").wait_for(timeout=30_000)
    outputs = book.page.locator(".jp-Notebook .jp-CodeCell").nth(1).locator(".jp-OutputArea-output")
    outputs.filter(has_text="2 x CPU ranks · 64 = 2 x 32").last.wait_for()
    outputs.filter(has_text=re.compile("finished.*8 · epoch 1 of 1", re.DOTALL)).wait_for(timeout=60_000)
    book.screenshot("panel-run")
    book.run_cell(2)
    book.output("'finished'")
    assert panel.get_by_role("button", name="Run").is_enabled()


def test_it_is_usable_narrow_dark_and_by_keyboard(lab: Lab) -> None:
    book, panel = opened(lab)
    page = book.page
    assert panel.evaluate(NAMELESS) == 0
    area = page.locator(".jp-OutputArea-output").first
    box = area.bounding_box()
    assert box is not None
    assert page.viewport_size is not None
    for width in (1000, 600):
        page.set_viewport_size({"width": int(page.viewport_size["width"] + width - area.bounding_box()["width"]), "height": 1500})
        page.wait_for_function("width => Math.abs(document.querySelector('.jp-OutputArea-output').getBoundingClientRect().width - width) < 2", arg=width)
        for name in ("ranks and batch", "optimisation", "checkpoints", "launch"):
            tab(panel, name).click()
            assert area.evaluate(OVERFLOWS) == 0, name
        book.screenshot(f"panel-{width}", of=area)
    assert panel.get_by_label("slurm", exact=True).is_disabled()
    tab(panel, "launch").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert tab(panel, "trackers").get_attribute("aria-selected") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.labels[0].textContent") == "wandb"
    page.keyboard.type("project=digits")
    page.keyboard.press("Tab")
    page.keyboard.type("boards")
    panel.get_by_role("button", name="Write cell").focus()
    page.keyboard.press("Enter")
    cell = panel.get_by_label("cell", exact=True)
    page.wait_for_function("area => area.value.includes('--wandb project=digits --tensorboard boards')", arg=cell.element_handle())
    book.theme("JupyterLab Dark")
    tab(panel, "ranks and batch").click()
    panel.get_by_label("batch_size", exact=True).fill("7")
    panel.get_by_role("alert").first.wait_for()
    book.screenshot("panel-dark", of=area)


def test_a_reload_of_the_tab_keeps_the_panel(lab: Lab) -> None:
    book, panel = opened(lab)
    panel.get_by_label("batch_size", exact=True).fill("128")
    panel.get_by_text("128 = 2 x 64").wait_for()
    book.save()
    again = lab.reopen()  # a reload: the kernel goes on, and so does its panel
    there = again.page.locator(".nbddp-panel")
    there.get_by_text("128 = 2 x 64").wait_for()
    there.get_by_label("batch_size", exact=True).fill("256")
    there.get_by_text("256 = 2 x 128").wait_for()
