"""Which control of the configuration panel each option gets, read off the definition of the options.

A choice, a switch, or a text: numbers are texts, since a spin box can't be empty, which is what leaves an option out, and corrects a wrong value without
a word, where a text is told what the magic would say. Used in the kernel by the panel; imports neither torch nor the widgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from nbddp.config import TrainConfig
from nbddp.kernel.cell_writer import value_text
from nbddp.kernel.options import train_options
from nbddp.rules import not_yet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbddp.kernel.options import Option

Kind = Literal["choice", "switch", "text", "suggested"]
_SUGGESTED = ("devices", "norm", "resume", "init")
"""Texts of which some are worth offering."""


@dataclass(frozen=True, slots=True)
class Control:
    """How an option is set.

    Attributes:
        name: of the field.
        kind: choice of words, switch, text, or text with words to choose from.
        help: the field's own text, with what is not available yet.
        default: what holds where it is left out, as text or flag; empty where the help says it in words.
        choices: label and text of each; the first, with an empty text, leaves the option out.
        available: what is not is shown and can't be set.
    """

    name: str
    kind: Kind
    help: str
    default: str | bool
    choices: tuple[tuple[str, str], ...] = ()
    available: bool = True


def controls(brought: Mapping[str, object]) -> dict[str, list[Control]]:
    """The control of every option, by group in the order of their definition; `brought` are options that a DataLoader sets where they are left out."""
    options = train_options()
    fields = [options[name] for name in TrainConfig.model_fields]
    return {group: [_control(option, brought) for option in members] for group, members in groupby(fields, key=lambda option: option.group)}


def _control(option: Option, brought: Mapping[str, object]) -> Control:
    name, default, later = option.name, TrainConfig.model_fields[option.name].default, not_yet(option.name)
    value = brought.get(name, default)
    text = "" if value is None else value_text(name, value)
    help_ = "; ".join([option.help, *(["the DataLoader's where it is left out"] if name in brought else []), *([later] if later else [])])
    if option.flag and isinstance(default, bool):
        return Control(name, "switch", help_, text, available=not later)
    if option.words and name not in _SUGGESTED:
        words = [(word, word) for word in option.words]
        left_out = "default" if value is None else f"default ({_spoken(text)})"
        return Control(name, "choice", help_, text, ((left_out, ""), *words), available=not later)
    return Control(name, "suggested" if name in _SUGGESTED else "text", help_, text, available=not later)


def _spoken(text: str | bool) -> str:
    return str(text).lower() if isinstance(text, bool) else text


def entered(control: Control, text: str | bool) -> str | bool | None:
    """What a control says for its option; None where it leaves it out."""
    if isinstance(text, bool):
        return None if text is control.default else text
    if not text.strip():
        return None
    return text == "true" if control.kind == "choice" and text in ("true", "false") else text


def shown(control: Control, value: str | bool | None) -> str | bool:
    """What a control shows for a value of its option; None leaves it out."""
    if control.kind == "switch":
        return bool(control.default if value is None else value)
    return "" if value is None else _spoken(value)
