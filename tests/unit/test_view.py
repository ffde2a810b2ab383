from __future__ import annotations

import io
import subprocess
import sys
from typing import TYPE_CHECKING

from nbddp.kernel.card import make_card
from nbddp.kernel.follow import fold_all
from nbddp.kernel.terminal import TerminalView, progress_line
from nbddp.kernel.view import open_view
from nbddp.state import RunState
from support.fake_run import PLAN_LINE, FakeRun

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """The monotonic clock of the view, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("nbddp.kernel.terminal.monotonic", lambda: self.now)


def started(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.start()
    return run


def test_the_line_says_how_far_the_run_is(tmp_path: Path) -> None:
    run = started(tmp_path)
    assert progress_line(RunState()) == "starting"
    run.train(1234)
    line = progress_line(fold_all(run.run_dir))
    for part in ("running", "epoch 4/10", "step 1,234/3,900 (32 %)", "loss ", "val_loss 0.", "samples/s", "to go"):
        assert part in line
    run.ranks[0].emit("phase", phase="validation")
    assert progress_line(fold_all(run.run_dir)).startswith("running (validation)")
    run.end()
    assert progress_line(fold_all(run.run_dir)).startswith("finished · ")
    assert "to go" not in progress_line(fold_all(run.run_dir))


def test_a_terminal_has_one_line_that_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    run = started(tmp_path)
    stream = Terminal()
    view = TerminalView(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, stream=stream)
    for _ in range(3):
        run.train(50)
        clock.now += 0.3
        view.update(fold_all(run.run_dir))
        view.update(fold_all(run.run_dir))
    head, rest = stream.getvalue().split("\n")
    assert PLAN_LINE in head
    lines = rest.split("\r\x1b[2K")[1:]
    assert len(lines) == 4
    assert all(len(line) < 60 for line in lines)
    assert "step 150/3,900" in lines[-1]
    run.end()


def test_elsewhere_there_is_a_line_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = started(tmp_path)
    stream = io.StringIO()
    view = TerminalView(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, title="mine", stream=stream)
    for _ in range(100):
        run.train(10)
        clock.now += 0.25
        view.update(fold_all(run.run_dir))
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"mine: {PLAN_LINE}"
    assert len(lines) == 4  # the plan, and at 0, 10 and 20 s
    assert "\r" not in stream.getvalue()
    run.end()


def test_the_card_is_printed_once_and_ends_the_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started(tmp_path)
    view = open_view(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE)
    run.train(100)
    run.end()
    state = fold_all(run.run_dir)
    card = make_card(run.run_dir, state, plan_line=PLAN_LINE, holds="net: epoch 1", error=None)
    view.finish(card)
    view.finish(card)
    written = capsys.readouterr().err
    view.update(state)
    assert capsys.readouterr() == ("", "")
    assert PLAN_LINE in written
    view.finish(card)
    assert capsys.readouterr() == ("", "")


def test_the_cards_text_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started(tmp_path)
    view = open_view(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE)
    run.end()
    card = make_card(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, holds=None, error=None)
    view.finish(card)
    assert capsys.readouterr().out == f"{card.text}\n"


def test_outside_a_kernel_neither_ipython_nor_widgets_nor_matplotlib_are_imported(tmp_path: Path) -> None:
    run = started(tmp_path)
    code = f"""
import sys
from pathlib import Path
from nbddp.kernel.follow import fold_all
from nbddp.kernel.view import open_view
from nbddp.rundir import RunDir
run_dir = RunDir(Path({str(run.run_dir.path)!r}))
view = open_view(run_dir, fold_all(run_dir), plan_line="plan")
view.update(fold_all(run_dir))
print(sorted({{"IPython", "ipywidgets", "matplotlib", "torch", "zmq"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
    assert "plan\n" in done.stderr
    run.end()
