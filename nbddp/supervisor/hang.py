"""When a run that stands still has hung, and which rank the others wait for. Runs in the supervisor; imports neither torch nor Jupyter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbddp.launch.progress import RankProgress

START_FACTOR = 5
"""Until the first step, loading data and choosing algorithms may take this many times longer."""
GAP_FACTOR = 10
"""A run whose steps, validations or checkpoints take long has not hung until it stood still for this many times the longest of them."""
COMPILE_LATE_S = 60.0
"""A rank that has not ended itself this long after its time for compiling is stuck."""
WAITING_PHASES = ("sync", "backward")
"""Phases in which a rank waits for the others."""
_LONGEST_TICK_S = 1.0
_SILENT_S = 5.0


class HangWatch:
    """Adds up the time without progress. Time in which the supervisor itself did not run, on a suspended machine or under SIGSTOP, does not count.

    A rank that compiles has `compile_timeout_s`, after which it ends itself; only where it can't, inside of a compiler, does it count as hung.
    """

    def __init__(self, hang_after_s: float, now: float, *, compile_timeout_s: float = 0.0) -> None:
        self._hang_after_s, self._compile_s = hang_after_s, compile_timeout_s + COMPILE_LATE_S
        self._compiled = False
        self._last = now
        self._quiet_s = 0.0
        self._longest_s = 0.0
        self._stepping = False

    @property
    def quiet_s(self) -> float:
        return self._quiet_s

    def tick(self, now: float, *, moved: bool, first_step: bool, compiling: bool = False) -> bool:
        """Advance to `now` (monotonic seconds); return whether the run has hung. `compiling` says that at least one rank does so."""
        self._quiet_s += min(now - self._last, _LONGEST_TICK_S)
        self._last = now
        self._compiled = self._compiled or compiling
        if moved:
            if self._stepping and not self._compiled:
                self._longest_s = max(self._longest_s, self._quiet_s)
            self._quiet_s, self._compiled = 0.0, compiling
        self._stepping = first_step
        limit = max(self._hang_after_s, GAP_FACTOR * self._longest_s) if first_step else START_FACTOR * self._hang_after_s
        return self._quiet_s > (max(limit, self._compile_s) if compiling else limit)


def culprit(ranks: Mapping[int, RankProgress]) -> RankProgress | None:
    """The rank that the others wait for: one that fell silent, or is behind, or is not in a collective; None where all look the same."""
    rows = sorted(ranks.values(), key=lambda row: row.rank)
    if not rows:
        return None
    latest = max(row.heard for row in rows)
    silent = [row for row in rows if latest - row.heard > _SILENT_S]
    if silent and len(silent) < len(rows):
        return min(silent, key=lambda row: row.heard)
    positions = {row.rank: row.place[0] for row in rows if row.place is not None}
    if len(set(positions.values())) > 1:
        return min((row for row in rows if row.rank in positions), key=lambda row: positions[row.rank])
    busy = [row for row in rows if row.phase not in WAITING_PHASES]
    return busy[0] if busy and len(busy) < len(rows) else None
