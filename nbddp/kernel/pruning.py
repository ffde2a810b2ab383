"""What would be deleted, and what was: old runs, or those that are named. Live runs never are.

Runs in the kernel; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.errors import ConfigError
from nbddp.kernel.chosen import chosen
from nbddp.kernel.entry import RunEntry, read_entry
from nbddp.kernel.table import MOST_LETTERS
from nbddp.kernel.text import bytes_text, short_id
from nbddp.rundir import RunDir, run_dirs
from nbddp.runpruning import delete_runs, prune_runs
from nbddp.tabular import text_table
from nbddp.visible import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pruned:
    """Runs that would be, or were, deleted.

    Attributes:
        runs: as they were before.
        heirs: ids of runs that stay and go on from one of them, with the id of that.
        failed: why some of them could not be deleted, by id.
        dry_run: nothing was deleted.
    """

    runs: tuple[RunEntry, ...]
    heirs: Mapping[str, str]
    failed: Mapping[str, str]
    dry_run: bool

    @property
    def ids(self) -> list[str]:
        return [run.id for run in self.runs if run.id not in self.failed]

    def __str__(self) -> str:
        """Which runs, their state, size and note, and what comes of it."""
        done = [run for run in self.runs if run.id not in self.failed]
        size = bytes_text(sum(run.size for run in done))
        lines = []
        if done:
            what = "would be deleted; --no-dry-run deletes them:" if self.dry_run else "deleted:"
            rows = [(f"  {run.id}", run.state, bytes_text(run.size), one_line(run.remark, MOST_LETTERS)) for run in done]
            lines = [f"{len(done)} run{'s' if len(done) > 1 else ''} ({size}) {what}", *text_table(rows[0], rows[1:], left=4).splitlines()]
        for heir, parent in self.heirs.items():
            if parent not in self.failed:
                lines.append(f"{short_id(heir)} goes on from {short_id(parent)}: its curves {'would begin' if self.dry_run else 'begin'} where it went on")
        return "\n".join([*lines, *(f"{run} could not be deleted: {why}" for run, why in self.failed.items())])


def prune_old(root: Path, *, keep: int, older_than_days: float, dry_run: bool) -> Pruned:
    """Runs that have ended, beyond the newest `keep` and older than `older_than_days`.

    Raises:
        ConfigError: for negative numbers.
    """
    for name, value in (("keep", keep), ("older_than_days", older_than_days)):
        if value < 0:
            message = f"{name}={value} must be at least 0"
            raise ConfigError(message)
    return _pruned(prune_runs(root, keep=keep, older_than_days=older_than_days), root, dry_run=dry_run)


def prune_named(given: Iterable[object], root: Path, *, dry_run: bool) -> Pruned:
    """The runs that are named, however young they are.

    Raises:
        ConfigError: for what names no run, and where one of them is live: nothing is deleted then.
    """
    runs = list(chosen(given, root, by="pruning").values())
    if live := [run for run in runs if run.live()]:
        names = ", ".join(short_id(run.id) for run in live)
        message = f"{names} {'is' if len(live) == 1 else 'are'} not over yet, and nothing was deleted: %ddp_stop {short_id(live[0].id)} ends it"
        raise ConfigError(message)
    return _pruned(runs, root, dry_run=dry_run)


def _pruned(runs: Sequence[RunDir], root: Path, *, dry_run: bool) -> Pruned:
    entries, going = tuple(read_entry(run) for run in runs), {run.id for run in runs}
    parents = {run.id: str((run.read_spec() or {}).get("parent")) for run in run_dirs(root) if run.id not in going} if runs else {}
    heirs = {run: parent for run, parent in parents.items() if parent in going}
    failed = {} if dry_run else delete_runs(root, runs)
    return Pruned(entries, heirs, failed, dry_run)
