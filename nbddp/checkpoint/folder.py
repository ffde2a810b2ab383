"""Folders and files that hold a checkpoint in several parts, or one that another trainer has to put together: what they are, and how one file is made of them.

Decided by names; nothing in them is read.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar")
"""Of the files among which one that is missing is looked for; what a file is is told from its content alone."""
_LISTED = 8
_SEEN = 10_000
"""Files that are looked at: a folder of a dataset may hold millions."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.\w+)$")
_INDEX = ".index.json"


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the files that may be checkpoints; of those in the folders below where there are none."""
    for pattern in ("*", "*/*"):
        files = itertools.islice(folder.glob(pattern), _SEEN)
        if names := sorted(str(file.relative_to(folder)) for file in files if file.suffix in SUFFIXES and file.is_file()):
            return names
    return []


def described(folder: Path) -> str:
    """What is in a folder that is no run directory, and what to do with it."""
    names = checkpoints_in(folder)
    if (folder / ".metadata").is_file():
        make = f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save({str(folder)!r}, FILE)"
        return f"it is a checkpoint of torch.distributed.checkpoint, of which {make} makes a file"
    if (folder / "zero_to_fp32.py").is_file():
        return f"it is a checkpoint of DeepSpeed, of which python {folder / 'zero_to_fp32.py'} {folder} OUTPUT makes files"
    whole = [name for name in names if not _PART.search(name)]
    if part := next((name for name in names if _PART.search(name)), None):
        joined = part_of(folder / part)
        return joined if not whole else f"{joined}; whole files are {_listed(whole)}"
    return f"name one of its files: {_listed(names)}" if names else "and it holds no checkpoint"


def part_of(path: Path) -> str:
    """For one of the files that a large model is saved in, or their index: how they are read together. Empty for others."""
    if path.name.endswith(_INDEX):
        stem, dot, suffix = path.name.removesuffix(_INDEX).rpartition(".")
        pattern = f"{stem}-*-of-*{dot}{suffix}"
    elif found := _PART.search(path.name):
        pattern = f"{path.name[: found.start()]}-*-of-{found[2]}{found[3]}"
    else:
        return ""
    files = f"pathlib.Path({str(path.parent)!r}).glob({pattern!r})"
    return (
        f"the checkpoint is in several files, {pattern}: "
        f"model.load_state_dict({{name: value for file in {files} for name, value in nbddp.load_checkpoint(file).items()}})"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
