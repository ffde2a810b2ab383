"""The options of the magics: what stands behind each flag.

The flags of a run are the fields of TrainConfig, read off their definition; beside them stand a few that belong to the call. Used in the kernel by the
parser of the line, by completion and by the help; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from nbddp.config import SYNONYMS, TrainConfig

CALL = "this call"
"""Group of the options that are not part of the configuration."""

UNITS = {
    "val_every": ("epoch", "epochs", "step", "steps"),
    "checkpoint_every": ("epoch", "epochs", "step", "steps", "min", "minute", "minutes"),
    "max_time": ("s", "sec", "second", "seconds", "min", "minute", "minutes", "h", "hour", "hours"),
}
"""Words that may follow the number of these options without quotes."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a magic.

    Attributes:
        name: with underscores, as in Python.
        group: heading under which the help lists it.
        metavar: what its value is called; empty for a flag that stands alone.
        default: None where leaving it out means something that the help says in words.
        words: values that it takes, where they can be listed.
        flag: whether it may stand without a value.
        text: whether its value is free text, so that any word is right.
    """

    name: str
    help: str
    group: str = CALL
    metavar: str = ""
    default: object = None
    words: tuple[str, ...] = ()
    flag: bool = False
    text: bool = False

    @property
    def spelling(self) -> str:
        return spelled(self.name)


def spelled(name: str) -> str:
    """The flag of a name: ``--batch-size``."""
    return "--" + name.replace("_", "-")


INVOCATION = (
    Option("val", "validation data: a name or an expression of the notebook", metavar="EXPR", text=True),
    Option("loss", "the loss: a name or an expression of the notebook, instead of `loss` in the cell", metavar="EXPR", text=True),
    Option("config", "settings file (YAML): options as keys and `stages`, or another system's; options in the line win", metavar="FILE", text=True),
    Option("freeze_rb_layer", "what freeze_rb_layer in the stages of such a file means: patterns over parameter names", metavar="PATTERN", text=True),
    Option("as", "name that the run gets in the notebook", metavar="NAME", default="run", text=True),
    Option("background", "return at once; run.wait() or run.load() brings the weights", flag=True),
    Option("no_load", "leave the model as it is, like --load none", flag=True),
    Option("dry_run", "show the plan and start nothing, like %ddp_plan", flag=True),
    Option("note", "a remark that stays with the run", metavar="TEXT", text=True),
)


def _plain_types(annotation: Any) -> list[Any]:
    """The types that an annotation allows, with Annotated and unions taken apart; a Literal stays whole."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _plain_types(get_args(annotation)[0])
    if origin is None or origin in (Literal, tuple, dict):
        return [annotation]
    return [plain for part in get_args(annotation) for plain in _plain_types(part)]


def _field_option(name: str) -> Option:
    field = TrainConfig.model_fields[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    types = _plain_types(field.annotation)
    words = tuple(str(word) for plain in types if get_origin(plain) is Literal for word in get_args(plain))
    flag = bool in types
    indices = any(get_origin(plain) is tuple for plain in types)
    metavar = "" if flag else "|".join(words) if words and not indices else _metavar(name, types)
    return Option(
        name=name,
        help=field.description or "",
        group=str(extra["group"]),
        metavar=metavar,
        default=field.default,
        words=("true", "false", *(("auto",) if type(None) in types else ())) if flag else words,
        flag=flag,
        text=str in types,
    )


def _metavar(name: str, types: list[Any]) -> str:
    if name in UNITS:
        return "TIME" if name == "max_time" else "EVERY"
    names = {int: "N", float: "X", str: "TEXT"}
    return next((names[plain] for plain in types if plain in names), "PATH" if Path in types else "VALUE")


@functools.cache
def train_options() -> dict[str, Option]:
    """Every option of %%ddp_train by its name, those of the call first."""
    call = {option.name: option for option in INVOCATION}
    return call | {name: _field_option(name) for name in TrainConfig.model_fields}


def synonyms_of(name: str) -> list[str]:
    """Names that other tools give to an option."""
    return [other for other, ours in SYNONYMS.items() if ours == name]


RUNS_COLUMNS = ("best", "duration", "loss", "note", "run", "size", "started", "state", "steps")
"""By which `nbddp.kernel.table.RunTable` sorts."""
RUNS_OPTIONS = {
    option.name: option
    for option in (
        Option("root", "folder of the run directories", metavar="DIR", text=True),
        Option("sort", "order of the runs: a column, or an option of the runs such as lr", metavar="COLUMN", default="started", words=RUNS_COLUMNS),
        Option("reverse", "the other way round", flag=True),
        Option("prune", "name the ended runs that could be deleted", flag=True),
        Option("keep", "how many of the newest runs stay", metavar="N", default=20),
        Option("older_than_days", "younger runs stay", metavar="DAYS", default=30),
        Option("dry_run", "only name them; --no-dry-run deletes them", flag=True, default=True),
    )
}
CONFIG_OPTIONS = {
    option.name: option
    for option in (
        Option("cell", "put the cell of these options into the next one, or of the last panel's", flag=True),
        Option("from", "fill the panel from a run (a variable, its id or directory) or a settings file", metavar="RUN", text=True),
    )
}
"""Beside those of a run."""
ATTACH_OPTIONS = {"as": next(option for option in INVOCATION if option.name == "as")}
LOAD_OPTIONS = {
    option.name: option
    for option in (
        Option("which", "which checkpoint of the run", metavar="last|best|initial|EPOCH", words=("last", "best", "initial")),
        Option("strict", "every entry must be in both and fit; --no-strict leaves out what does not", flag=True, default=True),
        Option("weights_only", "tensors and plain types only; --no-weights-only runs the code that a file carries", flag=True, default=True),
    )
}
