"""Checkpoints that training can go on from, rather than only load weights of: which keys they have, and of which types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbddp.checkpoint.reading import check_bytes, read
from nbddp.checkpoint.writing import FORMAT
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from nbddp.rundir import RunDir

_NONE = type(None)
_SCHEMA: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "optimizer": (dict,),
    "scheduler": (dict, _NONE),
    "scaler": (dict, _NONE),
    "comm_hook": (list, _NONE),
    "rng": (list,),
    "precision": (str,),
    "matmul_precision": (str,),
    "stage": (int,),
    "stage_name": (str, _NONE),
    "stage_step": (int,),
    "stage_epochs_done": (int,),
    "epoch": (int,),
    "step": (int,),
    "epochs_done": (int,),
    "sampler": (dict,),
    "epoch_sums": (dict,),
    "values": (dict,),
    "metrics": (dict,),
    "early_stop": (dict,),
    "best": (dict,),
    "elapsed_s": (float, int),
    "config": (dict,),
    "world_size": (int,),
    "versions": (dict,),
    "run": (str,),
    "value": (float, int, _NONE),
    "finite": (bool,),
}
_NESTED: dict[str, dict[str, tuple[type, ...]]] = {
    "early_stop": {"without_gain": (int,), "validated_at": (int,)},
    "epoch_sums": {"loss": (float, int), "weight": (float, int), "scalars": (dict,), "samples": (int,), "steps": (int,), "times": (list,)},
    "best": {"name": (str,), "mode": (str,), "value": (float, int, _NONE), "epoch": (int,), "step": (int,)},
    "scheduler": {"steps": (int,), "epochs": (int,), "kind": (str,), "rates": (list,)},
}
_SAMPLER = ("seed", "stage", "epoch", "step", "samples", "n")
_OPTIMIZER: dict[str, tuple[type, ...]] = {"state": (dict,), "param_groups": (list,)}
_FALLBACKS = ("best.pt", "epoch-*.pt", "step-*.pt", "stage-*.pt")


def read_resumable(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Read a checkpoint that training can go on from.

    Args:
        path: the file.
        verify: also read all of its bytes and compare them with their sums.

    Raises:
        CheckpointError: where the file is missing, damaged or foreign, has weights only, or lacks what is needed to go on.
    """
    content = read(path)
    if content.get("format") != FORMAT:
        message = f"{path} is not a checkpoint of nbddp, so there is nothing to go on from but weights: start from those with --init {path}"
        raise CheckpointError(message)
    if "optimizer" not in content and content.get("step") == 0:
        message = f"{path} has the weights that a run began with, and no state of the training: start from them with --init {path}"
        raise CheckpointError(message)
    if problems := _problems(content):
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        message = f"training can't go on from {path}: {shown}"
        raise CheckpointError(message)
    if verify:
        check_bytes(path)
    return content


def _problems(content: dict[str, Any]) -> list[str]:
    problems = _wrong(content, _SCHEMA, "")
    if problems:
        return problems
    problems += _wrong(content["sampler"], dict.fromkeys(_SAMPLER, (int,)), "sampler.")
    problems += _wrong(content["optimizer"], _OPTIMIZER, "optimizer.")
    for name, schema in _NESTED.items():
        problems += _wrong(content[name], schema, f"{name}.") if content[name] is not None else []
    ranks = content["world_size"]
    for name in ("rng", "comm_hook"):
        if content[name] is not None and len(content[name]) != ranks:
            problems.append(f"{name} is of {len(content[name])} ranks, and world_size is {ranks}")
    if not all(isinstance(state, dict) and isinstance(state.get("torch"), torch.Tensor) for state in content["rng"]):
        problems.append("rng does not hold the random streams of each rank")
    counts = {name: content[name] for name in ("stage", "stage_step", "stage_epochs_done", "epoch", "step", "epochs_done")} | {
        f"sampler.{name}": content["sampler"].get(name, 0) for name in _SAMPLER if name != "seed"
    }
    problems += [f"{name} is {count}" for name, count in counts.items() if isinstance(count, int) and count < 0]
    return problems


def _wrong(content: dict[str, Any], schema: dict[str, tuple[type, ...]], prefix: str) -> list[str]:
    problems = []
    if missing := [prefix + name for name in schema if name not in content]:
        problems.append(f"it has no {', '.join(missing)}")
    for name, types in schema.items():
        if name in content and not _is(content[name], types):
            wanted = " or ".join("None" if one is _NONE else one.__name__ for one in types)
            problems.append(f"{prefix}{name} is a {type(content[name]).__name__}, not {wanted}")
    return problems


def _is(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))  # True is an int to Python


def newest_complete(folder: Path, exclude: Collection[Path] = ()) -> tuple[Path, dict[str, Any]] | None:
    """The best, epoch, step or stage file of the latest step that training can go on from; never initial.pt, nor what is excluded. None where there is none."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for pattern in _FALLBACKS:
        for path in sorted(folder.glob(pattern)):
            if path not in exclude:
                try:
                    found.append((path, read_resumable(path)))
                except CheckpointError:  # one that is incomplete as well is passed over
                    continue
    for path, content in sorted(found, key=lambda entry: (entry[1]["step"], entry[1]["epochs_done"]), reverse=True):
        try:
            check_bytes(path)
        except CheckpointError:
            continue
        return path, content
    return None


def of_the_end(run: RunDir) -> Path:
    """What a run has come to: last.pt, or where it was cut off a complete file of a later step, since best.pt may be written more often."""
    last, state = run.checkpoints / "last.pt", (run.read_result() or {}).get("state")
    if state == "finished":
        return last
    newest = newest_complete(run.checkpoints, exclude=(last,))
    try:
        later = newest is not None and newest[1]["step"] > read_resumable(last)["step"]
    except CheckpointError:
        later = state is not None and not last.is_file()
    return newest[0] if newest is not None and later else last
