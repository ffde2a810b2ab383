"""Finished runs in JupyterLab: the table that sorts without a kernel, runs side by side, and a notebook that is full of cards."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from support.looks import faint, overflowing

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from support.lab import Lab

pytestmark = pytest.mark.browser

TESTS = Path(__file__).resolve().parents[1]
RUNS = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
import nbddp
from support.fake_run import FakeRun, finished

def run(lr, losses, note, end="finished"):
    made = FakeRun(Path("nbddp_runs"), epochs=2, steps_per_epoch=len(losses) // 2, config={{"lr": lr}}, note=note)
    made.start()
    made.train(len(losses), losses=list(losses))
    made.end(end)
"""
THREE = """
run(0.1, [3 / (1 + step / 9) for step in range(200)], "short")
run(0.01, [2 / (1 + step / 60) for step in range(600)], "long")
run(0.001, [5 / (1 + step / 20) for step in range(400)], "middle", "stopped")
"""
IMAGES = "element => [...element.querySelectorAll('img')].map(image => image.complete && image.naturalWidth > 0)"


def notes(table: Locator) -> list[str]:
    return [row.locator("td").last.inner_text() for row in table.locator("tbody tr").all()]


ALIGNED = """element => {
  const left = cell => Math.round(cell.getBoundingClientRect().left), heads = [...element.querySelectorAll('th')].map(left);
  return [...element.querySelectorAll('tbody tr')].every(row => [...row.cells].every((cell, index) => Math.abs(left(cell) - heads[index]) < 2));
}"""


def sorts(table: Locator) -> None:
    """Click and press through a table that is in the order of the start."""
    assert notes(table) == ["middle", "long", "short"]
    header = table.get_by_role("columnheader", name="steps")
    button = table.get_by_role("button", name="steps")
    button.click()
    assert (notes(table), header.get_attribute("aria-sort")) == (["long", "middle", "short"], "descending")
    button.press("Enter")
    assert (notes(table), header.get_attribute("aria-sort")) == (["short", "middle", "long"], "ascending")
    assert button.evaluate("element => getComputedStyle(element).outlineStyle") != "none", "the focus is seen"
    table.get_by_role("button", name="loss").press("Space")
    assert notes(table) == ["short", "long", "middle"]
    assert header.get_attribute("aria-sort") == "none"
    table.get_by_role("button", name="started").click()
    assert notes(table) == ["middle", "long", "short"]


def test_the_table_of_runs_sorts_also_where_no_kernel_is(lab: Lab) -> None:
    book = lab.open([RUNS + THREE + "nbddp.runs()"])
    page = book.page
    book.run_all()
    output = book.output("3 runs ·")
    sorts(output)
    assert output.evaluate(IMAGES) == [True] * 3
    assert output.get_by_role("img").first.get_attribute("alt") == "loss from 3.929 to 0.2413 in 400 steps"
    assert output.evaluate(ALIGNED), "cells stand below the names of their columns"
    book.screenshot("runs", of=output)
    book.theme("JupyterLab Dark")
    page.locator("#jupyterlab-splash").wait_for(state="detached")
    book.screenshot("runs-dark", of=output)
    assert faint(output) == []
    page.set_viewport_size({"width": 760, "height": 900})
    page.wait_for_function("document.querySelector('.jp-OutputArea-output').getBoundingClientRect().width < 600")
    assert overflowing(output) == [], "rows wrap"
    assert output.evaluate(ALIGNED), "all of them at the same columns"
    assert output.get_by_role("table").get_by_role("row").count() == 4
    book.screenshot("runs-narrow", of=output)
    book.theme("JupyterLab Light")
    page.set_viewport_size({"width": 1100, "height": 900})
    book.save()

    saved = lab.reopen()
    page.locator(".jp-OutputArea-output", has_text="3 runs ·").wait_for()
    sorts(saved.output("3 runs ·"))

    foreign = book.path.with_name("foreign.ipynb")
    foreign.write_text(book.path.read_text(encoding="utf-8").replace("middle", "median"), encoding="utf-8")  # breaks the signature
    output = lab.reopen("foreign.ipynb").output("3 runs ·")
    assert notes(output) == ["median", "long", "short"]
    assert output.get_by_role("button").count() == 0, "nothing looks as if it sorted"
    assert output.evaluate(ALIGNED)
    assert output.evaluate(IMAGES) == [True] * 3


