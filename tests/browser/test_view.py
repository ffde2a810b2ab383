from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from nbddp.kernel.card import make_card
from nbddp.kernel.follow import fold_all
from support.fake_run import PLAN_LINE, finished
from support.looks import controls, faint, overflowing

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

TESTS = Path(__file__).resolve().parents[1]
IMPORTS = f"""
import sys, threading, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.fake_run import PLAN_LINE, FakeRun
import nbddp
from nbddp.kernel.card import make_card
from nbddp.kernel.follow import Follower
from nbddp.kernel.view import open_view
"""
# A run that waits for a file after 1,200 of its steps.
WRITE = """
run = FakeRun(Path("nbddp_runs"))
def write():
    run.start()
    run.ranks[0].emit("stage", stage=0, name="head", step=0, total_steps=run.total_steps)
    for _ in range(20):
        if run.step == 600:
            run.ranks[0].emit("stage", stage=1, name="body", step=600, total_steps=run.total_steps)
        run.train(60)
        run.print(f"step {run.step}: \\x1b[32maccuracy\\x1b[0m {run.step / 4000:.3f}")
        run.print(f"\\r{5 * run.step // 60:3}%|{'#' * (run.step // 120):10}|", rank=1, end="")
    run.print("\\n\\x1b[1;31mred and bold\\x1b[0m \\x1b[93mpale yellow\\x1b[m <b>no tag</b>", rank=1)
    while not Path("gate").exists():
        time.sleep(0.05)
    run.train(run.total_steps - run.step)
    run.end()
writer = threading.Thread(target=write)
writer.start()
"""
WATCH = (
    IMPORTS
    + WRITE
    + """
follower = Follower(run.run_dir, lambda: None)
view = open_view(run.run_dir, follower.state, plan_line=PLAN_LINE)
follower.add_listener(view.update)
follower.start()
follower.done.wait()
writer.join()
view.finish(make_card(run.run_dir, follower.state, plan_line=PLAN_LINE, holds="net: epoch 10", error=None))
"""
)
# As the magic would, with all its controls; the cell blocks.
ATTACH = (
    IMPORTS
    + WRITE
    + """
seen = nbddp.attach(run.run_dir.path)
seen.view()
seen.follower.done.wait()
writer.join()
"""
)

IN_BACKGROUND = IMPORTS + WRITE + "seen = nbddp.attach(run.run_dir.path)\nseen.view()"


def watch(lab: Lab) -> tuple[LabNotebook, Locator]:
    """A notebook that shows a run of 1,200 steps and waits."""
    book = lab.open([ATTACH])
    book.run_all()
    book.output("step 1,200 of 3,900")
    area = book.page.locator(".jp-OutputArea-output").first
    area.locator("img[alt^='loss over steps']").wait_for()
    area.get_by_text("rank 1 slowest").first.wait_for()
    return book, area


def go_on(lab: Lab, book: LabNotebook) -> Locator:
    """Let the run come to its end; return the card."""
    (lab.folder / "gate").touch()
    return book.output("3,900 · epoch 10 of 10")


def resize(book: LabNotebook, area: Locator, width: int) -> None:
    page = book.page
    box = area.bounding_box()
    assert box is not None
    assert page.viewport_size is not None
    page.set_viewport_size({"width": int(page.viewport_size["width"] + width - box["width"]), "height": 1300})
    page.wait_for_function("width => Math.abs(document.querySelector('.jp-OutputArea-output').getBoundingClientRect().width - width) < 2", arg=width)


def test_the_live_view_fits_narrow_and_wide_and_becomes_the_card(lab: Lab) -> None:
    book = lab.open([WATCH])
    page = book.page
    book.run_all()
    live = book.output("step 1,200 of 3,900")
    book.output("step 1200: accuracy 0.300")
    page.locator(".jp-OutputArea-output img").first.wait_for()
    area = page.locator(".jp-OutputArea-output").first
    for width in (1100, 600):
        resize(book, area, width)
        assert overflowing(area) == []
        book.screenshot(f"view-{width}", of=area)
    assert "running" in live.inner_text()

    card = go_on(lab, book)
    assert "net: epoch 10" in card.inner_text()
    assert page.locator(".jupyter-widgets").count() == 0
    assert page.get_by_text("Loading widget").count() == 0
    book.screenshot("card", of=card)
    saved = book.save()
    (output,) = saved.cells[0].outputs
    assert set(output["data"]) == {"text/html", "image/png", "text/plain"}


def test_in_both_themes_all_is_readable_fits_and_has_a_name(lab: Lab) -> None:
    book, area = watch(lab)
    area.get_by_role("tab", name="rank 1").click()
    area.get_by_text("red and bold").wait_for()
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        book.theme(theme)
        for width in (1000, 600):
            resize(book, area, width)
            assert overflowing(area) == []
            assert faint(area) == []
            book.screenshot(f"view-{theme.split()[1].lower()}-{width}", of=area)
    named = controls(area)
    assert {role for role, _ in named} >= {"button", "checkbox", "combobox", "tab"}
    assert [role for role, name in named if not name.strip()] == []
    assert ("button", "Stop in order") in named
    assert [name for role, name in named if role == "tab"] == ["printed", "rank 0", "rank 1"]
    card = go_on(lab, book)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        book.theme(theme)
        assert faint(card) == []
        assert overflowing(card) == []
        book.screenshot(f"card-{theme.split()[1].lower()}", of=card)


