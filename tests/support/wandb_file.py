"""What a wandb run wrote to its own file: a log in LevelDB's format (blocks of 32 KiB, records in fragments) of protobuf messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK = 32768
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class WandbFile:
    """The rows of the history by key, the run's message, the configuration, the last summary, the exit code."""

    run: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def column(self, name: str) -> dict[int, Any]:
        """The values of a key by step."""
        return {row["_step"]: row[name] for row in self.rows if name in row}


def read_wandb_file(path: Path) -> WandbFile:
    """Read a ``run-*.wandb`` file."""
    from wandb.proto import wandb_internal_pb2 as proto

    read, record_type = WandbFile(), vars(proto)["Record"]  # made when it is imported, which mypy can't see
    for payload in _records(path.read_bytes()):
        record = record_type.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            read.run = record.run
            read.config.update(_updates(record.run.config.update))
        elif kind == "history":
            read.rows.append(_updates(record.history.item))
        elif kind == "summary":
            read.summary.update(_updates(record.summary.update))
        elif kind == "exit":
            read.exit_code = record.exit.exit_code
    return read


def _updates(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    position, parts = _HEADER, b""  # the file begins with a header of its own
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        part = data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts
