from __future__ import annotations

from typing import TYPE_CHECKING

import nbddp
from nbddp.advice import Advice
from nbddp.kernel.advice_list import NOTHING, AdviceList
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path

SAID = AdviceList([Advice("loader-bound", "71 % of a step <waits>", "--num-workers 4"), Advice("straggler", "rank 1 is late", None)])


def test_it_is_a_list_that_says_what_to_write() -> None:
    assert [part.rule for part in SAID] == ["loader-bound", "straggler"]
    assert repr(SAID) == "71 % of a step <waits>\n  write: --num-workers 4\nrank 1 is late"
    assert "71 % of a step &lt;waits&gt;" in SAID._repr_html_()
    assert SAID._repr_html_().count("<code") == 1
    assert repr(AdviceList()) == NOTHING
    assert NOTHING in AdviceList()._repr_html_()


def slow_loader(tmp_path: Path) -> FakeRun:
    """A run whose steps wait for their data most of the time."""
    run = FakeRun(tmp_path, nproc=1, slow_rank=0)
    run.start()
    for _ in range(20):
        columns = run._columns(50, None)
        run.ranks[0].emit("steps", **{**columns, "data_s": [0.02] * 50, "warmup": [0] * 50, "ranks": [{**columns["ranks"][0], "data_s": 0.02}]})
        run.step += 50
    return run


def test_a_run_that_goes_on_and_one_that_has_ended_offer_it(tmp_path: Path) -> None:
    fake = slow_loader(tmp_path)
    run = nbddp.attach(fake.run_dir.path)
    assert isinstance(run.advice, list)
    assert [part.rule for part in run.advice] == ["loader-bound"]
    assert "is waiting for data" in repr(run.advice)
    fake.end()
    assert run.follower.done.wait(20)
    (said,) = run.advice
    card = run.card()
    for shown in (card.text, repr(run.advice)):
        assert said.text in shown
        assert said.option is None or said.option in shown


def test_a_run_with_nothing_to_gain_offers_nothing(tmp_path: Path) -> None:
    run = nbddp.attach(finished(tmp_path, nproc=1, slow_rank=0).path)
    assert run.follower.done.wait(20)
    assert run.advice == []
