from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

from nbddp.advice import advise
from nbddp.config import TrainConfig
from nbddp.kernel.card import Card, make_card
from nbddp.kernel.follow import fold_all
from nbddp.tabular import html_table
from support.fake_run import PLAN_LINE, FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HOLDS = 'net: epoch 10 (val_loss 0.32); best was epoch 8 (0.31): run.load("best")'


class Checker(HTMLParser):
    """Collects text and tags, and insists that every element is closed in order."""

    VOID = ("img", "meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def card_of(run: FakeRun, **options: str | None) -> Card:
    words: dict[str, str | None] = {"holds": None, "error": None, **options}
    return make_card(run.run_dir, fold_all(run.run_dir), plan_line=PLAN_LINE, holds=words["holds"], error=words["error"])


def test_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = finished(tmp_path / "nbddp_runs")
    state = fold_all(run_dir)
    card = make_card(run_dir, state, plan_line=PLAN_LINE, holds=HOLDS, error=None)
    shown = checked(card.html)
    for text in (shown.text, card.text):
        for part in (
            "finished",
            PLAN_LINE,
            "3,900",
            "epoch 10 of 10",
            "epoch 8",
            "rank 1 is the slowest",
            "samples/s",
            "forward",
            f"nbddp_runs/{run_dir.id}",
            HOLDS,
            "0:16",
        ):
            assert part in text
        assert str(tmp_path) not in text
    assert "script" not in shown.tags
    assert card.png is not None
    assert card.png.startswith(b"\x89PNG")
    assert len(card.png) <= 60_000
    assert base64.b64encode(card.png).decode() in card.html
    assert not re.search(r'(?:src|href)="(?!data:)', card.html)


def test_front_ends_find_three_formats(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(100)
    card = card_of(run)
    assert set(card._repr_mimebundle_()) == {"text/html", "image/png", "text/plain"}
    assert base64.b64decode(card._repr_mimebundle_()["image/png"]) == card.png
    run.end()


def test_a_failed_run_says_what_the_verdict_says(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(800)
    run.fail(rank=1)
    message = "rank 1, Cell In[7], line 12: IndexError: <script>alert(1)</script>"
    run.end("failed", error={"kind": "WorkerError", "message": message, "rank": 1, "traceback": "Cell In[7], line 12\n\x1b[31my = table[labels]\x1b[0m <i>"})
    for card in (card_of(run), card_of(run, error=message)):
        shown = checked(card.html)
        assert message in shown.text
        assert message in card.text
        assert "Cell In[7], line 12\ny = table[labels] <i>" in shown.text
        assert "details" in shown.tags
        assert "script" not in shown.tags
        assert "i" not in shown.tags


def test_without_a_verdict_the_first_failure_is_shown(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.fail(rank=1)
    run.end("failed")
    card = card_of(run)
    assert "index 10 is out of bounds" in card.text
    assert "y = table[labels]" in checked(card.html).text
    assert card.png is None
    assert "image/png" not in card.mimebundle()


def test_a_run_that_failed_before_anything(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.end("failed")
    assert "no reason is recorded" in card_of(run).text
    assert "img" not in checked(card_of(run).html).tags


def test_a_stop_is_no_error(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(500)
    run.ranks[0].emit("stopping", reason="asked", text="stopped as asked")
    run.end("stopped")
    card = card_of(run)
    assert "stopped as asked" in card.text
    assert "500 of 3,900 · epoch 2 of 10" in card.text


def test_warnings_and_losses_that_are_not_finite(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.ranks[0].emit("message", level="warning", text="8 samples per rank: <raise> --batch-size")
    run.ranks[0].emit("message", level="info", text="the last batch is smaller")
    run.train(50, losses=[1.0] * 47 + [float("nan")] * 3)
    run.end("finished")
    card = card_of(run)
    assert "warning: 8 samples per rank: <raise> --batch-size" in card.text
    assert "  info: the last batch is smaller" in card.text
    assert "the loss of 3 steps" in card.text
    assert "8 samples per rank: <raise> --batch-size" in checked(card.html).text


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, nproc=1)
    run.ranks[0].emit("started", device="<b>cpu", backend="gloo", process=[])
    run.ranks[0].emit("checkpoint", name="<img src=x>", file="x.pt", epoch=1, step=1, value=None, bytes=10, removed=[])
    run.ranks[0].emit("validation", epoch=1, step=1, values={"<script>": 1.0})
    run.train(50)
    run.end()
    html = make_card(run.run_dir, fold_all(run.run_dir), plan_line="<plan>", holds="<net>", error=None).html
    shown = checked(html)
    assert {"script", "plan", "net", "b"} & set(shown.tags) <= {"b"}
    assert all(part in shown.text for part in ("<plan>", "<net>", "<img src=x>"))


def test_one_rank_has_no_slowest(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, nproc=1)
    run.start()
    run.train(100)
    run.end()
    assert "is the slowest" not in card_of(run).text


def test_the_saved_page_is_whole_and_private(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(100)
    run.end()
    card = card_of(run, holds=HOLDS)
    card.save(run.run_dir.card)
    page = run.run_dir.card.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert card.html in page
    assert run.run_dir.card.stat().st_mode & 0o077 == 0
    checked(page.removeprefix("<!doctype html>"))


def test_a_long_last_column_breaks_and_the_labels_before_it_do_not():
    cells = re.findall(r"<td[^>]*style=\"([^\"]*)\"[^>]*>(.*?)</td>", html_table((), [("throughput", "long " * 80)], left=2, wrap=True))
    assert [content.strip()[:10] for _, content in cells] == ["throughput", "long long "]
    assert ["white-space:nowrap" in style for style, _ in cells] == [True, False]
    assert ["overflow-wrap:anywhere" in style for style, _ in cells] == [False, True]


def test_what_could_be_faster_is_said_with_the_option(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, nproc=1, slow_rank=0)
    run.start()
    for _ in range(20):  # steps that wait for their data most of the time
        columns = run._columns(50, None)
        run.ranks[0].emit("steps", **{**columns, "data_s": [0.02] * 50, "warmup": [0] * 50, "ranks": [{**columns["ranks"][0], "data_s": 0.02}]})
        run.step += 50
    run.end()
    said = advise(fold_all(run.run_dir), TrainConfig(nproc=1, epochs=10))
    assert next(advice.rule for advice in said) == "loader-bound"
    card = card_of(run)
    shown = checked(card.html).text
    for advice in said:
        assert advice.text in shown
        assert advice.text in card.text
        assert advice.option is None or (advice.option in shown and advice.option in card.text)


def test_options_of_another_version_give_no_advice(tmp_path: Path) -> None:
    run_dir = finished(tmp_path, config={"no_such_option": 1})
    card = make_card(run_dir, fold_all(run_dir), plan_line=PLAN_LINE, holds=None, error=None)
    assert "advice" not in card.text
    assert "finished" in card.text