def test_runs_side_by_side(lab: Lab) -> None:
    book = lab.open([RUNS + THREE + "made = nbddp.compare(nbddp.runs())\nmade", "made.figure", "nbddp.compare(nbddp.runs()[0])"])
    page = book.page
    book.run_all()
    output = book.output("loss at the end")
    assert output.evaluate(IMAGES) == [True] * 4
    picture = output.get_by_role("img", name="Training and validation loss of 3 runs over step")
    assert picture.evaluate("element => element.naturalWidth") > 1000
    assert [row.locator("td").nth(2).inner_text() for row in output.locator("tbody tr").all()] == ["0.001", "0.01", "0.1"]
    book.screenshot("compare", of=output)
    book.theme("JupyterLab Dark")
    page.locator("#jupyterlab-splash").wait_for(state="detached")
    book.screenshot("compare-dark", of=output)
    assert faint(output) == []
    assert book.output("nbddp.compare takes two different runs or more").inner_text().startswith("ConfigError: ")
    cells = book.save().cells
    assert set(cells[0].outputs[0]["data"]) == {"text/html", "image/png", "text/plain"}
    figure = base64.b64decode(cells[1].outputs[0]["data"]["image/png"])
    assert figure.startswith(b"\x89PNG")


CARDS = 20
MAKE = (
    RUNS
    + f"""
import math, random
noise = random.Random(0)
for index in range({CARDS}):
    run(0.1 / (index + 1), [2 * math.exp(-step / 300 / (1 + index)) * math.exp(noise.gauss(0, 0.1)) + 0.1 for step in range(1200)], f"run {{index}}")
found = nbddp.runs()
"""
)
DELAY_S = 1.0
"""A second is what a page may take longer to be there before people notice that they wait."""
LONGEST_TASK = """
window.longest = 0;
new PerformanceObserver(list => list.getEntries().forEach(entry => { window.longest = Math.max(window.longest, entry.duration); }))
  .observe({type: "longtask", buffered: true});
"""


def opened(lab: Lab, name: str, shown: str) -> tuple[float, float]:
    """Seconds from the address to the moment when the top of a notebook shows this element, and the longest during which the page was deaf meanwhile."""
    began = time.monotonic()
    page = lab.reopen(name, idle=False).page
    page.locator(shown).first.wait_for()
    page.wait_for_function("selector => { const e = document.querySelector(selector); return e.tagName !== 'IMG' || e.complete; }", arg=shown)
    return time.monotonic() - began, page.evaluate("window.longest") / 1000


def test_a_notebook_full_of_finished_runs_opens_without_noticeable_delay(lab: Lab) -> None:
    made = lab.open([MAKE, *(f"nbddp.attach(found[{index}].dir).card()" for index in range(CARDS))])
    made.run_all()
    made.page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-OutputArea-output").wait_for(timeout=100_000)
    made.idle()
    saved = made.save()
    assert sum(len(cell.outputs) for cell in saved.cells) == CARDS
    size = made.path.stat().st_size
    for cell in saved.cells:
        cell.outputs = []
    nbformat.write(saved, made.path.with_name("bare.ipynb"))

    made.page.add_init_script(LONGEST_TASK)
    times = [(opened(lab, "bare.ipynb", ".jp-Cell .cm-line"), opened(lab, "notebook.ipynb", ".jp-OutputArea-output img")) for _ in range(3)]
    bare_s, full_s = (min(run[kind][0] for run in times) for kind in (0, 1))
    deaf_s = min(full[1] for _, full in times)
    print(f"{size / 1e6:.1f} MB, {full_s:.2f} s to the first card, {bare_s:.2f} s to the first cell without any; deaf for {deaf_s:.2f} s at most")
    assert size < CARDS * 200_000
    assert full_s - bare_s < DELAY_S
    assert deaf_s < DELAY_S

    # To the end of it, and everything is there.
    book = lab.reopen()
    page: Page = book.page
    began = time.monotonic()
    last = page.locator(".jp-Notebook .jp-CodeCell").last
    last.scroll_into_view_if_needed()
    card = last.locator(".jp-OutputArea-output", has_text="finished")
    card.locator("img").first.wait_for()
    assert time.monotonic() - began < DELAY_S
    assert card.evaluate(IMAGES) == [True]
    assert page.locator(".jupyter-widgets").count() == 0
    book.screenshot("twenty-runs")
