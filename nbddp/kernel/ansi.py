"""Screen: what a terminal would show of a text, its colours as classes of the live view's style sheet.

Carriage returns, backspaces, erasures and cursor movements overwrite, as the bars of tqdm want, nested ones included. Bounded: so many lines, so many
columns. Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import re
from collections import deque
from html import escape
from itertools import groupby

from nbddp.visible import visible

# ECMA-48: control sequences (colours, cursor), operating-system commands (titles, links), the two-byte escapes, and single control characters.
TOKENS = re.compile(r"(?:\x1b\[|\x9b)([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|[\x00-\x1f\x7f-\x9f]")
BEGUN = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z|\x1b(?:\][^\x07\x1b]*|[ -/]*)\Z")
"""An escape that the text breaks off in."""
LONGEST_ESCAPE = 256
TAB = 8


class Screen:
    """The last lines of a terminal of unlimited height that a text is written to.

    Args:
        lines: how many are kept.
        width: columns; what is written beyond them is not kept, and the line ends in an ellipsis.
        omit: lines that begin with one of these vanish when they are complete.
    """

    def __init__(self, lines: int, *, width: int, omit: tuple[str, ...] = ()) -> None:
        self._kept, self._width, self._omit = lines, width, omit
        self._lines: deque[_Line] = deque([_Line()], maxlen=lines + 1)
        self._up = self._column = 0  # the cursor: rows above the last, columns from the left
        self._pen = _Pen()
        self._begun = ""

    def feed(self, text: str) -> None:
        """Write text where the cursor is."""
        text = self._begun + text
        last = max(text.rfind("\x1b"), text.rfind("\x9b"))
        self._begun = text[last:] if last >= 0 and len(text) - last <= LONGEST_ESCAPE and BEGUN.match(text, last) else ""
        end, at = len(text) - len(self._begun), 0
        for token in TOKENS.finditer(text, 0, end):
            self._write(text[at : token.start()])
            at = token.end()
            if token[2]:
                self._control(token[1], token[2])
            else:
                self._character(token[0])
        self._write(text[at:end])

    def forget_line(self) -> None:
        """Drop the last line, whose beginning or end is not known."""
        self._lines[-1] = _Line()
        self._up = self._column = 0
        self._pen, self._begun = _Pen(), ""

    def lines(self) -> list[str]:
        """The text of the last lines, without colours."""
        return [line.text() for line in self._shown()]

    def html(self, limit: int) -> str:
        """As many of the last lines as fit into `limit` characters of HTML, escaped, for a preformatted element."""
        parts: list[str] = []
        for line in reversed(self._shown()):
            html = line.html()
            limit -= len(html) + 1
            if limit < 0:
                break
            parts.append(html)
        return "\n".join(reversed(parts))

    def _shown(self) -> list[_Line]:
        lines = list(self._lines)
        if not lines[-1].text() or self._omitted(lines[-1]):
            lines.pop()
        return lines[-self._kept :]

    def _omitted(self, line: _Line) -> bool:
        return line.text().startswith(self._omit)

    @property
    def _line(self) -> _Line:
        return self._lines[-1 - self._up]

    def _write(self, text: str) -> None:
        text = visible(text)  # what changes the direction of writing is no control sequence
        if text:
            self._line.write(self._column, text, self._pen.attributes, self._width)
            self._column += len(text)

    def _character(self, character: str) -> None:
        if character == "\n":
            self._column = 0
            if self._up:
                self._up -= 1
            elif self._omitted(self._lines[-1]):
                self._lines[-1] = _Line()
            else:
                self._lines.append(_Line())
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._write(" " * (TAB - self._column % TAB))

    def _control(self, numbers: str, final: str) -> None:
        if final == "m":
            self._pen.take(numbers)
            return
        values = [int(number) for number in numbers.split(";") if number.isdecimal()]
        first = values[0] if values else 0
        count = max(1, min(first, self._width))
        if final in "AF":
            self._up = min(self._up + count, len(self._lines) - 1)
        elif final in "BE":
            self._up = max(self._up - count, 0)
        elif final == "C":
            self._column += count
        elif final == "D":
            self._column = max(0, self._column - count)
        elif final == "K":
            self._line.erase(0 if first else self._column, self._column if first == 1 else None)
        elif final == "J" and first in (2, 3):
            self._lines.clear()
            self._lines.append(_Line())
            self._up = 0
        elif final == "J" and not first:
            self._line.erase(self._column, None)
            for _ in range(self._up):
                self._lines.pop()
            self._up = 0
        if final in "EF":
            self._column = 0
        elif final in "G`":
            self._column = count - 1


class _Line:
    """Characters, each with the attributes of its element; the HTML is remembered while nothing is written."""

    __slots__ = ("_attributes", "_characters", "_cut", "_html", "_text")

    def __init__(self) -> None:
        self._characters: list[str] = []
        self._attributes: list[str] = []
        self._cut = False
        self._html: str | None = None
        self._text: str | None = None

    def write(self, column: int, text: str, attributes: str, width: int) -> None:
        self._html = self._text = None
        self._cut = self._cut or column + len(text) > width
        text = text[: max(0, width - column)]
        if not text:
            return
        if (gap := column - len(self._characters)) > 0:
            self._characters += " " * gap
            self._attributes += [""] * gap
        self._characters[column : column + len(text)] = text
        self._attributes[column : column + len(text)] = [attributes] * len(text)

    def erase(self, begin: int, end: int | None) -> None:
        """Blank the columns from `begin` to before `end`; without an end, the rest of the line."""
        self._html = self._text = None
        if end is None or end >= len(self._characters):
            del self._characters[begin:], self._attributes[begin:]
            self._cut = False
        else:
            self._characters[begin:end] = " " * (end - begin)
            self._attributes[begin:end] = [""] * (end - begin)

    def text(self) -> str:
        if self._text is None:
            self._text = "".join(self._characters).rstrip() + (" …" if self._cut else "")
        return self._text

    def html(self) -> str:
        if self._html is None:
            parts, at = [], 0
            for attributes, run in groupby(self._attributes):
                length = len(list(run))
                text = escape("".join(self._characters[at : at + length]), quote=False)
                parts.append(f"<span {attributes}>{text}</span>" if attributes else text)
                at += length
            self._html = "".join(parts).rstrip() + (" …" if self._cut else "")
        return self._html


class _Pen:
    """Colours and weight of what is written next; `attributes` are those of its HTML element."""

    def __init__(self) -> None:
        self.attributes = ""
        self._colours: dict[str, str | int] = {}
        self._marks: dict[str, None] = {}

    def take(self, numbers: str) -> None:
        """Follow a "select graphic rendition"; what is not known is left out."""
        codes = [int(code) if code.isdecimal() else 0 for code in numbers.replace(":", ";").split(";")]
        while codes:
            code = codes.pop(0)
            ground = "back" if code in range(40, 50) or code in range(100, 108) else "fore"
            if code in (38, 48):
                self._take_palette(ground, codes)
            elif code in (39, 49):
                self._colours.pop(ground, None)
            elif code in range(30, 48):
                self._colours[ground] = code % 10
            elif code in range(90, 108):
                self._colours[ground] = code % 10 + 8
            elif code == 0:
                self._colours.clear()
                self._marks.clear()
            elif code in _MARKS:
                self._marks[_MARKS[code]] = None
            for mark in _UNMARKED.get(code, ()):
                self._marks.pop(mark, None)
        self.attributes = self._element()

    def _take_palette(self, ground: str, codes: list[int]) -> None:
        """The colour after 38 or 48: 5 and a number of the palette, or 2 and red, green, blue."""
        kind = codes.pop(0) if codes else 0
        if kind == 5 and codes:
            self._colours[ground] = _palette(codes.pop(0))
        elif kind == 2:
            red_green_blue = codes[:3]
            del codes[:3]
            if len(red_green_blue) == 3:
                self._colours[ground] = "#" + "".join(f"{min(value, 255):02x}" for value in red_green_blue)

    def _element(self) -> str:
        classes = list(self._marks)
        styles = []
        for ground, colour in self._colours.items():
            if isinstance(colour, int):
                classes.append(f"nb-{ground}{colour}")
            else:
                styles.append(f"{'color' if ground == 'fore' else 'background-color'}:{colour}")
        words = [f'class="{" ".join(classes)}"'] if classes else []
        return " ".join([*words, f'style="{";".join(styles)}"'] if styles else words)


_MARKS = {1: "nb-bold", 2: "nb-dim", 3: "nb-italic", 4: "nb-under", 7: "nb-inverse", 9: "nb-struck"}
_UNMARKED = {22: ("nb-bold", "nb-dim"), 23: ("nb-italic",), 24: ("nb-under",), 27: ("nb-inverse",), 29: ("nb-struck",)}


def _palette(number: int) -> str | int:
    """One of 256 colours: 16 of the theme, a cube of 6 x 6 x 6, and 24 greys."""
    if number < 16:
        return number
    if number >= 232:
        level = min(8 + 10 * (number - 232), 238)
        return f"#{level:02x}{level:02x}{level:02x}"
    levels = [0, 95, 135, 175, 215, 255]
    number -= 16
    return f"#{levels[number // 36]:02x}{levels[number // 6 % 6]:02x}{levels[number % 6]:02x}"
