"""The view and the card in every state that a run can be in: each fits, can be read and is kept as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.looks import controls, faint, overflowing

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

TESTS = Path(__file__).resolve().parents[1]
SETUP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from IPython.display import display
from nbddp.config import TrainConfig
from nbddp.kernel.card import make_card
from nbddp.kernel.follow import fold_all
from nbddp.kernel.stopping import stopping_of
from nbddp.kernel.view import open_view
from support.fake_run import PLAN_LINE, FakeRun
class Run:
    def stop(self): run.run_dir.ask("stop")
    def stacks(self): return "rank 0\\n  File \\"Cell In[7]\\", line 12 in training_step\\n  File \\"loop.py\\", line 88 in run\\n" * 3
    def terminate(self): pass
    def kill(self): pass
owner = Run()
def made(**options):
    global run
    run = FakeRun(Path("nbddp_runs"), **options)
    return run
def live():
    global view, stopping
    stopping = stopping_of(run.run_dir, owner)
    state = fold_all(run.run_dir)
    view = open_view(run.run_dir, state, plan_line=PLAN_LINE, controls=stopping, config=TrainConfig(nproc=run.nproc, epochs=10))
    view._curve.show(view._curve.render(state) or "")
    view._logs.show(view._logs.render(state) or "<pre>nothing yet</pre>")
    view._curve.box.remove_class("nb-hidden") if state.step else view._curve.box.add_class("nb-hidden")
def card(state, **result):
    run.end(state, **result)
    display(make_card(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, holds=None, error=None))
print("ready")
"""
RUNNING = "made(nproc={nproc}); run.start(); run.train(1500); [run.print(f'epoch {{n}}: \\x1b[32mgood\\x1b[0m') for n in range(30)]\n"
WARNING = "run.ranks[0].emit('message', level='warning', text='step 3: the loss of rank 1 is not finite; training goes on; --on-nan skip or stop keeps it')\n"
FAILED = """
run.fail()
card("failed", error={"kind": "WorkerError", "message": "rank 1, Cell In[7], line 12: IndexError: index 10 is out of bounds for dimension 0 with size 10",
     "rank": 1, "traceback": "Cell In[7], line 12, in training_step\\n    y = table[labels]\\nIndexError: index 10 is out of bounds " + "x" * 300})
"""
LOST = """
card("failed", error={"kind": "WorkerLost", "message": "rank 1 was killed by SIGKILL: this machine ends what takes too much memory (dmesg says so)",
     "rank": 1, "signal": 9})
"""
LIVE = {
    "starting": "made(); live()",
    "running-1": RUNNING.format(nproc=1) + "live()",
    "running-2": RUNNING.format(nproc=2) + WARNING + "live()",
    "running-8": RUNNING.format(nproc=8) + "live()",
    "validation": RUNNING.format(nproc=2) + "run.ranks[0].emit('phase', phase='validation'); live()",
    "stopping-1": RUNNING.format(nproc=2) + "run.ranks[0].emit('stopping', reason='asked', text='stopped as asked'); live(); stopping.advance()",
    "stopping-2": RUNNING.format(nproc=2) + "live(); stopping.advance(); stopping.advance()",
    "stopping-3": RUNNING.format(nproc=2) + "live(); stopping.advance(); stopping.advance(); stopping.advance()",
}
ENDED = {
    "finished": "made(); run.start(); run.train(run.total_steps); card('finished')",
    "finished-8": "made(nproc=8); run.start(); run.train(run.total_steps); card('finished')",
    "stopped": RUNNING.format(nproc=2) + "run.ranks[0].emit('stopping', reason='asked', text='stopped as asked'); card('stopped')",
    "failed": RUNNING.format(nproc=2) + FAILED,
    "failed-at-once": "made(); run.start()" + FAILED,
    "lost": RUNNING.format(nproc=2) + LOST,
}
LABELS = {
    "stopping-1": "Show all stacks and terminate",
    "stopping-2": "Kill all ranks",
    "stopping-3": "Killed",
}


def resize(book: LabNotebook, area: Locator, width: int) -> None:
    page, box = book.page, area.bounding_box()
    assert box is not None
    assert page.viewport_size is not None
    page.set_viewport_size({"width": int(page.viewport_size["width"] + width - box["width"]), "height": 1500})
    page.wait_for_function("width => Math.abs(document.querySelector('.jp-OutputArea-output').getBoundingClientRect().width - width) < 2", arg=width)


def states(lab: Lab, cells: dict[str, str]) -> tuple[LabNotebook, dict[str, Locator]]:
    """A notebook that shows each of these, and where."""
    book = lab.open([SETUP, *cells.values()])
    book.run_all()
    shown = book.page.locator(".jp-Notebook .jp-CodeCell")
    areas = {}
    for number, name in enumerate(cells, 1):
        areas[name] = shown.nth(number).locator(".jp-OutputArea-output").first
        areas[name].locator(".nb-head, img, summary, table").first.wait_for(timeout=60_000)
    book.idle()
    return book, areas


@pytest.mark.parametrize("cells", [LIVE, ENDED], ids=["live", "ended"])
def test_every_state_fits_and_can_be_read(lab: Lab, cells: dict[str, str]) -> None:
    book, areas = states(lab, cells)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        book.theme(theme)
        for width in (900, 600, 360):
            resize(book, book.page.locator(".jp-OutputArea-output").first, width)
            for name, area in areas.items():
                assert overflowing(area) == [], (name, theme, width)
                assert faint(area) == [], (name, theme, width)
                book.screenshot(f"state-{name}-{theme.split()[1].lower()}-{width}", of=area)
    for name, area in areas.items():
        named = controls(area)
        assert [role for role, label in named if not label.strip()] == [], name
        buttons = [label for role, label in named if role == "button"]
        assert buttons == ([LABELS.get(name, "Stop in order")] if cells is LIVE else []), name


def test_text_beside_the_curve_is_of_one_size_and_within_it(lab: Lab) -> None:
    book, areas = states(lab, {"running": LIVE["running-2"]})
    curve = areas["running"].locator(".nb-picture")
    for width in (900, 600, 360):
        resize(book, book.page.locator(".jp-OutputArea-output").first, width)
        box = curve.bounding_box()
        assert box is not None
        labels = curve.locator("span", has_text="step").or_(curve.locator("span", has_text="1,000")).or_(curve.locator("span", has_text="0.5"))
        assert labels.count() >= 3
        for label in labels.all():
            assert label.evaluate("element => getComputedStyle(element).fontSize") == "11px"
            place = label.bounding_box()
            assert place is not None
            assert box["x"] <= place["x"], label.inner_text()
            assert place["x"] + place["width"] <= box["x"] + box["width"], label.inner_text()
            assert place["y"] + place["height"] <= box["y"] + box["height"], label.inner_text()


def test_figures_stand_in_columns(lab: Lab) -> None:
    book, areas = states(lab, {"running": LIVE["running-2"]})
    for width in (900, 600, 360):
        resize(book, book.page.locator(".jp-OutputArea-output").first, width)
        tiles = areas["running"].locator(".nb-figures > div > div").first.locator("> div")
        boxes = [box for box in (tile.bounding_box() for tile in tiles.all()) if box is not None]
        assert len(boxes) == 4
        first = sorted({round(box["x"]) for box in boxes if abs(box["y"] - boxes[0]["y"]) < 1})
        assert len(first) >= 2
        assert {round(box["x"]) for box in boxes} <= set(first)
