"""The configuration panel in JupyterLab: typed into, read, pressed, and looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

from support.example import ALONE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

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
    assert tab(panel, "ranks and batch").inner_text() == "ranks and batch \u27171"
    book.screenshot("panel-error", of=panel)
    box.press("Control+a")
    box.press_sequentially("100", delay=30)
    panel.get_by_text("100 = 2 x 50").wait_for()
    assert panel.get_by_role("alert").count() == 0
    panel.get_by_label("nproc", exact=True).fill("1")
    panel.get_by_text("1 x CPU rank · 100 = 1 x 100").wait_for()
    panel.get_by_text("1 rank x 2 workers x 2 batches").wait_for()
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
    panel.get_by_text("its view is below").wait_for(timeout=30_000)
    outputs = book.page.locator(".jp-Notebook .jp-CodeCell").nth(1).locator(".jp-OutputArea-output")
    outputs.filter(has_text="2 x CPU ranks · 64 = 2 x 32").last.wait_for()
    outputs.filter(has_text=re.compile("finished.*8 · epoch 1 of 1", re.DOTALL)).wait_for(timeout=60_000)
    book.screenshot("panel-run")
    panel.get_by_text("its card is below").wait_for()
    book.run_cell(2)
    book.output("'finished'")
    assert panel.get_by_role("button", name="Run").is_enabled()


def test_it_is_usable_narrow_dark_and_by_keyboard(lab: Lab) -> None:
    book, panel = opened(lab)
    page = book.page
    assert panel.evaluate(NAMELESS) == 0
    panel.get_by_label("nproc", exact=True).focus()
    order = []
    while not order or order[-1] != "Write cell":
        order.append(page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).textContent"))
        page.keyboard.press("Tab")
    fields = ["nproc", "devices", "backend", "batch_size", "per_rank_batch_size", "val_batch_size", "accumulate"]
    assert order == [*fields, "val", "loss", "as", "note", "background", "body of the cell", "Run", "Write cell"]
    area = page.locator(".jp-OutputArea-output", has=page.locator(".nbddp-panel"))
    box = area.bounding_box()
    assert box is not None
    assert page.viewport_size is not None
    for width in (1000, 600):
        page.set_viewport_size({"width": int(page.viewport_size["width"] + width - area.bounding_box()["width"]), "height": 1500})
        page.wait_for_function("width => Math.abs(document.querySelector('.nbddp-panel').parentElement.getBoundingClientRect().width - width) < 2", arg=width)
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


def labels(panel: Locator) -> list[float]:
    """Where the visible controls beside a label begin."""
    found: list[float] = panel.evaluate("""panel => [...panel.querySelectorAll('.widget-text input, .widget-dropdown select, .widget-textarea textarea')]
        .filter(e => e.offsetParent).map(e => Math.round(e.getBoundingClientRect().left))""")
    return found


def test_controls_are_aligned_and_tabs_stay_in_their_rows(lab: Lab) -> None:
    book, panel = opened(lab)
    panel.get_by_role("button", name="Write cell").click()
    panel.get_by_label("cell", exact=True).wait_for()
    heights = "panel => panel.querySelector('.lm-TabBar').getBoundingClientRect().height"
    for width in (1300, 1000, 800):
        book.page.set_viewport_size({"width": width, "height": 1500})
        assert max(labels(panel)) - min(labels(panel)) <= 1, width
        panel.get_by_label("batch_size", exact=True).fill("")
        panel.get_by_text("64 = 2 x 32 (default)").wait_for()
        before = panel.evaluate(heights)
        panel.get_by_label("batch_size", exact=True).fill("101")
        tab(panel, "ranks and batch \u27171").wait_for()
        assert panel.evaluate(heights) == before, width
        edges = panel.evaluate("panel => [...panel.querySelectorAll('.nb-tiles > div')].map(e => Math.round(e.getBoundingClientRect().left))")
        assert len(set(edges)) <= 6, "tiles stand in columns"
    for name in ("ranks and batch", "optimisation", "precision and speed", "checkpoints", "launch", "trackers"):
        tab(panel, name).click()
        cut = panel.evaluate("panel => [...panel.querySelectorAll('label')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)")
        assert cut == [], "names of options are whole"
        book.screenshot(f"panel-{name.replace(' ', '-')}", of=panel)
    for code in panel.locator(".nb-code").all():
        assert code.evaluate("e => e.getClientRects().length") <= 1, "an option in a text does not break"


def test_a_key_press_is_answered_within_100_ms(lab: Lab) -> None:
    book, panel = opened(lab)
    page = book.page
    panel.evaluate("""panel => {
        window.answers = []; window.awaited = ''; let pressed = 0;
        const head = panel.querySelector('.nb-head');
        panel.addEventListener('input', () => { pressed = performance.now(); }, true);
        const seen = () => { if (pressed && head.textContent.includes(window.awaited)) { window.answers.push(performance.now() - pressed); pressed = 0; } };
        new MutationObserver(seen).observe(panel, {subtree: true, childList: true, characterData: true});
    }""")
    panel.get_by_label("batch_size", exact=True).click()
    keys = [
        ("8", "8 = 2 x 4"),
        ("Backspace", "64 = 2 x 32"),
        ("6", "6 = 2 x 3"),
        ("Backspace", "64 = 2 x 32"),
        ("x", "batch_size='x'"),
        ("Backspace", "64 ="),
        ("4", "4 = 2 x 2"),
    ]
    for count, (key, awaited) in enumerate(keys, 1):
        page.evaluate("text => { window.awaited = text; }", awaited)
        page.keyboard.press(key)
        page.wait_for_function("count => window.answers.length === count", arg=count)
    answers = sorted(page.evaluate("window.answers"))
    assert answers[len(answers) // 2] < 100, answers


def test_while_a_cell_runs_errors_are_told_and_run_waits(lab: Lab) -> None:
    book, panel = opened(lab, "import time\nfor _ in range(8): time.sleep(1)\nprint('slept')", "f'trained with {waited.wait().config.batch_size}'")
    book.run_cell(2)
    book.page.get_by_text("Python 3 (ipykernel) | Busy").wait_for()
    box = panel.get_by_label("batch_size", exact=True)
    box.fill("12x")
    panel.get_by_role("alert").get_by_text("batch_size='12x' must be a valid integer").wait_for(timeout=3000)
    panel.get_by_text("a cell is running: what you change is checked when it has ended").wait_for(timeout=3000)
    box.fill("128")
    panel.get_by_label("as", exact=True).fill("waited")
    panel.get_by_role("button", name="Run").click()
    panel.get_by_text("a cell is running: the run starts when it has ended").wait_for(timeout=3000)
    assert panel.get_by_role("button", name="Run").is_disabled()
    assert book.page.get_by_text("slept", exact=True).count() == 0
    book.screenshot("panel-busy", of=panel)
    panel.get_by_text("has finished: its card is below").wait_for(timeout=60_000)
    book.run_cell(3)
    book.output("'trained with 128'")
    assert panel.get_by_role("button", name="Run").is_enabled()


def test_run_after_a_reload_is_followed_in_the_panel_and_attached_to(lab: Lab) -> None:
    book, panel = opened(lab, "nbddp.last_run.view()", "nbddp.last_run.stop()\nnbddp.last_run.wait().state")
    book.save()
    again = lab.reopen()
    page = again.page
    panel = page.locator(".nbddp-panel")
    tab(panel, "length").click()
    panel.get_by_label("epochs", exact=True).fill("2000")
    panel.get_by_text("16,000 steps in all").wait_for()
    panel.get_by_role("button", name="Run").click()
    panel.get_by_text("this page was loaded after the panel and has no view of it").wait_for(timeout=30_000)
    panel.get_by_text(re.compile(r"step \d+ of 16,000")).wait_for(timeout=30_000)
    again.screenshot("panel-reloaded", of=panel)
    again.run_cell(2)
    page.locator(".nbddp-view").get_by_text(re.compile(r"step [\d,]+ of 16,000")).wait_for(timeout=30_000)
    again.run_cell(3)
    again.output("'stopped'")
    panel.get_by_text("has been stopped").wait_for()


def test_a_panel_whose_kernel_is_gone_leaves_a_text(lab: Lab) -> None:
    book, panel = opened(lab)
    page = book.page
    rest = page.locator(".nbddp-rest")
    assert rest.is_hidden()
    panel.get_by_label("batch_size", exact=True).fill("128")
    panel.get_by_text("128 = 2 x 64").wait_for()
    cell = "%%ddp_train net samples -n 2 --batch-size 128 --num-workers 2\nloss = criterion"
    page.wait_for_function("cell => document.querySelector('.nbddp-rest pre')?.textContent === cell", arg=cell)  # an update may replace the element
    book.save()
    book.menu("Kernel", "Restart Kernel\u2026")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    rest.wait_for()
    assert panel.is_hidden()
    book.screenshot("panel-restarted")
    again = lab.reopen()
    page.locator(".nbddp-rest").get_by_text("run this cell to open it again").wait_for()
    page.locator(".nbddp-rest pre").get_by_text("--batch-size 128").wait_for()
    assert dead_texts(page) == []
    again.screenshot("panel-reopened")
    html, _ = HTMLExporter().from_notebook_node(nbformat.read(again.path, as_version=4))
    (lab.folder / "notebook.html").write_text(html)
    page.goto((lab.folder / "notebook.html").as_uri())
    page.get_by_text("run this cell to open it again").wait_for()
    assert dead_texts(page) == []


def dead_texts(page: Page) -> list[str]:
    """What front ends say in place of widgets, where one can see it."""
    return [text for text in ("Loading widget", "model not found", "Error displaying widget") if page.get_by_text(text).locator("visible=true").count()]
