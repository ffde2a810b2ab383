"""Where a run goes on from: which checkpoint `--resume` means, and what of it the kernel needs to know.

Runs in the kernel before anything is written. `train.prepare` calls, in this order::

    point = resume.find(given.resume, root=run_root(given.run_root), name=given.name, model=model)
    merged = resume_rules.merge(point, brought=options of DataLoaders, given=options of the cell)
    notes = resume_rules.check(point, config, plan, stages=stages, sampler=sampler)      # after make_plan; the point's own notes are among them
    spec.update(point.to_spec())

The spec then has `parent` (a run's id), `resume` (the file), `resume_step` (the step that it is of; history joins the parents up to there) and `resume_best`
(the file with the best weights so far, which rank 0 links into the new run as best.pt and announces; None: there is none, and the best starts anew).
Restoring the state is the ranks' part. Imports no Jupyter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp import checkpoint, norm
from nbddp.errors import CheckpointError, ConfigError, suggest
from nbddp.kernel.text import short_id, value_text
from nbddp.rundir import RunDir, find_run, run_dirs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_HEAVY = ("model", "optimizer", "scheduler", "scaler", "rng", "comm_hook", "metrics")
"""What of a checkpoint only the ranks need."""

_SUFFIXES = (".pt", ".pth", ".ckpt")
SHOWN = 12


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint that a run can go on from.

    Attributes:
        path: the file.
        run: the run whose file it is; None where the file lies elsewhere.
        parent: id of that run.
        name: what the run was called, else its model's class.
        facts: the checkpoint without its tensors.
        best: the file that holds the best weights up to there.
        notes: what there is to say about the choice, a line each.
    """

    path: Path
    run: RunDir | None
    parent: str
    name: str
    facts: dict[str, Any]
    best: Path | None
    notes: tuple[str, ...] = ()

    @property
    def tail(self) -> str:
        """The last part of the parent's id, which is what people type."""
        return self.parent.rsplit("-", 1)[-1]

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch is under way: begun, and not over with its validation."""
        return int(self.facts["epochs_done"]) < int(self.facts["epoch"])

    @property
    def line(self) -> str:
        """What is resumed, for the plan line: ``resumes run k3f9 (digits), epoch 3, step 120, last.pt``."""
        stage = self.facts["stage_name"] or "0"
        at = f"epoch {self.facts['epoch']}, step {self.facts['step']}" + ("" if stage == "0" else f", stage {stage}")
        file = self.path.name if self.run is not None else str(self.path)
        return f"resumes run {self.tail} ({self.name}), {at}, {file}"

    def to_spec(self) -> dict[str, Any]:
        """What the new run's spec.json says about its parent."""
        best = None if self.best is None else str(self.best)
        return {"parent": self.parent, "resume": str(self.path), "resume_step": int(self.facts["step"]), "resume_best": best}


def find(resume: str, *, root: Path, name: str | None, model: nn.Module) -> ResumePoint:
    """Find the checkpoint that a run is to go on from.

    Args:
        resume: ``last``, a run's id or a part of it, a run directory, or a checkpoint file.
        root: the folder of run directories.
        name: the option; ``last`` is of runs of this name, or without one of runs of this class of model.
        model: what the checkpoint must fit.

    Raises:
        ConfigError: where there is no such file or run, or where the run goes on still.
        CheckpointError: where it has no complete checkpoint, or none that fits the model.
    """
    path = Path(resume).expanduser()
    notes: list[str] = []
    if not resume.strip():
        message = "resume is empty: give last, a run, a run directory or a checkpoint file"
        raise ConfigError(message)
    if resume == "last":
        run, notes = _latest(root, name, type(model).__name__)
    elif path.is_file():
        return _point(path.resolve(), checkpoint.read_resumable(path, verify=True), _run_of(path.resolve()), model, [])
    elif path.is_dir() and not (path / "spec.json").is_file():
        message = f"resume={resume} is a folder without spec.json, not a run directory: give last, a run, a run directory or a checkpoint file"
        raise ConfigError(message)
    else:
        run = _named(resume, path, root)
    _refuse_live(run)
    path, content, fallback = _newest(run)
    return _point(path, content, run, model, notes + fallback)


def _point(path: Path, content: dict[str, Any], run: RunDir | None, model: nn.Module, notes: list[str]) -> ResumePoint:
    if run is not None:
        _refuse_live(run)
    state = checkpoint.state_of(content, path)
    try:
        with norm.swapped(model, content.get("norm") or {}):
            problems = checkpoint.misfits(model, state)
    except ConfigError as error:
        message = f"{path} does not fit {type(model).__name__}, so that nothing can go on from it: {error}"
        raise CheckpointError(message) from None
    if problems:
        shown = "\n  ".join(problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []))
        message = f"{path} does not fit {type(model).__name__}, so that nothing can go on from it:\n  {shown}"
        raise CheckpointError(message)
    if (bad := checkpoint.non_finite(state, checkpoint.buffer_names(model))) is not None:
        better = [file for file, other in ([] if run is None else _complete(run)) if file != path and other.get("finite")]
        remedy = f"; {better[0].name} is: --resume {better[0]}" if better else ""
        message = f"{path} is not finite ({bad}), and training does not recover from that{remedy}"
        raise CheckpointError(message)
    spec = {} if run is None else run.read_spec() or {}
    facts = {key: value for key, value in content.items() if key not in _HEAVY}
    parent = run.id if run is not None else str(content.get("run"))
    called = spec.get("name") or spec.get("model_type") or short_id(parent).rsplit("-", 1)[0]
    best, lost = _best(path, facts, run)
    return ResumePoint(path, run, parent, str(called), facts, best, (*notes, *lost))


