"""The line of a magic: words, options and their values, nothing looked up yet.

`%%ddp_train MODEL DATA [options]` becomes an `Invocation`, or a ConfigError that says what to write. Runs in the kernel; imports neither torch nor
Jupyter.
"""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbddp.config import SYNONYMS
from nbddp.errors import ConfigError, suggest
from nbddp.kernel.options import UNITS, Option, spelled, train_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBER = re.compile(r"^-?(\d|\.\d)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_DASHES = "\u2013\u2014\u2212"
_FLAG_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the line; `start` is where it begins there, `quoted` whether quotes (taken off) delimited all of it."""

    text: str
    start: int
    quoted: bool = False

    @property
    def is_option(self) -> bool:
        return not self.quoted and self.text.startswith("-") and not _NUMBER.match(self.text) and self.text != "-"


class Scan(NamedTuple):
    """Words of a line, where they end (a comment may follow), and what is still open there: a quote, a bracket, or nothing."""

    words: list[Word]
    end: int
    open: str


def scan(line: str) -> Scan:
    """Split a line into words.

    Quotes delimit a word where they begin it, or its value after ``=``; inside brackets neither spaces nor quotes do, so that
    ``Subset(data, [1, 2])`` is one word; ``#`` at the beginning of a word ends the line.
    """
    words: list[Word] = []
    position = 0
    while position < len(line):
        if line[position].isspace():
            position += 1
            continue
        if line[position] == "#":
            break
        word, position, still_open = _word(line, position)
        words.append(word)
        if still_open:
            return Scan(words, position, still_open)
    return Scan(words, position, "")


def uncommented(line: str) -> str:
    """The line without the comment at its end."""
    return line[: scan(line).end]


def _word(line: str, start: int) -> tuple[Word, int, str]:
    """The word that begins at `start`, where it ends, and what it left open."""
    if line[start] in "'\"":
        text, end, still_open = _quoted(line, start)
        return Word(text, start, quoted=True), end, still_open
    text, position, expected = "", start, ""
    inner = ""  # the quote that a string inside brackets was opened with
    while position < len(line):
        char = line[position]
        if inner:
            if char == "\\":
                text, position = text + char, position + 1
                char = line[position : position + 1]
            elif char == inner:
                inner = ""
        elif expected:
            if char in "'\"":
                inner = char
            elif char in _CLOSING:
                expected = _CLOSING[char] + expected
            elif char == expected[0]:
                expected = expected[1:]
        elif char.isspace():
            break
        elif char in _CLOSING:
            expected = _CLOSING[char]
        elif char in "'\"" and text.startswith("-") and text.endswith("="):
            value, end, still_open = _quoted(line, position)
            return Word(text + value, start), end, still_open
        text, position = text + char, position + 1
    return Word(text, start), position, inner or expected[:1]


def _quoted(line: str, start: int) -> tuple[str, int, str]:
    """The text between the quote at `start` and the next of its kind; a backslash before a quote makes it part of the text."""
    quote, text, position = line[start], "", start + 1
    while position < len(line):
        if line[position] == "\\" and line[position + 1 : position + 2] == quote:
            position += 1
        elif line[position] == quote:
            rest = line[position + 1 : position + 2]
            if rest and not rest.isspace():
                message = f"{line[start : position + 1]} is followed by {rest}: put a space after the quote, or quotes around the whole word"
                raise ConfigError(message)
            return text, position + 1, ""
        text, position = text + line[position], position + 1
    return text, position, quote


def split(line: str, options: Mapping[str, Option], magic: str) -> Arguments:
    """Take a line apart by the options of a magic.

    Raises:
        ConfigError: for unknown and repeated options, missing values, open quotes and brackets.
    """
    words, _, still_open = scan(line)
    if still_open:
        message = f"{magic}: the closing {still_open} is missing in: {line[words[-1].start :]}"
        raise ConfigError(message)
    found = Arguments()
    queue = list(reversed(words))
    while queue:
        word = queue.pop()
        if word.is_option:
            _take(word, queue, options, found, magic)
        else:
            found.words.append(word)
    return found


@dataclass(slots=True)
class Arguments:
    """What `split` found: words, options with their values, synonyms that were used, in the order of the line."""

    words: list[Word] = field(default_factory=list)
    values: dict[str, str | bool] = field(default_factory=dict)
    synonyms: dict[str, str] = field(default_factory=dict)
    help: bool = False
    _given: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: str | bool, flag: str) -> None:
        if name in self._given:
            other = self._given[name]
            message = f"{flag} is given twice: keep one" if other == flag else f"{other} and {flag} are the same option: keep one"
            raise ConfigError(message)
        self._given[name] = flag
        self.values[name] = value


def _take(word: Word, queue: list[Word], options: Mapping[str, Option], found: Arguments, magic: str) -> None:
    flag, equals, attached = word.text.partition("=")
    if flag in ("-h", "--help"):
        found.help = True
        return
    if re.match(r"^-n\d+$", flag):
        flag, equals, attached = "-n", "=", flag[2:]
    name, negated = _look_up(flag, options, magic)
    option = options[name]
    if flag.lstrip("-").replace("-", "_") not in (name, f"no_{name}", "n"):
        found.synonyms[flag] = spelled(name)
    if negated:
        if equals:
            message = f"{flag} takes no value: write {flag}, or {option.spelling}={attached}"
            raise ConfigError(message)
        found.put(name, False, flag)
    elif equals:
        if not attached:
            raise ConfigError(_missing(flag, option))
        found.put(name, attached, flag)
    elif option.flag:
        follows = queue and not queue[-1].quoted and queue[-1].text.lower() in (*_FLAG_WORDS, *option.words)
        found.put(name, queue.pop().text if follows else True, flag)
    elif not queue or queue[-1].is_option:
        raise ConfigError(_missing(flag, option))
    else:
        value = queue.pop().text
        if name in UNITS and value.isdigit() and queue and not queue[-1].quoted and queue[-1].text in UNITS[name]:
            value += f" {queue.pop().text}"
        found.put(name, value, flag)


def _missing(flag: str, option: Option) -> str:
    return f"{flag} needs a value ({option.metavar or 'true or false'}): {option.help}"


def _look_up(flag: str, options: Mapping[str, Option], magic: str) -> tuple[str, bool]:
    """Name of the option that a flag stands for, and whether the flag negates it.

    Raises:
        ConfigError: for an unknown one, with the nearest names.
    """
    word = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else {"-n": "n"}.get(flag, "")
    name = word if word in options else SYNONYMS.get(word, "")
    if name in options:
        return name, False
    positive = word.removeprefix("no_")
    positive = positive if positive in options else SYNONYMS.get(positive, "")
    if word.startswith("no_") and positive in options and options[positive].flag:
        return positive, True
    bare = flag.lstrip("-").replace("_", "-").lower()
    if bare in ("model", "data", "train-data") and "val" in options:
        remedy = f" MODEL and DATA stand without a flag: {magic} MODEL DATA"
    elif bare in ("val-data", "valid", "validation", "validation-data", "test-data") and "val" in options:
        remedy = " Did you mean --val?"
    else:
        known = [other.replace("_", "-") for other in (*options, *(synonym for synonym, ours in SYNONYMS.items() if ours in options))]
        remedy = suggest(bare, known).replace("mean ", "mean --").replace(" or ", " or --") or f" {magic} -h lists the options."
    message = f"{flag} is not an option of {magic}.{remedy}"
    raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A line of %%ddp_train or %ddp_plan: `model`, `data`, `val`, `loss` are expressions, `options` values of TrainConfig as written."""

    model: str
    data: str
    val: str | None = None
    loss: str | None = None
    config: Path | None = None
    freeze_rb_layer: str | None = None
    bind: str | None = None
    background: bool = False
    dry_run: bool = False
    note: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)


