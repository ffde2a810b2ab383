"""nbddp: multi-GPU training native to a Jupyter notebook."""

from __future__ import annotations

__version__ = "0.1.0"
