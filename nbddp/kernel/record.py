"""When a run began and how long it took, from its spec.json and result.json.

Used in the kernel by cards and tables; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from typing import Any


def number(value: object) -> float | None:
    """A number as run directories hold it, where "nan" and "inf" are words; None for anything else."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type] # what float does not take is None below
    except (TypeError, ValueError):
        return None


def started(spec: dict[str, Any]) -> float | None:
    """Unix time at which the run was asked for."""
    requested: float | None = spec.get("times", {}).get("requested") or spec.get("created")
    return requested


def duration_s(spec: dict[str, Any], until: float | None) -> float | None:
    """Seconds from the request to `until` (unix time), which is the result's time for a run that has ended."""
    begin = started(spec)
    return None if begin is None or until is None else max(0.0, until - begin)