def parse(line: str, magic: str = "%%ddp_train") -> Invocation | None:
    """Parse the line of a training magic; None where it asks for help.

    Raises:
        ConfigError: for anything in it that is unknown, missing, given twice or left over.
    """
    found = split(line, train_options(), magic)
    if found.help:
        return None
    model, data = _model_and_data(found.words, magic)
    values = dict(found.values)
    if flag_value("no_load", values.pop("no_load", False)):
        found.put("load", "none", "--no-load")
        values["load"] = "none"
    call = {name: values.pop(name, None) for name in ("val", "loss", "note", "config", "freeze_rb_layer", "as")}
    if call["freeze_rb_layer"] is not None and call["config"] is None:
        message = "--freeze-rb-layer goes with --config: it says what freeze_rb_layer in the file's stages means"
        raise ConfigError(message)
    return Invocation(
        model=model,
        data=data,
        val=_text(call["val"]),
        loss=_text(call["loss"]),
        note=_text(call["note"]),
        config=None if call["config"] is None else Path(str(call["config"])).expanduser(),
        freeze_rb_layer=_text(call["freeze_rb_layer"]),
        bind=None if call["as"] is None else identifier(str(call["as"]), "--as"),
        background=flag_value("background", values.pop("background", False)),
        dry_run=flag_value("dry_run", values.pop("dry_run", False)),
        options={name: _norm(value) if name == "norm" else value for name, value in values.items()},
        synonyms=found.synonyms,
    )


