from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.errors import BundleError, ConfigError, WorkerLost
from nbddp.visible import columns, excerpt, one_line, visible

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ANY = st.text(st.characters(exclude_categories=()), max_size=200)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain <b>", "plain <b>"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("windows\r\nlines", "windows\nlines"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("over\rwritten \b\x00", r"over\rwritten \x08\x00"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud800", r"\ud800"),
        ("\x9b2J \u2028", r"\x9b2J \u2028"),
        ("Zürich 数据 имя 👩\u200d🔬", "Zürich 数据 имя 👩\u200d🔬"),
    ],
)
def test_what_would_be_obeyed_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(ANY)
def test_nothing_is_left_that_is_obeyed_and_a_second_time_changes_nothing(text: str) -> None:
    shown = visible(text)
    assert RAW.search(shown) is None
    assert visible(shown) == shown
    shown.encode()


def test_a_line_is_cut_at_its_end() -> None:
    assert one_line(" two\n\n lines\tof \x07 ") == r"two lines of \x07"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
    assert one_line("x" * 10, 10) == "x" * 10


@pytest.mark.parametrize("text", ["", "short", "x" * 1000, "line\n" * 20, "x" * 1099])
def test_what_is_short_is_whole(text: str) -> None:
    assert excerpt(text, letters=1000, lines=50) == text


def test_head_and_tail_of_what_is_long() -> None:
    shown = excerpt("".join(f"{index:04d} " for index in range(40_000)), letters=200, lines=50, whole="logs/rank-00003.log")
    head, said, tail = shown.split("\n")
    assert head.startswith("0000 0001 ")
    assert len(head) == len(tail) == 100
    assert tail.endswith("39999 ")
    assert re.fullmatch(r"\.\.\. 2\d\d,\d{3} characters left out, whole in logs/rank-00003\.log \.\.\.", said)
    lines = excerpt("\n".join(map(str, range(3000))), letters=100_000, lines=20).split("\n")
    assert lines[:10] == [str(index) for index in range(10)]
    assert lines[-10:] == [str(index) for index in range(2990, 3000)]
    assert len(lines) == 21


@given(ANY.map(lambda text: text * 20), st.integers(10, 300), st.integers(2, 30))
def test_an_excerpt_is_no_longer_than_it_may_be(text: str, letters: int, lines: int) -> None:
    shown = excerpt(text, letters=letters, lines=lines)
    assert shown == text or (len(shown) <= letters + 60 and shown.count("\n") <= lines + 1)
    assert len(shown) <= len(text) + 60


def test_columns_of_a_terminal() -> None:
    assert (columns("abc"), columns("数据"), columns("e\u0301"), columns("имя")) == (3, 4, 1, 3)


def test_errors_in_a_notebook_are_visible_and_bounded() -> None:
    for error in (ConfigError("\x1b[2J" + "x" * 100_000), BundleError("\x1b[2J" + "y\n" * 5_000), WorkerLost("\x1b[2J", log_tail=["one"])):
        shown = "\n".join(error._render_traceback_())
        assert shown.startswith(f"{type(error).__name__}: \\x1b[2J")
        assert RAW.search(shown) is None
        assert len(shown) < 9_000
        assert shown.count("\n") < 90
