"""Numbers, sizes and times as a person reads them.

Used in the kernel by views, cards and tables; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math

from nbddp.numerals import value_text as value_text


def count_text(value: float) -> str:
    """A count with thousands set apart: ``1,234,567``."""
    return f"{round(value):,}" if math.isfinite(value) else "–"


def rate_text(value: float) -> str:
    """A rate with three significant digits: ``4.21``, ``83.5``, ``12,300``."""
    if not math.isfinite(value):
        return "–"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    if digits:
        return f"{value:.{min(digits, 6)}f}"
    scale = 10 ** max(0, math.floor(math.log10(abs(value))) - 2)
    return f"{round(value / scale) * scale:,}"


def bytes_text(size: float) -> str:
    """A size in binary units: ``512 B``, ``1.1 GiB``, ``139 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.5 or unit == "TiB":
            break
    return f"{size:.1f} {unit}" if size < 9.95 else f"{size:,.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """A short duration in the unit that suits it: ``85 µs``, ``3.2 ms``, ``1.25 s``, ``1:05``."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.1f} ms" if milliseconds < 99.95 else f"{milliseconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s" if seconds < 59.95 else clock_text(seconds)


def clock_text(seconds: float | None) -> str:
    """A duration on the clock: ``0:07``, ``1:05``, ``2:03:04``, ``3 d 02:03``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    total = max(0, round(seconds))
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def share_text(part: float, whole: float) -> str:
    """A share in percent: ``<1 %``, ``42 %``; of nothing, ``0 %``."""
    share = 100 * part / whole if whole > 0 else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def short_id(run: str) -> str:
    """The tail of a run's id, which is what people type: ``digits-k3f9`` of ``20261129-130501-digits-k3f9``."""
    return run.split("-", 2)[-1]
