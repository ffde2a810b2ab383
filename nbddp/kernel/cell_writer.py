"""The %%ddp_train cell that asks for a configuration: what `nbddp.kernel.line` reads, written.

A pure function of its arguments, the inverse of the parser: a written line, with the notebook's names put in and parsed, gives the same options. Runs in
the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.line import scan
from nbddp.kernel.options import UNITS, spelled

MEANT = (
    *("epochs", "monitor", "matmul_precision", "shuffle", "drop_last", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
    *("batch_size", "per_rank_batch_size", "val_batch_size"),
)
"""Options that are not the same given with their default and left out: the length beside another limit, what a DataLoader or the notebook brings."""

Values = Mapping[str, str | bool]
"""Options as a line, or a control, says them: text, or a flag."""

_EVALUATED = re.compile(r"\{\s*[A-Za-z_(]")
_DOLLAR = re.compile(r"\$(?=[A-Za-z_])")


@dataclass(frozen=True, slots=True)
class Call:
    """What stands in the line of a cell: expressions of the notebook, options as text, and what belongs to the call."""

    model: str
    data: str
    values: Values = field(default_factory=dict)
    val: str | None = None
    loss: str | None = None
    bind: str | None = None
    note: str | None = None
    background: bool = False


def write_cell(call: Call, body: str = "") -> str:
    """The cell; without a body, which a cell magic needs, the line magic.

    Raises:
        ConfigError: for what no line can say.
    """
    body = body.strip("\n")
    return f"%%ddp_train {write_line(call)}\n{body}" if body.strip() else f"%ddp_train {write_line(call)}"


def write_line(call: Call) -> str:
    """The line after the name of the magic.

    Raises:
        ConfigError: for what no line can say: a text with spaces and a backslash at its end.
    """
    words = [_word(call.model, "MODEL"), _word(call.data, "DATA")]
    for name, text in (("val", call.val), ("loss", call.loss)):
        if text is not None:
            words += [spelled(name), _word(text, spelled(name))]
    for name, value in call.values.items():
        words += _option(name, value)
    for name, text in (("as", call.bind), ("note", call.note)):
        if text is not None:
            words += [spelled(name), _word(text, spelled(name))]
    return " ".join([*words, *(["--background"] if call.background else [])])


def told(config: TrainConfig) -> dict[str, str | bool]:
    """The options of a configuration that a line has to say: those that are not the default, and those whose being given says something.

    Raises:
        ConfigError: for a value that has no text, which only Python can give.
    """
    changed = config.changes()
    names = [name for name in type(config).model_fields if name in changed or (name in MEANT and name in config.given)]
    return {name: value_text(name, getattr(config, name)) for name in names}


def value_text(name: str, value: Any) -> str | bool:
    """How a line, a control or a settings file writes the value of a field; a flag is a bool.

    Raises:
        ConfigError: for a value that has no text.
    """
    if value is None:
        return "auto" if name in ("nproc", "pin_memory") else "none"
    if name == "max_time":
        return _duration(float(value))
    if isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return re.sub(r"e([+-])0", r"e\1", repr(value)).removesuffix(".0")
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if name == "norm":
        return _patterns(value)
    if name == "wandb":
        if comma := next((key for key, text in value.items() if "," in text), None):
            message = f"wandb has {comma}={value[comma]!r}, and a comma separates the pairs of a line: give it to nbddp.train, or in a settings file"
            raise ConfigError(message)
        return ",".join(f"{key}={text}" for key, text in value.items())
    return str(value)


def _duration(seconds: float) -> str:
    """In the largest unit that it is a whole number of."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    plain = format(Decimal(repr(seconds)), "f")  # durations are written without an exponent
    return f"{plain.rstrip('0').rstrip('.') if '.' in plain else plain} s"


def _patterns(kinds: Mapping[str, str]) -> str:
    plain = kinds and all(pattern == pattern.strip() and pattern and not pattern.startswith("{") and "," not in pattern for pattern in kinds)
    return ",".join(f"{pattern}={kind}" for pattern, kind in kinds.items()) if plain else repr(dict(kinds))


def _option(name: str, value: str | bool) -> list[str]:
    flag = "-n" if name == "nproc" else spelled(name)
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag.removeprefix('--')}"]
    if name in UNITS and (match := re.fullmatch(r"\d+ (\w+)", value)) and match[1] in UNITS[name]:
        return [flag, value]
    return [flag, _word(value, flag)]


def _word(text: str, what: str) -> str:
    """A text as one word of a line: bare where it is read back as it is, else in quotes."""
    if _is_bare(text) and _is_bare(kept := _kept(text)):  # a comment is looked for in the line as it is typed
        return kept
    if text.endswith("\\"):
        message = f"{what} {text!r}: a line can't say a text in quotes that ends with a backslash; give it to nbddp.train, or in a settings file"
        raise ConfigError(message)
    quote = "'" if '"' in text and "'" not in text else '"'
    return quote + _kept(text.replace(quote, f"\\{quote}")) + quote


def _is_bare(text: str) -> bool:
    """Whether the parser reads it back as one word that is neither an option nor refused as MODEL or DATA."""
    if not text.isprintable() or text.startswith(("\u2013", "\u2014", "\u2212")) or text.strip(",") != text:
        return False
    try:
        words, end, still_open = scan(text)
    except ConfigError:  # a quote in the middle of it
        return False
    return len(words) == 1 and end == len(text) and not still_open and words[0].text == text and not words[0].quoted and not words[0].is_option


def _kept(text: str) -> str:
    """A text whose braces, dollars and line ends come out as they are when the notebook's names are put into the line."""
    parts, position = [], 0
    while position < len(text):
        char = text[position]
        if char == "{":
            group = text[position : _group_end(text, position)]
            if not group:
                parts.append("{chr(123)}")
                position += 1
                continue
            evaluated = group.startswith("{{") or _EVALUATED.match(group) is not None
            if group.isprintable():
                parts.append(f"{{{group}}}" if evaluated else group)
                position += len(group)
                continue
            parts.append("{chr(123)}")
        elif not char.isprintable() or (char == "$" and _DOLLAR.match(text, position)):
            parts.append(f"{{chr({ord(char)})}}")
        else:
            parts.append(char)
        position += 1
    return "".join(parts)


def _group_end(text: str, start: int) -> int:
    """Position after the brace that closes the one at `start`; `start` where none does."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return start
