"""Text from outside, made fit to be shown: what a terminal or a page would obey or hide is written out, and its length has a bound.

Messages, notes, names and logs come from users' code and from files of other runs. Used in every process; imports the standard library only.
"""

from __future__ import annotations

import re
import unicodedata

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters other than tab and newline
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # directions, line separators, and what has no width; joiners are part of words
    "\ud800-\udfff\U000e0000-\U000e007f]",  # halves of pairs, which no file takes, and tags
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    r"""Write control characters and changes of direction as Python does, ``\x1b``; tabs and newlines stay, colours are left out."""
    if text.isascii() and text.isprintable():
        return text
    return _OBEYED.sub(_written, _COLOURS.sub("", text.replace("\r\n", "\n")))


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def one_line(text: str, letters: int | None = None) -> str:
    """The text in one line of at most so many letters, cut at its end."""
    line = visible(" ".join(text.split()))
    return line if letters is None or len(line) <= letters else line[: letters - 1].rstrip() + "…"


def excerpt(text: str, *, letters: int, lines: int, whole: str = "") -> str:
    """Head and tail of a long text, each half of `letters` and `lines` at most; `whole` says where all of it is."""
    half, rows = letters // 2, lines // 2
    head = "\n".join(text.split("\n", rows)[:rows])[:half]
    tail = "\n".join(text.rsplit("\n", rows)[-rows:])[-half:]
    left_out = len(text) - len(head) - len(tail)
    if left_out <= _WORTH_A_WORD:
        return text
    return f"{head}\n... {left_out:,} characters left out{f', whole in {whole}' if whole else ''} ...\n{tail}"


_WORTH_A_WORD = 100
"""Characters that are not left out: saying so takes as many."""


def columns(text: str) -> int:
    """How many columns a terminal takes for a line: two for a wide character, none for a mark on the one before it."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
