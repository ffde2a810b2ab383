from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nbddp.kernel.card import make_card
from nbddp.kernel.follow import fold_all
from nbddp.kernel.stopping import LABELS, MEANINGS, Stopping, stacks_path, stopping_of
from support.fake_run import PLAN_LINE, FakeRun

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STACKS = "rank 0\n  File <loop.py>, line 7 in step\n"


class Asked:
    """What was asked of a run, in order; its stacks take as long as a test wants."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answered = threading.Event()
        self.answered.set()

    def stop(self) -> None:
        self.calls.append("stop")

    def stacks(self) -> str:
        self.calls.append("stacks")
        assert self.answered.wait(10)
        return STACKS

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")


def started(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.start()
    return run


def test_ask_then_show_the_stacks_and_terminate_then_kill(tmp_path: Path) -> None:
    run, asked = started(tmp_path), Asked()
    stopping = Stopping(run.run_dir, asked)
    assert stopping.stage == 0
    assert [stopping.advance() for _ in range(4)] == [1, 2, 3, 3]
    assert asked.calls == ["stop", "stacks", "terminate", "kill", "kill"]
    assert stopping.stacks == STACKS
    run.end("stopped")


def test_what_is_said_names_the_next_step(tmp_path: Path) -> None:
    run = started(tmp_path)
    stopping = Stopping(run.run_dir, Asked())
    assert stopping.said(1, "press again") == "stopping in order, with a checkpoint; press again to terminate"
    assert stopping.said(2, "interrupt again") == "terminating; interrupt again to kill"
    assert stopping.said(3, "press again") == "killing"
    assert len(LABELS) == len(MEANINGS) == 4
    assert LABELS[0].startswith("Stop")
    assert not any(label.startswith("Stop") for label in LABELS[1:])
    run.end("stopped")


def test_listeners_see_each_step_before_it_takes_its_time(tmp_path: Path) -> None:
    run, asked = started(tmp_path), Asked()
    stopping = Stopping(run.run_dir, asked)
    seen: list[tuple[int, list[str], bool]] = []
    stopping.add_listener(lambda: seen.append((stopping.stage, list(asked.calls), bool(stopping.stacks))))
    stopping.advance()
    stopping.advance()
    assert seen == [(1, [], False), (2, ["stop"], False), (2, ["stop", "stacks"], True)]
    run.end("stopped")


def test_the_third_step_does_not_wait_for_the_stacks_of_the_second(tmp_path: Path) -> None:
    run, asked = started(tmp_path), Asked()
    stopping = Stopping(run.run_dir, asked)
    stopping.advance()
    asked.answered.clear()
    second = threading.Thread(target=stopping.advance)
    second.start()
    while "stacks" not in asked.calls:
        second.join(0.01)
    assert stopping.advance() == 3
    assert asked.calls == ["stop", "stacks", "kill"]
    asked.answered.set()
    second.join()
    assert asked.calls[-1] == "terminate"  # which finds nothing left
    run.end("stopped")


def test_a_run_that_was_asked_from_elsewhere_has_taken_the_first_step(tmp_path: Path) -> None:
    run, asked = started(tmp_path), Asked()
    stopping = Stopping(run.run_dir, asked)
    run.run_dir.ask("stop")
    assert stopping.stage == 1
    assert stopping.advance() == 2
    assert asked.calls == ["stacks", "terminate"]
    run.end("stopped")


def test_the_card_shows_where_the_ranks_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = started(tmp_path)
    run.train(100)
    stopping = Stopping(run.run_dir, Asked())
    stopping.advance()
    stopping.advance()
    assert stacks_path(run.run_dir).read_text() == STACKS
    run.end("stopped")
    card = make_card(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, holds=None, error=None)
    assert "where the ranks were" in card.html
    assert "File &lt;loop.py&gt;, line 7 in step" in card.html


def test_all_views_of_a_run_have_one_order(tmp_path: Path) -> None:
    run, other, asked = started(tmp_path), started(tmp_path), Asked()
    first, second = stopping_of(run.run_dir, asked), stopping_of(type(run.run_dir)(run.run_dir.path), Asked())
    assert second is first
    assert stopping_of(other.run_dir, Asked()) is not first
    first.advance()
    assert second.advance() == 2
    assert asked.calls == ["stop", "stacks", "terminate"]
    run.end("stopped")
    other.end("stopped")
