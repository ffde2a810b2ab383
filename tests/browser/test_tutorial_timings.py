"""The tutorial on the timings: what its text says of the live view is there while its cells run; the pictures in it are these screenshots, made small."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from support.lab import ARTEFACTS

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "03_reading_the_timings.ipynb"
CODE = [cell.source for cell in nbformat.read(SOURCE, as_version=4).cells if cell.cell_type == "code"]
WIDTH = 720


def place(words: str) -> int:
    """Which code cell has these words in its first line, counted from 0."""
    (found,) = [index for index, source in enumerate(CODE) if words in source.splitlines()[0]]
    return found


def live(book: LabNotebook, index: int) -> Locator:
    """The view of a run that has been advised about for some bars."""
    book.run_cell(index)
    view = book.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".nbddp-view")
    view.get_by_text("Advice", exact=True).wait_for(timeout=60_000)
    view.get_by_text(re.compile(r"^rank \d slowest, \d+ %$")).nth(2).wait_for()
    return view


def cut(book: LabNotebook, name: str, view: Locator, below: int) -> None:
    """A screenshot of a view down to so many pixels below the top of its tabs."""
    view.evaluate("element => element.scrollIntoView()")
    whole, tabs = view.bounding_box(), view.get_by_role("tablist").bounding_box()
    assert whole is not None
    assert tabs is not None
    ARTEFACTS.mkdir(exist_ok=True)
    clip = {**whole, "height": tabs["y"] + below - whole["y"]}
    book.page.screenshot(path=ARTEFACTS / f"{name}.png", clip=clip)  # type: ignore[arg-type]


def test_the_view_says_what_the_tutorial_says_of_it(lab: Lab) -> None:
    shutil.copy(SOURCE, lab.folder)
    book = lab.reopen(SOURCE.name)
    page = book.page
    page.set_viewport_size({"width": WIDTH + 460, "height": 1300})
    slow = place("--as slow")
    output = page.locator(".jp-Notebook .jp-CodeCell").nth(slow).locator(".jp-OutputArea-output").first.bounding_box()
    assert output is not None
    page.set_viewport_size({"width": int(2 * WIDTH + 460 - output["width"]), "height": 1300})
    for index in range(slow):
        book.run_cell(index)
    book.idle()

    view = live(book, slow)
    cut(book, "03_slow_loader", view, -6)
    assert view.get_by_text("is waiting for data, which the ranks make themselves between their steps").is_visible()
    assert re.fullmatch(r"--num-workers \d+", view.locator("code").first.inner_text())
    book.idle()

    view = live(book, place("--as uneven"))
    cut(book, "03_straggler", view, 130)
    assert view.get_by_text("Its step does what the others' does not").is_visible()
    assert view.locator("code", has_text="%ddp_stacks").is_visible()
    assert view.get_by_role("row", name=re.compile("^0 slowest")).is_visible()
    assert view.get_by_text("largest singular value").first.is_visible()
    shares = [view.get_by_role("row", name=re.compile(f"^{rank}")).get_by_role("img").get_attribute("aria-label") or "" for rank in (0, 1)]
    (forward, _), (_, sync) = ([int(number) for number in re.findall(r"(?:forward|sync) <?(\d+) %", share)] for share in shares)
    assert forward > 40
    assert sync > 20
    book.idle()
