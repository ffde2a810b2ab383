"""Which weights end up in the model of the notebook, and what is said about it."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbddp import checkpoint, norm
from nbddp.errors import CheckpointError, ConfigError
from nbddp.launch.progress import BY_FORCE
from nbddp.numerals import value_text
from nbddp.rundir import RunDir, find_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from nbddp.config import TrainConfig
    from nbddp.state import RunState


@dataclass(slots=True)
class Origin:
    """What is known about a model object: the file with the weights first bundled for it, and what was loaded into it last.

    `versions` are those of its parameters after that: torch counts what is written to a tensor in place.
    """

    initial: Path | None = None
    loaded: str | None = None
    versions: tuple[int, ...] = ()

    def holds(self, model: nn.Module) -> str | None:
        """What the model holds; None where nothing was loaded, or its weights were changed since."""
        return self.loaded if self.versions == _versions(model) else None


_ORIGINS: weakref.WeakKeyDictionary[nn.Module, Origin] = weakref.WeakKeyDictionary()


def _versions(model: nn.Module) -> tuple[int, ...]:
    return tuple(version for parameter in model.parameters() for version in (id(parameter), parameter._version))


def origin_of(model: nn.Module) -> Origin:
    """What this kernel knows about a model object."""
    return _ORIGINS.setdefault(model, Origin())


@dataclass(frozen=True, slots=True)
class Start:
    """Which weights a run starts from.

    Attributes:
        path: the checkpoint; None for the model as it is.
        line: what says so; None where there is nothing to say.
        swapped: whether the checkpoint is of the model with its normalization layers swapped as the run swaps them.
        unswapped: whether it is of the model before they were swapped by an earlier run.
    """

    path: Path | None = None
    line: str | None = None
    swapped: bool = False
    unswapped: bool = False


def initial_weights(init: str, model: nn.Module, root: Path, swaps: Mapping[str, str]) -> Start:
    """What a run starts from; `swaps` is what becomes of the model's normalization layers.

    Raises:
        ConfigError: for a run or file that is not there.
        CheckpointError: for a file that does not fit the model.
    """
    origin = origin_of(model)
    if init == "current":
        return Start(line=None if (held := origin.holds(model)) is None else f"starts from {held}")
    if init == "initial":
        if origin.initial is None:
            return Start(line="starts from its initial weights, which are the current ones")
        if not origin.initial.is_file():
            message = f"init=initial: {origin.initial} is gone, its run was deleted; use --init current"
            raise ConfigError(message)
        path = origin.initial
    else:
        path = checkpoint.checkpoint_path(init)
        if not path.is_file():
            if path.suffix in checkpoint.SUFFIXES:
                message = f"init={init}: no such checkpoint file; init is current, initial, a run, or a file"
                raise ConfigError(message)
            path = checkpoint.of_the_end(find_run(init, root))
    found = checkpoint.found_in(checkpoint.read(path), path)
    problems = checkpoint.misfits(model, found)
    swapped = unswapped = False
    if problems:
        with norm.swapped(model, swaps):
            swapped = not checkpoint.misfits(model, found)
        unswapped = init == "initial" and not swapped and not checkpoint.misfits(model, norm.without_dropped(found.state, model))
    if problems and not (swapped or unswapped):
        shown = "\n  ".join(problems[:12])
        message = f"init={init}: {path} does not fit the model:\n  {shown}"
        raise CheckpointError(message)
    of_run = path.parent.name == "checkpoints"
    line = f"starts from run {path.parent.parent.name.rsplit('-', 1)[-1]}, {path.name}" if of_run else f"starts from {path}"
    line += ", without what its swapped layers dropped" if unswapped else ""
    return Start(path.resolve(), line, swapped, unswapped)


def chosen(config: TrainConfig, *, patient: bool) -> str | None:
    """`load` resolved: last, best, or None where nothing is loaded; `patient` says that the last stage waits for better values."""
    if config.load == "none":
        return None
    return config.load if config.load != "auto" else "best" if patient else "last"


def file_of(run: RunDir, which: str | int) -> Path:
    """The checkpoint file that `which` names; `last` is the newest complete one, whichever file holds it.

    Raises:
        CheckpointError: lists what is there.
    """
    name = f"epoch-{which:04d}" if isinstance(which, int) and not isinstance(which, bool) else str(which)
    path = checkpoint.of_the_end(run) if which == "last" else run.checkpoints / f"{name}.pt"
    if path.is_file():
        return path
    if not run.path.is_dir():
        message = f"the directory of run {run.id} is gone, and its checkpoints with it"
        raise CheckpointError(message)
    if isinstance(which, int) and (other := _at_the_end_of(run, which)) is not None:
        return other
    have = sorted(file.stem for file in run.checkpoints.glob("*.pt"))
    rule = f"it has {', '.join(have)}" if have else "it ended before its first one"
    remedy = "; --keep-last N keeps those of the last N epochs" if name != which else ""
    message = f"run {run.id} has no checkpoint {which}: {rule}{remedy}"
    raise CheckpointError(message)


def _at_the_end_of(run: RunDir, epoch: int) -> Path | None:
    """The last or the best checkpoint, where it is that of an epoch."""
    for name in ("last", "best"):
        path = run.checkpoints / f"{name}.pt"
        if path.is_file() and (content := checkpoint.read(path)).get("epoch") == epoch and _whole(content):
            return path
    return None


@dataclass(frozen=True, slots=True)
class Landed:
    """What a model holds after a load.

    Attributes:
        file: the checkpoint, by the name of its file.
        at: words for where in training the weights are from.
        swapped: words for what became of the model's normalization layers; None where nothing did.
        facts: what else the checkpoint says.
    """

    file: str
    at: str
    swapped: str | None
    facts: Mapping[str, Any]


def load_into(model: nn.Module, run: RunDir, which: str | int) -> Landed:
    """Write a run's checkpoint into a model in place; where the run swapped normalization layers, those of the model are swapped alike.

    Raises:
        CheckpointError: where it is missing, not finite or does not fit; the model is unchanged then.
    """
    path = file_of(run, which)
    content = checkpoint.read(path)
    state = checkpoint.state_of(content, path)
    if (bad := checkpoint.non_finite(state, checkpoint.buffer_names(model))) is not None:
        finite = next((name for name in ("best", "initial") if name != which and (run.checkpoints / f"{name}.pt").is_file()), None)
        other = "" if finite is None else f"; {finite} is: run.load({finite!r})"
        message = f"{path.name} of run {run.id} is not finite ({bad}){other}; --on-nan skip or stop keeps the weights finite"
        raise CheckpointError(message)
    origin = origin_of(model)
    swapped = _swap_and_load(model, run, state, path, initial=which == "initial")
    if which == "initial":
        origin.loaded = None
        return Landed(path.stem, "its initial weights", swapped, content)
    at = f"epoch {content['epoch']}" + (f", step {content['step']}" if not _whole(content) else "")
    origin.loaded, origin.versions = f"run {run.id.rsplit('-', 1)[1]}, {at}", _versions(model)
    return Landed(path.stem, at, swapped, content)


def _swap_and_load(model: nn.Module, run: RunDir, state: Mapping[str, Any], path: Path, *, initial: bool) -> str | None:
    """Load, after the swap that the run made; return the words for what was swapped.

    The initial weights are of the model as it was first, and go into it whatever later runs made of its layers.
    """
    kinds: dict[str, str] = (run.read_spec() or {}).get("norm") or {}
    if initial:
        kinds = {name: kind for name, kind in kinds.items() if name in norm.batch_norm_layers(model)}
    try:
        changes = norm.apply(model, kinds)
    except ConfigError as error:
        mine = type(model).__name__
        message = f"run {run.id} swapped normalization layers, and this {mine} has others: {error}; run.model() rebuilds the one that was trained"
        raise CheckpointError(message) from None
    try:
        fitting = norm.without_dropped(state, model) if initial else state
        checkpoint.load_state(model, fitting, strict=True, what=f"{path.name} of run {run.id}")
    except BaseException:
        norm.undo(changes)
        raise
    return _became(changes) if changes else None


def _became(changes: Sequence[norm.Change]) -> str:
    """What was swapped, in words: ``2 BatchNorm layers became SyncBatchNorm, 1 LayerNorm, as in the run``."""
    kinds = Counter(change.kind for change in changes)
    first = next(iter(kinds))
    before = "SyncBatchNorm" if first == "batch" else "BatchNorm"
    parts = [f"{kinds[first]} {before} layer{'s' if kinds[first] > 1 else ''} became {norm.BECOMES[first]}"]
    return ", ".join([*parts, *(f"{count} {norm.BECOMES[kind]}" for kind, count in kinds.items() if kind != first)]) + ", as in the run"


def _whole(content: dict[str, object]) -> bool:
    """Whether a checkpoint stands at the end of its epoch."""
    return content.get("epochs_done") == content.get("epoch")


def remember_initial(model: nn.Module, run: RunDir) -> None:
    """After a run that made steps: where the weights first bundled for this model are."""
    origin, path = origin_of(model), run.checkpoints / "initial.pt"
    if origin.initial is None and path.is_file():
        origin.initial = path


def holds_line(name: str, landed: Landed, state: RunState, monitor: str, called: str) -> str:
    """The last line of a run, which is `called` so in the notebook: what the model holds, whether there was better, and whether the run was cut off."""
    step, value = landed.facts.get("step"), landed.facts.get("value")
    shown = "" if value is None else f" ({monitor} {value_text(float(value))})"
    line = f"{name}: {landed.at}{shown}"
    best = state.best
    if landed.file == "best":
        line += ", the best"
    elif best is not None and best["step"] != step and best.get("value") not in (None, value):
        line += f'; best was epoch {best["epoch"]} ({value_text(float(best["value"]))}): {called}.load("best")'
    line += f"; {cut}" if (cut := cut_off(state)) else ""
    return line if landed.swapped is None else f"{line}; {landed.swapped}"


def nothing_of(run: RunDir, state: RunState) -> str:
    """Why a run that was cut off has no weights of its own; empty for others."""
    if not (cut := cut_off(state)) or any(path.stem != "initial" for path in run.checkpoints.glob("*.pt")):
        return ""
    return f"{cut}, before its first checkpoint" if state.step else cut


def cut_off(state: RunState) -> str:
    """What happened to a run that was stopped, but not in order; empty for others."""
    if state.state != "stopped" or state.stop_reason not in BY_FORCE:
        return ""
    how = "killed" if state.stop_reason == "killed" else "terminated"
    return f"the run was {how} " + (f"after step {state.step}" if state.step else "before its first step")
