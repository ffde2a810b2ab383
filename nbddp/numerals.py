"""How values of losses and metrics are written, by views, tables, lines and messages alike. Imports the standard library only."""

from __future__ import annotations

import math


def value_text(value: float) -> str:
    """A loss or a metric in four significant digits: ``0.2314``, ``1,234``, ``12,345``, ``1.2e-05``, ``nan``."""
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) >= 999.95 and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"