def _text(value: str | bool | None) -> str | None:
    return None if value is None else str(value)


def _model_and_data(words: Sequence[Word], magic: str) -> tuple[str, str]:
    usage = f"{magic} MODEL DATA [options]; {magic} -h lists the options"
    for word in words:
        if not word.quoted and word.text[0] in _DASHES:
            message = f"{word.text} begins with a dash that is no hyphen: write --{word.text.lstrip(_DASHES)}"
            raise ConfigError(message)
    if len(words) < 2:
        what = f"{words[0].text} is the model; the training data is missing" if words else "model and training data are missing"
        message = f"{what}: {usage}"
        raise ConfigError(message)
    if comma := next((word.text for word in words[:2] if not word.quoted and word.text.strip(",") != word.text), None):
        message = f"{comma}: names are separated by a space, without a comma"
        raise ConfigError(message)
    if len(words) > 2:
        rest = " ".join(word.text for word in words[2:])
        message = (
            f"{rest}: {words[0].text} is the model and {words[1].text} the data already. "
            "Validation data goes to --val, options begin with --, values with spaces stand in quotes"
        )
        raise ConfigError(message)
    return words[0].text, words[1].text


def identifier(name: str, flag: str) -> str:
    """Return a name that a variable may have.

    Raises:
        ConfigError: for anything else.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        message = f"{flag} {name}: not a name that a variable can have; letters, digits and _, not a digit first, no Python keyword"
        raise ConfigError(message)
    return name


def flag_value(name: str, value: str | bool) -> bool:
    """Read the value of a flag.

    Raises:
        ConfigError: for a word that is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    word = value.lower()
    if word not in _FLAG_WORDS:
        message = f"{spelled(name)}={value}: write {spelled(name)} alone, or true or false after it"
        raise ConfigError(message)
    return word in ("true", "yes", "on", "1")


def number_value(name: str, value: str | bool, kind: type[int] | type[float]) -> float:
    """Read a number that is not negative.

    Raises:
        ConfigError: for anything else.
    """
    try:
        number = kind(str(value))
    except ValueError:
        number = -1
    if number < 0:
        message = f"{spelled(name)} {value}: must be a {'whole ' if kind is int else ''}number, 0 or more"
        raise ConfigError(message)
    return number


def _norm(value: str | bool) -> object:
    """Read ``encoder.*=sync,head=keep`` and ``{'encoder.*': 'sync'}`` as a dict."""
    text = str(value)
    if text.startswith("{"):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            message = f"norm={text}: not a dict of quoted names; write --norm 'encoder.*=sync,head=keep'"
            raise ConfigError(message) from None
    if "=" not in text:
        return text
    pairs = [pair.strip().rpartition("=") for pair in text.split(",")]
    if not all(pattern and kind for pattern, _, kind in pairs):
        message = f"norm={text}: every part must be pattern=value, as in encoder.*=sync,head=keep"
        raise ConfigError(message)
    names = [pattern.strip() for pattern, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        message = f"norm={text}: {twice} stands there twice: keep one"
        raise ConfigError(message)
    return {pattern.strip(): kind.strip() for pattern, _, kind in pairs}