def test_logs_are_shown_as_a_terminal_would_one_at_a_time(lab: Lab) -> None:
    book, area = watch(lab)
    page = book.page
    assert area.get_by_text("step 1200: accuracy 0.300").is_visible()
    colour = area.get_by_text("accuracy", exact=True).last.evaluate("element => getComputedStyle(element).color")
    assert colour == "rgb(26, 107, 47)"
    area.get_by_role("tab", name="rank 1").click()
    log = area.locator(".nb-log", has_text="red and bold")
    log.wait_for()
    assert log.inner_text().splitlines() == ["100%|##########|", "red and bold pale yellow <b>no tag</b>"]
    weight = log.get_by_text("red and bold").evaluate("element => getComputedStyle(element).fontWeight")
    assert weight == "700"
    shown = page.locator(".nb-log pre")
    assert [text for text in shown.all_inner_texts() if text] == [log.inner_text()]  # the others were let go
    assert area.get_by_text("step 1200: accuracy").count() == 0
    area.get_by_role("tab", name="printed").click()
    area.get_by_text("step 1200: accuracy 0.300").wait_for()
    go_on(lab, book)


def test_the_curve_is_drawn_as_its_controls_say_while_the_cell_blocks(lab: Lab) -> None:
    book, area = watch(lab)
    page = book.page
    picture = area.locator("img[alt^='loss over steps']")
    sources = [picture.get_attribute("src")]

    def drawn_anew() -> None:
        page.wait_for_function("old => document.querySelector('.nbddp-view img').src !== old", arg=sources[-1], timeout=10_000)
        sources.append(picture.get_attribute("src"))

    area.get_by_role("checkbox", name="log scale").check()
    drawn_anew()
    book.screenshot("view-log-scale", of=area)
    area.get_by_role("combobox", name="smoothing").select_option("off")
    drawn_anew()
    area.get_by_role("combobox", name="smoothing").select_option("strong")
    drawn_anew()
    assert len(set(sources)) == 4
    area.get_by_role("combobox", name="smoothing").select_option("medium")
    drawn_anew()
    area.get_by_role("checkbox", name="log scale").uncheck()
    drawn_anew()
    assert sources[4] == sources[1]  # the same events, drawn the same way
    assert sources[5] == sources[0]
    go_on(lab, book)


def test_after_a_reload_the_view_of_a_run_in_the_background_is_there_again(lab: Lab) -> None:
    book = lab.open([IN_BACKGROUND])
    book.run_all()
    book.output("step 1,200 of 3,900")
    book.save()
    again = lab.reopen()
    area = again.output("step 1,200 of 3,900")
    area.locator("img[alt^='loss over steps']").wait_for()
    assert ("button", "Stop in order") in controls(area)
    area.get_by_role("tab", name="rank 1").click()
    area.get_by_text("red and bold").wait_for()
    again.screenshot("view-reloaded", of=area)
    card = go_on(lab, again)
    assert "finished" in card.inner_text()


def test_after_a_reload_while_the_cell_blocks_the_card_takes_the_place_of_the_view(lab: Lab) -> None:
    book, _ = watch(lab)
    book.save()
    again = lab.reopen(idle=False)  # a page that opens now learns of the kernel's widgets when the cell is over
    card = go_on(lab, again)
    assert "finished" in card.inner_text()
    again.idle()
    for left in ("Loading widget", "Error displaying widget"):
        assert again.page.get_by_text(left).count() == 0
    again.screenshot("card-reloaded", of=card)


def test_a_view_whose_output_never_reached_the_file_is_brought_back_by_attaching(lab: Lab) -> None:
    book = lab.open([IN_BACKGROUND, "%load_ext nbddp\n%ddp_attach digits"])
    book.run_cell(0)
    book.output("step 1,200 of 3,900")
    again = lab.reopen()
    assert again.page.locator(".jp-OutputArea-output").count() == 0  # nothing was saved
    again.run_cell(1)
    again.output("step 1,200 of 3,900")
    card = go_on(lab, again)
    assert "finished" in card.inner_text()


def test_the_card_of_a_notebook_that_is_not_trusted_says_the_same(lab: Lab) -> None:
    book = lab.open(["Path = __import__('pathlib').Path; Path('gate').touch()\n" + WATCH])
    book.run_all()
    book.output("net: epoch 10")
    saved = book.save()
    text = book.path.read_text(encoding="utf-8").replace("net: epoch 10", "net: epoch 11")  # breaks the signature
    other = book.path.with_name("foreign.ipynb")
    other.write_text(text, encoding="utf-8")
    assert saved.cells[0].outputs
    foreign = lab.reopen("foreign.ipynb")
    card = foreign.output("net: epoch 11")
    assert "3,900 · epoch 10 of 10" in card.inner_text()
    assert "where a step's" in card.inner_text().lower()
    image = card.locator("img")
    assert image.evaluate("element => element.complete && element.naturalWidth") > 500
    foreign.screenshot("card-untrusted", of=card)


def test_a_notebook_of_twenty_finished_runs_opens_without_delay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab.folder)
    run_dir = finished(Path("nbddp_runs"), nproc=8)
    card = make_card(run_dir, fold_all(run_dir), plan_line=PLAN_LINE, holds="net: epoch 10", error=None)
    cells = [new_code_cell(f"run {number}", outputs=[new_output("display_data", data=card.mimebundle())]) for number in range(20)]
    kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), lab.folder / "twenty.ipynb")
    lab.open(["'no run'"], "none.ipynb")
    took_s = []
    for name in ("none.ipynb", "twenty.ipynb"):
        began = time.monotonic()
        book = lab.reopen(name)
        if name == "twenty.ipynb":
            book.output("net: epoch 10")
        took_s.append(time.monotonic() - began)
    print(f"opening took {took_s[0]:.2f} s without runs and {took_s[1]:.2f} s with 20; {(lab.folder / 'twenty.ipynb').stat().st_size / 1e6:.1f} MB")
    assert took_s[1] < took_s[0] + 2
