"""What travels from the kernel to the ranks: model and hooks in one archive, each dataset in a content-addressed one.

The kernel packs with `Bundler`; the supervisor never opens a bundle; every rank opens it with `load`, and a kernel that evaluates a run with `load_apart`.
Imports torch, so nothing that must start fast imports it at module level. Imports neither Jupyter nor the packages `kernel` and `worker`.

Not carried over: the ``.grad`` of parameters, and hooks registered on single tensors.
"""

from __future__ import annotations

from nbddp.bundle.bundler import Bundler, DataRef
from nbddp.bundle.cells import CellSource
from nbddp.bundle.interpreter import Interpreter
from nbddp.bundle.loader import Loaded, load, load_apart

__all__ = ["Bundler", "CellSource", "DataRef", "Interpreter", "Loaded", "load", "load_apart"]
