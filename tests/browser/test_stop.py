"""The Stop button of real runs: while the cell blocks, in the background, and where clicks don't arrive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from nbconvert import HTMLExporter

from support.example import ALONE, ENDLESS, STEP

if TYPE_CHECKING:
    from support.lab import Lab, LabNotebook

pytestmark = pytest.mark.browser

SLEEPY = """
def training_step(model, batch):
    if rank() == 1 and Path("stepped").exists():
        Path("asleep").touch()
        time.sleep(1000)
    return step(model, batch)
"""
# A rank that suspends the supervisor, so that neither a request nor SIGTERM does anything.
DEAF = """
def training_step(model, batch):
    if rank() == 1 and list(Path("nbddp_runs").glob("*-deaf-*/checkpoints/last.pt")):
        import signal
        os.kill(os.getppid(), signal.SIGSTOP)
        supervisor = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGSTOP)
        Path("asleep").touch()
        time.sleep(1000)
    return step(model, batch)
"""
ASK, TERMINATE, KILL = "Stop in order", "Show all stacks and terminate", "Kill all ranks"


def training(lab: Lab, line: str, body: str, until: str = "stepped") -> LabNotebook:
    """A notebook whose last cell trains, and is waited for until its ranks have touched a file."""
    book = lab.open([ALONE, f"%%ddp_train net samples {line}\n{body}", "print('state:', run.wait().state)"])
    book.run_cell(0)
    book.idle()
    book.run_cell(1)
    wait_for_file(book, until)
    return book


def wait_for_file(book: LabNotebook, name: str) -> None:
    for _ in range(600):
        if (book.path.parent / name).exists():
            return
        book.page.wait_for_timeout(50)
    raise AssertionError(f"no rank touched {name}")


def press(book: LabNotebook, label: str, following: str | None) -> None:
    book.page.get_by_role("button", name=label, exact=True).click()
    if following is not None:
        book.page.get_by_role("button", name=following, exact=True).wait_for(timeout=5000)


@pytest.mark.parametrize("background", [False, True], ids=["the cell blocks", "in the background"])
def test_the_first_press_stops_in_order(lab: Lab, background: bool) -> None:
    book = training(lab, ENDLESS + (" --background" if background else ""), STEP)
    button = book.page.get_by_role("button", name=re.compile("^Stop"))
    button.wait_for()
    assert button.count() == 1
    press(book, ASK, None)
    card = book.output("stopped as asked")
    assert "epoch" in card.inner_text()
    book.run_cell(2)
    book.output("state: stopped")
    assert book.page.get_by_text("net: epoch").first.is_visible()


def test_after_a_reload_while_the_cell_blocks_the_view_is_back_and_its_button_works(lab: Lab) -> None:
    book = training(lab, ENDLESS, STEP)
    book.page.get_by_role("button", name=ASK, exact=True).wait_for()
    book.save()
    again = lab.reopen(idle=False)
    page = again.page
    page.get_by_role("button", name=ASK, exact=True).wait_for(timeout=30_000)
    progress = page.get_by_text(re.compile(r"epoch \d+.* step [\d,]+"))
    before = progress.inner_text()
    page.wait_for_function("old => !document.body.innerText.includes(old)", arg=before, timeout=15_000)  # it goes on
    assert page.get_by_text("Loading widget").count() == 0
    again.screenshot("view-reloaded-while-the-cell-blocks", of=page.locator(".nbddp-view"))
    press(again, ASK, None)
    card = again.output("stopped as asked")
    card.get_by_text("%ddp_attach").wait_for()
    attach = re.search(r"%ddp_attach [\w-]+", card.inner_text())
    assert attach is not None
    again.screenshot("card-reloaded-while-the-cell-blocked", of=card)
    again.run_cell(2)
    again.output("state: stopped")
    saved = again.save()
    (shown,) = [output for output in saved.cells[1].outputs if "data" in output]
    assert attach.group() in shown.data["text/html"]  # what is seen of it without a kernel
    exported, _ = HTMLExporter().from_notebook_node(saved)
    assert "Loading widget" not in exported
    assert attach.group() in exported


def test_the_second_press_shows_where_the_ranks_are_and_terminates(lab: Lab) -> None:
    book = training(lab, ENDLESS, SLEEPY, until="asleep")
    press(book, ASK, TERMINATE)
    book.output("stopping in order, with a checkpoint; press again to terminate")
    book.screenshot("stop-asked")
    press(book, TERMINATE, None)
    card = book.output("where the ranks were when they were terminated")
    card.get_by_text("where the ranks were").click()
    assert "in training_step" in card.inner_text()
    book.screenshot("stop-terminated", of=card)
    book.run_cell(2)
    book.output("state: stopped")


def test_the_third_press_kills_what_heeds_nothing(lab: Lab) -> None:
    book = training(lab, f"{ENDLESS} --name deaf --checkpoint-every '2 steps'", DEAF, until="asleep")
    press(book, ASK, TERMINATE)
    press(book, TERMINATE, KILL)
    view = book.output("terminating; press again to kill")
    view.get_by_text("in training_step").first.wait_for()
    book.screenshot("stop-stacks", of=view)
    press(book, KILL, None)
    book.output("where the ranks were when they were terminated")
    book.run_cell(2)
    book.output("state: stopped")


def test_an_interrupt_and_a_press_take_the_same_steps(lab: Lab) -> None:
    book = training(lab, ENDLESS, SLEEPY, until="asleep")
    book.interrupt()
    book.output("stopping in order, with a checkpoint; interrupt again to terminate")
    press(book, TERMINATE, None)
    book.output("where the ranks were when they were terminated")
    book.run_cell(2)
    book.output("state: stopped")


def test_a_double_click_is_one_press(lab: Lab) -> None:
    book = training(lab, ENDLESS, SLEEPY, until="asleep")
    book.page.get_by_role("button", name=ASK, exact=True).dblclick()
    book.page.get_by_role("button", name=TERMINATE, exact=True).and_(book.page.locator(":enabled")).wait_for(timeout=5000)
    book.output("press again to terminate")
    assert book.page.get_by_text("in training_step").count() == 0
    press(book, TERMINATE, None)
    book.output("where the ranks were when they were terminated")


def test_a_front_end_without_subshells_says_to_use_the_interrupt(lab: Lab) -> None:
    lab.configure("@jupyterlab/apputils-extension", "kernels-settings", commsOverSubshells="disabled")
    book = training(lab, ENDLESS, STEP)
    book.output("to stop, use the interrupt")
    assert book.page.get_by_role("button", name=re.compile("^Stop in")).count() == 0
    book.screenshot("stop-interrupt")
    book.interrupt()
    book.output("stopped as asked")
