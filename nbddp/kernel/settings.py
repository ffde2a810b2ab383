"""The settings file of ``--config``: options as keys of a YAML (or JSON) mapping.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from nbddp.config import TrainConfig, read_settings
from nbddp.errors import ConfigError, suggest

if TYPE_CHECKING:
    from pathlib import Path


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML would keep the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def settings(path: Path) -> TrainConfig:
    """The options in a settings file.

    Raises:
        ConfigError: where the file is missing or no mapping, and for keys and values that TrainConfig refuses; it names the file.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        near = suggest(path.name, [other.name for other in path.parent.glob("*") if other.is_file()])
        message = f"--config {path}: there is no such file.{near}"
        raise ConfigError(message) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"--config {path}: the file can't be read: {error}"
        raise ConfigError(message) from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        message = f"--config {path}{where}: {error.problem or error.context}"
        raise ConfigError(message) from None
    except yaml.YAMLError as error:
        message = f"--config {path}: {str(error).splitlines()[0]}"
        raise ConfigError(message) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        message = f"--config {path}: must be a mapping with options as keys, such as `batch_size: 256`"
        raise ConfigError(message)
    try:
        return read_settings(values)
    except ConfigError as error:
        message = f"--config {path}: {error}"
        raise ConfigError(message) from None
