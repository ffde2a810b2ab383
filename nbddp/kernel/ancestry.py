"""The runs that a run goes on from: its parent, the parent's parent, and so on, as far as they are there.

Used in the kernel by runs, cards and tables; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.kernel.text import short_id
from nbddp.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A run, and the last step of it that belongs to the run asked about."""

    run: RunDir
    until: int


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Parents from the oldest to the nearest; `missing` is the one at which the line breaks off, since its directory is gone."""

    parents: tuple[Ancestor, ...] = ()
    missing: str | None = None

    @classmethod
    def of(cls, run: RunDir, spec: Mapping[str, Any]) -> Ancestry:
        """The ancestors of a run, by its spec and theirs."""
        found: list[Ancestor] = []
        seen = {run.path}
        until: int | None = None
        while (parent := spec.get("parent")) is not None:
            step = spec.get("resume_step") or 0
            until = step if until is None else min(until, step)
            run = _directory(str(parent), run, spec)
            later = run.read_spec()
            if later is None or run.path in seen:
                return cls(tuple(reversed(found)), str(parent))
            seen.add(run.path)
            found.append(Ancestor(run, until))
            spec = later
        return cls(tuple(reversed(found)))


def _directory(parent: str, run: RunDir, spec: Mapping[str, Any]) -> RunDir:
    """Where a parent lies: where its checkpoint was, else beside the run, since folders of runs are moved as a whole."""
    there = Path(str(spec.get("resume") or "")).parent.parent
    return RunDir(there if there.name == parent and there.is_dir() else run.root / parent)


def parent_text(spec: Mapping[str, Any]) -> str | None:
    """What a run goes on from: ``digits-k3f9, step 120``; None for one that begins anew."""
    parent = spec.get("parent")
    return None if parent is None else f"{short_id(str(parent))}, step {spec.get('resume_step')}"
