"""Whether the trackers that a configuration asks for can be had, asked before anything starts.

Runs in the kernel; imports none of them.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from nbddp.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from nbddp.config import TrainConfig

INSTALL = "pip install 'nbddp[trackers]'"


def check_trackers(config: TrainConfig) -> None:
    """Check that packages are installed, and that TensorBoard's folder can be one.

    Raises:
        ConfigError: names the option and the line that installs what it needs.
    """
    for name in ("wandb", "tensorboard"):
        if getattr(config, name) is not None and not _installed(name):
            message = f"--{name}: the package {name} is not installed: {INSTALL}"
            raise ConfigError(message)
    if config.tensorboard is not None:
        _check_folder(config.tensorboard.expanduser())


def _installed(package: str) -> bool:
    """A folder of that name beside the notebook, where wandb keeps its files by default, looks like a package without an origin."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # something without a spec stands in sys.modules under that name
        return False
    return spec is not None and spec.origin is not None


def _check_folder(folder: Path) -> None:
    for path in (folder, *folder.absolute().parents):
        if path.is_dir():
            return
        if path.exists():
            message = f"--tensorboard {folder}: {path} is a file; name a folder"
            raise ConfigError(message)
