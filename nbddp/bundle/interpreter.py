"""The interpreter settings that user code may rely on: captured in the kernel, applied in each rank before anything is unpickled.

Environment variables are not among them: they are handed over in memory, and never touch the disk.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbddp.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Interpreter:
    """Where imports and relative paths are looked up, and torch's defaults.

    Attributes:
        sys_path: absolute import path; ``''`` is resolved to the directory that it stood for.
        cwd: absolute working directory.
        default_dtype: torch's default floating-point dtype, such as ``"float32"``.
        default_device: type of torch's default device, such as ``"cpu"``.
        float32_matmul_precision: torch's setting; None where it was made through torch's newer per-backend switches.
    """

    sys_path: tuple[str, ...]
    cwd: str
    default_dtype: str
    default_device: str
    float32_matmul_precision: str | None

    @classmethod
    def capture(cls) -> Interpreter:
        """Read the settings of this process. Raises BundleError if its working directory is gone."""
        try:
            cwd = Path.cwd()
        except FileNotFoundError:
            message = "the notebook's working directory no longer exists; change to one that does, with %cd or os.chdir"
            raise BundleError(message) from None
        path = list(dict.fromkeys(str(cwd / entry) for entry in sys.path))
        path += _left_behind(path)
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            # torch refuses to answer once torch.backends.*.fp32_precision was assigned to.
            precision = None
        return cls(tuple(path), str(cwd), str(torch.get_default_dtype()).removeprefix("torch."), torch.get_default_device().type, precision)

    def apply(self, rank_device: torch.device | None = None) -> None:
        """Make this process look up and default as the kernel did.

        A default device other than the CPU is set to ``rank_device`` if that is of the same type: the kernel's own GPU is not the rank's.
        """
        os.chdir(self.cwd)
        sys.path[:] = self.sys_path
        importlib.invalidate_caches()
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        if rank_device is not None and rank_device.type != "cpu" and rank_device.type == self.default_device:
            torch.set_default_device(rank_device)
        if self.float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(self.float32_matmul_precision)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain types."""
        return {**vars(self), "sys_path": list(self.sys_path)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Interpreter:
        """Rebuild the settings from `to_json`'s result; fields that a newer version added are ignored."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "sys_path": tuple(fields["sys_path"])})


def _left_behind(path: Iterable[str]) -> list[str]:
    """Directories that imported modules came from and that ``path`` lacks: a helper beside the notebook, after %cd."""
    known = {os.path.realpath(entry) for entry in path}
    missing: dict[str, None] = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or spec is None:
            continue
        if spec.submodule_search_locations is not None:
            roots = [Path(location).parent for location in spec.submodule_search_locations]
        elif spec.has_location and spec.origin:
            roots = [Path(spec.origin).parent]
        else:
            continue
        missing.update((str(root), None) for root in roots if os.path.realpath(root) not in known and root.is_absolute() and root.is_dir())
    return list(missing)
