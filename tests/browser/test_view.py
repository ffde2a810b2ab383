from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.lab import Lab

pytestmark = pytest.mark.browser

TESTS = Path(__file__).resolve().parents[1]
WATCH = f"""
import sys, threading, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.fake_run import PLAN_LINE, FakeRun
from nbddp.kernel.card import make_card
from nbddp.kernel.follow import Follower
from nbddp.kernel.view import open_view

run = FakeRun(Path("nbddp_runs"))
def write():
    run.start()
    for _ in range(20):
        run.train(60)
        run.print(f"step {{run.step}}: \\x1b[32maccuracy\\x1b[0m {{run.step / 4000:.3f}}")
        time.sleep(0.05)
    while not Path("gate").exists():
        time.sleep(0.05)
    run.train(run.total_steps - run.step)
    run.end()
writer = threading.Thread(target=write)
writer.start()
follower = Follower(run.run_dir, lambda: None)
view = open_view(run.run_dir, follower.state, plan_line=PLAN_LINE)
follower.add_listener(view.update)
follower.start()
follower.done.wait()
writer.join()
view.finish(make_card(run.run_dir, follower.state, plan_line=PLAN_LINE, holds="net: epoch 10", error=None))
"""
OVERFLOWS = (
    "element => [element, ...element.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > element.getBoundingClientRect().right + 1).length"
)


def test_the_live_view_fits_narrow_and_wide_and_becomes_the_card(lab: Lab) -> None:
    book = lab.open([WATCH])
    page = book.page
    book.run_all()
    live = book.output("step 1,200 of 3,900")
    book.output("step 1200: accuracy 0.300")
    page.locator(".jp-OutputArea-output img").first.wait_for()
    for width in (1100, 600):
        area = page.locator(".jp-OutputArea-output").first
        box = area.bounding_box()
        assert box is not None
        assert page.viewport_size is not None
        page.set_viewport_size({"width": int(page.viewport_size["width"] + width - box["width"]), "height": 1100})
        page.wait_for_function("width => Math.abs(document.querySelector('.jp-OutputArea-output').getBoundingClientRect().width - width) < 2", arg=width)
        assert area.evaluate(OVERFLOWS) == 0
        book.screenshot(f"view-{width}", of=area)
    assert "running" in live.inner_text()

    (lab.folder / "gate").touch()
    card = book.output("3,900 · epoch 10 of 10")
    assert "net: epoch 10" in card.inner_text()
    assert page.locator(".jupyter-widgets").count() == 0
    assert page.get_by_text("Loading widget").count() == 0
    book.screenshot("card", of=card)
    saved = book.save()
    (output,) = saved.cells[0].outputs
    assert set(output["data"]) == {"text/html", "image/png", "text/plain"}


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
