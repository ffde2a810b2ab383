from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.kernel.ansi import LONGEST_ESCAPE, Screen
from nbddp.kernel.stylesheet import stylesheet


def screen_of(*texts: str, lines: int = 20, width: int = 80) -> Screen:
    screen = Screen(lines, width=width)
    for text in texts:
        screen.feed(text)
    return screen


@pytest.mark.parametrize(
    "text, shown",
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\n\nthree\n", ["one", "", "three"]),
        (" 10%|# |\r 20%|##|\r100%|##|\n", ["100%|##|"]),
        ("longer\rab", ["abnger"]),
        ("longer\r\x1b[Kab", ["ab"]),
        ("longer\r\x1b[2Kab", ["ab"]),
        ("abcdef\x1b[3D\x1b[1Kx", ["   xef"]),
        ("abc\x1b[5Gx", ["abc x"]),
        ("ab\x1b[2Cx", ["ab  x"]),
        ("one\ntwo\nthree\x1b[2A\rONE\x1b[B\rTWO\x1b[1E+", ["ONE", "TWO", "+hree"]),
        ("one\ntwo\n\x1b[2F1", ["1ne", "two"]),
        ("gone\ngone\n\x1b[H\x1b[2Jhere", ["here"]),
        ("stays\ngoes\nthat too\x1b[2A\r\x1b[5C\x1b[J!", ["stays!"]),
        ("\x1b[100Aup there\n", ["up there"]),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x1b(B.", ["link ."]),
        ("a\tb\rA", ["A       b"]),
        ("a\x85b\x9b1mc\x7f", ["abc"]),
    ],
)
def test_what_a_terminal_leaves(text: str, shown: list[str]) -> None:
    assert screen_of(text).lines() == shown
    assert screen_of(*text).lines() == shown  # one character at a time
    assert re.sub("<[^>]*>", "", screen_of(text).html(10_000)).split("\n") == shown


def test_nested_bars_are_drawn_in_place() -> None:
    text = ""
    for outer in range(1, 3):
        for inner in range(1, 4):
            text += f"\n\rinner {inner}/3\x1b[A"  # what tqdm writes at position 1
        text += f"\router {outer}/2"
    assert screen_of(text).lines() == ["outer 2/2", "inner 3/3"]


@pytest.mark.parametrize(
    "codes, attributes",
    [
        ("31", 'class="nb-fore1"'),
        ("1;32", 'class="nb-bold nb-fore2"'),
        ("97;101", 'class="nb-fore15 nb-back9"'),
        ("38;5;3", 'class="nb-fore3"'),
        ("38;5;196", 'style="color:#ff0000"'),
        ("38;5;255", 'style="color:#eeeeee"'),
        ("48;5;300", 'style="background-color:#eeeeee"'),
        ("38;2;1;2;300", 'style="color:#0102ff"'),
        ("38:2:10:20:30", 'style="color:#0a141e"'),
        ("4;3;44", 'class="nb-under nb-italic nb-back4"'),
        ("7", 'class="nb-inverse"'),
        ("31;39", ""),
        ("1;3;4;9;22;23;24;29", ""),
        ("31;0", ""),
        ("31;", ""),
        ("38;5", ""),
        ("38;2;1", ""),
        ("38", ""),
        ("77", ""),
        ("4294967296", ""),
    ],
)
def test_colours_and_weights(codes: str, attributes: str) -> None:
    html = screen_of(f"a\x1b[{codes}mb\x1b[0mc").html(1000)
    assert html == (f"a<span {attributes}>b</span>c" if attributes else "abc")


def test_colours_go_on_until_they_are_taken_back_and_are_overwritten_with_the_text() -> None:
    assert screen_of("\x1b[31mred\nstill\x1b[m not").html(1000) == '<span class="nb-fore1">red</span>\n<span class="nb-fore1">still</span> not'
    assert screen_of("\x1b[31mred\r\x1b[mno").html(1000) == 'no<span class="nb-fore1">d</span>'


def test_every_class_is_in_the_style_sheet() -> None:
    text = "".join(f"\x1b[{code}mx\x1b[m" for code in [*range(1, 10), *range(30, 38), *range(40, 48), *range(90, 98), *range(100, 108)])
    used = {name for names in re.findall('class="([^"]*)"', screen_of(text, width=200).html(100_000)) for name in names.split()}
    assert len(used) == 38
    assert {name for name in used if f".{name}{{" not in stylesheet().replace(" {", "{")} == set()


def test_what_was_printed_is_no_markup() -> None:
    assert screen_of("<script>\x1b[31m&<b>").html(1000) == '&lt;script&gt;<span class="nb-fore1">&amp;&lt;b&gt;</span>'
    assert "<" not in screen_of('\x1b[31"><b>m').lines()[0].replace("<b>m", "")


def test_lines_and_columns_are_bounded() -> None:
    screen = screen_of(*(f"line {index} {'x' * 1000}\n" for index in range(100)), lines=5, width=40)
    assert [line[:8] for line in screen.lines()] == [f"line {index} " for index in range(95, 100)]
    assert {len(line) for line in screen.lines()} == {42}
    assert screen_of("x" * 1000 + "\r\x1b[Kshort", width=40).lines() == ["short"]
    assert screen_of("\x1b[99999999999C" * 3 + "x", width=40).lines() == [" …"]


def test_the_newest_lines_fit_the_limit() -> None:
    screen = screen_of("".join(f"line {index:02}\n" for index in range(20)))
    assert screen.html(24) == "line 17\nline 18\nline 19"
    assert screen.html(23) == "line 18\nline 19"
    assert screen.html(3) == ""


def test_lines_that_are_omitted_vanish_when_they_are_complete() -> None:
    screen = Screen(5, width=80, omit=("Train",))
    for text, shown in [("one\nTra", ["one", "Tra"]), ("in 1", ["one"]), ("\n", ["one"]), ("two", ["one", "two"]), ("\nTrain 2\n", ["one", "two"])]:
        screen.feed(text)
        assert screen.lines() == shown


def test_an_escape_that_never_ends_is_not_waited_for() -> None:
    screen = screen_of("a\x1b]0;" + "t" * (LONGEST_ESCAPE + 10))
    screen.feed("b")
    assert screen.lines() == ["ab"]


@given(st.text(st.sampled_from("ab\n\r\b\t\x1b[]0123;mKJABCDEFGH\x07é漢"), max_size=60), st.integers(0, 60))
def test_no_text_breaks_it_and_pieces_are_as_good_as_the_whole(text: str, cut: int) -> None:
    whole, pieces = screen_of(text, lines=4, width=12), screen_of(text[:cut], text[cut:], lines=4, width=12)
    assert len(whole.lines()) <= 4
    assert all(len(line) <= 14 for line in whole.lines())
    assert whole.html(10_000) == pieces.html(10_000)


def test_a_full_screen_is_small() -> None:
    screen = screen_of(*("\x1b[31m" + "x" * 390 + "\n" for _ in range(300)), lines=200, width=400)
    (lines,) = (screen._lines,)
    size = sum(sys.getsizeof(line._characters) + sys.getsizeof(line._attributes) for line in lines)
    assert size < 3_000_000
