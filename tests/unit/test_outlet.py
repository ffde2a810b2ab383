from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.kernel.outlet import BYTES_PER_S, MESSAGES_PER_S, OVERHEAD_BYTES, Outlet
from nbddp.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorded:
    """A part of `size` characters that always has something new to show, or never."""

    def __init__(self, size: int = 100, period_s: float = 1.0, *, news: bool = True) -> None:
        self.size, self.period_s, self.news = size, period_s, news
        self.rendered: list[float] = []
        self.shown: list[float] = []

    def render(self, state: RunState) -> str | None:
        self.rendered.append(Time.now)
        return "x" * self.size if self.news else None

    def show(self, content: str) -> None:
        assert len(content) == self.size
        self.shown.append(Time.now)


class Time:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Time.now = 1000.0
    monkeypatch.setattr("nbddp.kernel.outlet.monotonic", lambda: Time.now)
    return


def run(outlet: Outlet, seconds: float, tick_s: float = 0.25) -> None:
    for _ in range(round(seconds / tick_s)):
        outlet.send(RunState())
        Time.now += tick_s


@given(st.lists(st.tuples(st.integers(1, 40_000), st.floats(0.1, 5)), min_size=1, max_size=8), st.floats(0.05, 1))
def test_in_no_second_more_is_sent_than_is_allowed(parts: list[tuple[int, float]], tick_s: float) -> None:
    recorded = [Recorded(size, period_s) for size, period_s in parts]
    run(Outlet(recorded), 20, tick_s)
    sent = sorted((when, part.size) for part in recorded for when in part.shown)
    for index, (begin, _) in enumerate(sent):
        second = list(itertools.takewhile(lambda entry, begin=begin: entry[0] < begin + 1, sent[index:]))
        assert len(second) <= MESSAGES_PER_S
        assert sum(size for _, size in second) <= BYTES_PER_S
    assert all(part.shown for part in recorded) or len(recorded) > 4


def test_each_part_is_looked_at_in_its_own_time() -> None:
    often, seldom = Recorded(period_s=0.5), Recorded(period_s=4)
    run(Outlet([often, seldom]), 8)
    assert len(often.shown) == 16
    assert len(seldom.shown) == 2


def test_what_is_unchanged_takes_nothing_from_the_others() -> None:
    still = [Recorded(news=False, period_s=0.25) for _ in range(10)]
    lively = Recorded(period_s=0.25)
    run(Outlet([*still, lively]), 4)
    assert len(lively.shown) == 16
    assert all(len(part.rendered) == 16 and not part.shown for part in still)


def test_where_there_is_too_much_everything_has_its_turn() -> None:
    parts = [Recorded(period_s=0.1) for _ in range(8)]
    run(Outlet(parts), 20)
    counts = [len(part.shown) for part in parts]
    assert sum(counts) == 20 * MESSAGES_PER_S
    assert max(counts) - min(counts) <= 1


def test_what_does_not_fit_into_this_second_comes_in_the_next() -> None:
    large, other = Recorded(BYTES_PER_S - OVERHEAD_BYTES), Recorded(50_000, period_s=3)
    outlet = Outlet([large, other])
    outlet.send(RunState())
    assert (len(large.shown), len(other.shown)) == (1, 0)
    Time.now += 0.5
    outlet.send(RunState())
    assert len(other.shown) == 0
    Time.now += 0.6
    outlet.send(RunState())
    assert len(other.shown) == 1


def test_a_part_that_is_hurried_is_the_next() -> None:
    slow, fast = Recorded(period_s=60), Recorded(period_s=0.25)
    outlet = Outlet([fast, slow])
    run(outlet, 2)
    assert len(slow.shown) == 1
    outlet.hurry(slow)
    run(outlet, 1)
    assert len(slow.shown) == 2


def test_a_part_that_is_hurried_while_it_is_drawn_is_drawn_again() -> None:
    class Hurried(Recorded):
        def render(self, state: RunState) -> str | None:
            if not self.rendered:
                outlet.hurry(self)
            return super().render(state)

    part = Hurried(period_s=60)
    outlet = Outlet([part])
    run(outlet, 3)
    assert len(part.shown) == 2
