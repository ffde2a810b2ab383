from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from nbddp.kernel.tail import Tail, rendered

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "line, shown",
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[38;5;12m\x1b[1mbold blue\x1b[m", "bold blue"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2K\x1b[1Gline", "line"),
        ("\x1b(Bascii", "ascii"),
        (" 40%|##   |\r 60%|###  |\r 80%|#### |", " 80%|#### |"),
        ("longer line\rshort", "shortr line"),
        ("12%\b\b\b13%", "13%"),
        ("\b\bx", "x"),
        ("windows\r", "windows"),
        ("a\tb", "a       b"),
        ("bell\x07 nul\x00 form\x0c", "bell nul form"),
        ("<b>&amp;", "<b>&amp;"),
    ],
)
def test_a_line_is_what_a_terminal_leaves(line: str, shown: str) -> None:
    assert rendered(line) == shown


def test_the_last_lines_without_the_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    tail = Tail(path, lines=3)
    assert tail.lines() == []
    path.write_text("one\nTrain Epoch: 1 [64/1000 (6%)]   Loss: 2.3\ntwo\n")
    assert tail.lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("three\nfour\n 10%|#  |\r 20%|## |")
    assert tail.lines() == ["three", "four", " 20%|## |"]
    assert tail.lines() == ["three", "four", " 20%|## |"]
    with path.open("a") as file:
        file.write("\r100%|###|\nTrain Ep")
    assert tail.lines() == ["four", "100%|###|", "Train Ep"]
    with path.open("a") as file:
        file.write("och: 2\n")
    assert tail.lines() == ["three", "four", "100%|###|"]


def test_printed_lines_outlast_many_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("mine\n")
    tail = Tail(path)
    assert tail.lines() == ["mine"]
    for _ in range(50):
        with path.open("a") as file:
            file.write("Train Epoch: 1   Loss: 1.0\n" * 1000)
        assert tail.lines() == ["mine"]


def test_a_flood_is_skipped_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {index:07d}\n" for index in range(2_000_000)))
    tail = Tail(path, lines=2)
    began = time.process_time()
    assert tail.lines() == ["line 1999998", "line 1999999"]
    assert time.process_time() - began < 0.5


def test_a_line_that_never_ends_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    for _ in range(5):
        with path.open("a") as file:
            file.write("x" * 100_000)
        (line,) = tail.lines()
        assert len(line) < 500
    with path.open("a") as file:
        file.write("\r" + "\b\b" * 50_000 + "\rend\n")
    assert tail.lines()[-1].startswith("end")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"caf\xe9 \xff\xfe\nz\xc3\xb6\n")
    assert Tail(path).lines() == ["caf� ��", "zö"]


def test_what_the_ranks_write_by_themselves_is_no_print_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    ours = "Process group initialised: backend=gloo, rank=0, world_size=2\nTrain Epoch: 1 [1/2]\nValidation Epoch: 1   val_loss: 0.5\n"
    path.write_text(ours + "mine\n")
    assert Tail(path).lines() == ["mine"]
    assert len(Tail(path, omit=()).lines()) == 4


def test_directions_of_writing_are_written_out() -> None:
    assert rendered("\u202egnp.exe \u2066x") == r"\u202egnp.exe \u2066x"
