"""Stands on PYTHONPATH of the supervisor and its fork server, and replaces itself by the nbddp that the kernel uses.

That one may have been found through a `sys.path` of the kernel's. The folder above holds nothing else, so that no file beside a notebook can shadow
a module of the standard library; what else was on the kernel's `sys.path` comes last. Runs in the supervisor and in the fork server.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_package = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("nbddp", _package / "__init__.py", submodule_search_locations=[str(_package)])
if _spec is None or _spec.loader is None:  # the file is there: it was found from this one
    raise ImportError(name="nbddp", path=str(_package))
_module = importlib.util.module_from_spec(_spec)
sys.modules["nbddp"] = _module
_spec.loader.exec_module(_module)
sys.path += [path for path in os.environ.get("NBDDP_SYS_PATH", "").split(os.pathsep) if path and path not in sys.path]