def _run_of(path: Path) -> RunDir | None:
    """The run whose checkpoint a file is."""
    folder = path.parent
    return RunDir(folder.parent) if folder.name == "checkpoints" and (folder.parent / "spec.json").is_file() else None


def _latest(root: Path, name: str | None, model_type: str) -> tuple[RunDir, list[str]]:
    """The latest run of a name, or of a class of model, that left a checkpoint."""
    others: list[str] = []
    notes: list[str] = []
    for run in reversed(run_dirs(root)):
        spec = run.read_spec() or {}
        if (spec.get("name") != name) if name is not None else (spec.get("model_type") != model_type):
            if _files(run):
                others.append(f"{run.id.rsplit('-', 1)[-1]} ({spec.get('name') or spec.get('model_type')})")
            continue
        _refuse_live(run)
        if _files(run):
            return run, notes
        notes.append(f"run {run.id.rsplit('-', 1)[-1]} is later and left no checkpoint: passed over")
    which = f"called {name}" if name is not None else f"of a model of class {model_type}"
    have = f"; there are {', '.join(others[:4])}: --resume {others[0].split(' ')[0]}" if others else ""
    message = f"resume=last: no run {which} in {root} has a checkpoint to go on from{have}"
    raise ConfigError(message)


def _named(resume: str, path: Path, root: Path) -> RunDir:
    """A run by its directory, its id or a part of it."""
    if not path.is_dir() and ("/" in resume or path.suffix in _SUFFIXES):
        if path.parent.is_dir():
            near = suggest(path.name, [other.name for other in path.parent.iterdir() if other.suffix in _SUFFIXES or other.is_dir()])
            message = f"resume={resume}: {path.parent} has no {path.name}.{near}"
        else:
            message = f"resume={resume}: there is no folder {path.parent}"
        raise ConfigError(message)
    if path.is_dir() or any(resume in run.id for run in run_dirs(root)):
        return find_run(path if path.is_dir() else resume, root)
    known = [run.id for run in run_dirs(root)]
    words = ["last", *(word for run in reversed(known) for word in (run.rsplit("-", 1)[-1], short_id(run), run))]
    message = f"resume={resume}: no such run in {root}, and no such file.{suggest(resume, words)} %ddp_runs lists the runs"
    raise ConfigError(message)


def _refuse_live(run: RunDir) -> None:
    if run.live():
        tail = run.id.rsplit("-", 1)[-1]
        message = f"run {run.id} goes on still, and two runs can't continue one: %ddp_stop {tail} first, or --init {tail} for a new run from its weights"
        raise ConfigError(message)


def _files(run: RunDir) -> list[Path]:
    """The checkpoints of a run that training could go on from; the initial one has weights only."""
    return [path for path in sorted(run.checkpoints.glob("*.pt")) if path.name != "initial.pt" and not path.name.startswith(".")]


def _complete(run: RunDir) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The complete checkpoints of a run, those of the latest step first."""
    found = []
    for path in _files(run):
        try:
            found.append((path, checkpoint.read_resumable(path)))
        except CheckpointError:  # it is passed over; what is wrong with last.pt is said
            continue
    yield from sorted(found, key=lambda entry: (entry[1]["step"], entry[1]["epochs_done"], entry[0].name == "best.pt"), reverse=True)


def _newest(run: RunDir) -> tuple[Path, dict[str, Any], list[str]]:
    """The checkpoint of the run's end, or where it can't be read the newest that can."""
    last = run.checkpoints / "last.pt"
    last = checkpoint.of_the_end(run) if last.is_file() else last
    try:
        return last, checkpoint.read_resumable(last, verify=True), []
    except CheckpointError as error:
        problem = str(error) if last.is_file() else "it has no last.pt"
    if (found := checkpoint.newest_complete(run.checkpoints, exclude=(last,))) is not None:
        return *found, [f"run {run.id.rsplit('-', 1)[-1]} goes on from {found[0].name}, its newest complete checkpoint: {problem}"]
    why = "it ended before its first one" if not _files(run) else f"{problem}; no other file of it is complete"
    message = f"run {run.id} has no checkpoint to go on from: {why}"
    raise CheckpointError(message)


def _best(path: Path, facts: dict[str, Any], run: RunDir | None) -> tuple[Path | None, list[str]]:
    """The file with the weights that were the best up to a checkpoint, which later ones of the run may have replaced."""
    best = facts.get("best") or {}
    if best.get("value") is None:
        return None, []
    at = int(best["step"])
    if at == int(facts["step"]):
        return path, []
    for file, content in [] if run is None else _complete(run):
        if int(content["step"]) == at and (content.get("best") or {}).get("value") == best["value"]:
            return file, []
    return None, [f"the best weights so far, of epoch {best['epoch']} ({value_text(float(best['value']))}), are not there any more: the best starts anew"]


def closest_boundary(point: ResumePoint) -> Path | None:
    """The newest checkpoint of the same run that stands at the end of an epoch."""
    files = [] if point.run is None else _complete(point.run)
    return next((path for path, content in files if content["epochs_done"] == content["epoch"] > 0), None)
