"""Which weights end up in the model of the notebook, and what is said about it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp import checkpoint
from nbddp.errors import CheckpointError, ConfigError
from nbddp.rundir import RunDir, find_run

if TYPE_CHECKING:
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


def initial_weights(init: str, model: nn.Module, root: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that a run starts from (None: the model as it is), and the line that says so.

    Raises:
        ConfigError: for a run or file that is not there.
        CheckpointError: for a file that does not fit the model.
    """
    origin = origin_of(model)
    if init == "current":
        return None, None if (held := origin.holds(model)) is None else f"starts from {held}"
    if init == "initial":
        if origin.initial is None:
            return None, "starts from its initial weights, which are the current ones"
        if not origin.initial.is_file():
            message = f"init=initial: {origin.initial} is gone, its run was deleted; use --init current"
            raise ConfigError(message)
        path = origin.initial
    else:
        path = checkpoint.checkpoint_path(init)
        if not path.is_file():
            if path.suffix in (".pt", ".pth"):
                message = f"init={init}: no such checkpoint file; init is current, initial, a run, or a file"
                raise ConfigError(message)
            path = find_run(init, root).checkpoints / "last.pt"
    problems = checkpoint.misfits(model, checkpoint.state_of(checkpoint.read(path), path))
    if problems:
        shown = "\n  ".join(problems[:12])
        message = f"init={init}: {path} does not fit the model:\n  {shown}"
        raise CheckpointError(message)
    return path.resolve(), f"starts from {path.parent.parent.name}, {path.name}" if path.parent.name == "checkpoints" else f"starts from {path}"


def chosen(config: TrainConfig, *, patient: bool) -> str | None:
    """`load` resolved: last, best, or None where nothing is loaded; `patient` says that the last stage waits for better values."""
    if config.load == "none":
        return None
    return config.load if config.load != "auto" else "best" if patient else "last"


def file_of(run: RunDir, which: str | int) -> Path:
    """The checkpoint file that `which` names.

    Raises:
        CheckpointError: lists what is there.
    """
    name = f"epoch-{which:04d}" if isinstance(which, int) and not isinstance(which, bool) else str(which)
    path = run.checkpoints / f"{name}.pt"
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


def load_into(model: nn.Module, run: RunDir, which: str | int) -> str:
    """Write a run's checkpoint into a model in place and return the words for what it holds now.

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
    checkpoint.load_state(model, state, strict=True, what=f"{path.name} of run {run.id}")
    origin = origin_of(model)
    if which == "initial":
        origin.loaded = None
        return "its initial weights"
    at = f"epoch {content['epoch']}" + (f", step {content['step']}" if not _whole(content) else "")
    origin.loaded, origin.versions = f"run {run.id.rsplit('-', 1)[1]}, {at}", _versions(model)
    return at


def _whole(content: dict[str, object]) -> bool:
    """Whether a checkpoint stands at the end of its epoch."""
    return content.get("epochs_done") == content.get("epoch")


def remember_initial(model: nn.Module, run: RunDir) -> None:
    """After a run that made steps: where the weights first bundled for this model are."""
    origin, path = origin_of(model), run.checkpoints / "initial.pt"
    if origin.initial is None and path.is_file():
        origin.initial = path


def holds_line(name: str, which: str, at: str, state: RunState, monitor: str) -> str:
    """The last line of a run: what the model holds, and whether there was better."""
    entry = next((c for c in state.checkpoints if c["name"] == which), None)
    value = None if entry is None else entry.get("value")
    shown = "" if value is None else f" ({monitor} {float(value):.4g})"
    line = f"{name}: {at}{shown}"
    best = state.best
    if which == "last" and best is not None and entry is not None and best["step"] != entry["step"] and best["value"] != value:
        line += f'; best was epoch {best["epoch"]} ({float(best["value"]):.4g}): run.load("best")'
    elif which == "best":
        line += ", the best"
    return line
