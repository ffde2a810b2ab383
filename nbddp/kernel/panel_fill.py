"""What a configuration panel, or a written cell, begins with: options of a line, of a run or of a settings file, and a body for the cell.

Runs in the kernel and in terminal IPython; imports torch only where a run is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.cell_writer import MEANT, Call, Values, told, value_text, write_cell, write_line
from nbddp.kernel.line import parse, uncommented
from nbddp.kernel.names import expand
from nbddp.kernel.panel_body import bound_names, found_loss, stages_text
from nbddp.kernel.settings import read

if TYPE_CHECKING:
    from nbddp.kernel.line import Invocation
    from nbddp.rundir import RunDir

SUFFIXES = (".yaml", ".yml", ".json")
LATEST = ("last", "latest")
_MAGIC = re.compile(r"^\s*(%{1,2})ddp_train\b(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Draft:
    """A cell as far as it is known: its line, its body, and what there is to say about where it came from."""

    call: Call
    body: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """What a draft is filled from: options, and a call of which `model` and `data` may be empty."""

    options: Mapping[str, object] | Path = field(default_factory=dict)
    call: Call = field(default_factory=lambda: Call("", ""))
    body: str = ""

    @classmethod
    def of(cls, draft: Draft) -> Source:
        """What an earlier draft says.

        Raises:
            ConfigError: where it has a wrong value.
        """
        return cls(read_texts(draft.call.values), draft.call, draft.body)


def draft(source: Source, invocation: Invocation, names: Mapping[str, Any]) -> Draft:
    """Put a line over what it is filled from: the line wins, and what the source has against it is left out.

    Raises:
        ConfigError: for wrong values, and for options that exclude each other.
    """
    call, body = source.call, source.body
    has_val = (invocation.val or call.val) is not None
    settings = read(source.options, over=invocation.options, has_val=has_val, freeze_rb_layer=invocation.freeze_rb_layer)
    config = TrainConfig(**{**{name: getattr(settings.config, name) for name in settings.config.given}, **invocation.options})
    if settings.stages:
        body = "\n".join(part for part in (stages_text(settings.stages), body) if part)
    loss = invocation.loss or call.loss
    if loss is None and not {"loss", "training_step"} & bound_names(body):
        body = "\n".join(part for part in (body, found_loss(names)) if part)
    written = Call(
        model=invocation.model,
        data=invocation.data,
        values=given_texts(config),
        val=invocation.val or call.val,
        loss=loss,
        bind=invocation.bind or call.bind,
        note=invocation.note or call.note,
        background=invocation.background,
    )
    return Draft(written, body, settings.notes)


def given_texts(config: TrainConfig) -> dict[str, str | bool]:
    """Every option that was given with a value, or takes back what a DataLoader brings, as text."""
    given = {name: getattr(config, name) for name in type(config).model_fields if name in config.given}
    return {name: value_text(name, value) for name, value in given.items() if value is not None or name in MEANT}


def read_texts(values: Values) -> dict[str, object]:
    """Options as a line reads their texts.

    Raises:
        ConfigError: for a text that a line can't say, and for a wrong value.
    """
    invocation = parse(expand(write_line(Call("model", "data", values)), {}))
    assert invocation is not None  # no option is --help
    return TrainConfig.read(invocation.options)


def told_only(draft: Draft) -> Draft:
    """The same with the options that a line has to say.

    Raises:
        ConfigError: where an option has a wrong value.
    """
    return replace(draft, call=replace(draft.call, values=told(TrainConfig(**read_texts(draft.call.values)))))


def cell_of(draft: Draft) -> str:
    """The cell of a draft, with the options that its line has to say.

    Raises:
        ConfigError: where an option has a wrong value.
    """
    draft = told_only(draft)
    return write_cell(draft.call, draft.body)


def source_of(text: str, names: Mapping[str, Any]) -> Source:
    """What --from names: a run (a variable that holds one, its id, a part of it, its directory, the latest) or a settings file.

    Raises:
        ConfigError: where there is no such run or file.
    """
    from nbddp.kernel.run import Run
    from nbddp.kernel.runs import attach, last_run
    from nbddp.rundir import run_dirs
    from nbddp.runroot import run_root

    value = names.get(text)
    path = value if isinstance(value, Path) else Path(text).expanduser()
    if isinstance(value, Run):
        return of_run(value.files)
    if path.is_file() or (path.suffix in SUFFIXES and not path.is_dir()):
        return Source(path)
    if text in LATEST and not path.is_dir():
        if (last := last_run()) is not None:
            return of_run(last.files)
        if found := run_dirs(run_root()):
            return of_run(found[-1])
    return of_run(attach(path if isinstance(value, Path) else text).files)


def of_run(files: RunDir) -> Source:
    """A run's options, the names that it was started with, and the body of its cell."""
    spec = files.read_spec() or {}
    call = Call(str(spec.get("model_name") or ""), str(spec.get("data_name") or ""), val=spec.get("val_name"))
    source = str((spec.get("cell") or {}).get("source") or "")
    body, stages = "", ""
    if match := _MAGIC.search(source):
        body = source[match.end() :].strip("\n") if match[1] == "%%" else ""
        invocation = _line_of(match[2])
        if invocation is not None:
            call = replace(call, loss=invocation.loss, bind=invocation.bind, note=invocation.note)
            stages = _stages_of(invocation)
    return Source(dict(spec.get("config") or {}), call, "\n".join(part for part in (stages, body) if part))


def _line_of(line: str) -> Invocation | None:
    """The line of a run's cell, as far as it can be read without the names that it was read with."""
    try:
        return parse(uncommented(line))
    except ConfigError:
        return None


def _stages_of(invocation: Invocation) -> str:
    if invocation.config is None or not invocation.config.is_file():
        return ""
    try:
        stages = read(invocation.config, over=invocation.options, has_val=True, freeze_rb_layer=invocation.freeze_rb_layer).stages
    except ConfigError:  # the file is another one by now
        return ""
    return stages_text(stages) if stages else ""
