"""The event log of a run: one JSON object per line, one append-only file per process and attempt.

Written by the ranks and the supervisor, read by any kernel, at any time. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.contents import EVENT, EVENTS
from nbddp.contents import SUPERVISOR as SUPERVISOR
from nbddp.shapes import Misfit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = 1
_OF_RANK = re.compile(r"rank-(\d{5})\.(\d{1,9})\.jsonl")


@dataclass(frozen=True, slots=True)
class Event:
    """One line of an event file.

    `time` is in unix seconds, `mono` in seconds of the writer's monotonic clock: durations use `mono`, which a suspended machine does not advance.
    """

    run: str
    rank: int
    attempt: int
    seq: int
    time: float
    mono: float
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def _plain(value: Any) -> Any:
    """Write non-finite numbers as "nan", "inf", "-inf", which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def dumps(record: dict[str, Any]) -> str:
    """One line of JSON; non-finite numbers become strings that `float` reads."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return json.dumps(_plain(record), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


class EventWriter:
    """Append events to one file: a line per event in a single `os.write`, numbered without gaps."""

    def __init__(self, path: Path, *, run: str, rank: int, attempt: int = 0) -> None:
        self._run, self._rank, self._attempt, self._seq = run, rank, attempt, 0
        self._lock = threading.Lock()
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def emit(self, kind: str, **data: object) -> None:
        """Write one event; from any thread. After `close` nothing is written."""
        with self._lock:
            if self._fd is None:
                return
            record = {
                "v": VERSION,
                "run": self._run,
                "rank": self._rank,
                "attempt": self._attempt,
                "seq": self._seq,
                "time": time.time(),
                "mono": time.monotonic(),
                "kind": kind,
                "data": data,
            }
            os.write(self._fd, (dumps(record) + "\n").encode("utf-8", "backslashreplace"))
            self._seq += 1

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class EventReader:
    """Read what was appended to the event files of a folder since the last call; `pattern` chooses among the files.

    Stops at the last newline of each file, so that a line in the making is read later. What is no event is left out: lines that are damaged, whose data
    are not of the kind's shape, or which are another rank's than the file. Fields and kinds that it does not know it leaves as they are.
    """

    def __init__(self, folder: Path, pattern: str = "*.jsonl") -> None:
        self._folder, self._pattern = folder, pattern
        self._offsets: dict[str, int] = {}

    def poll(self, limit: int = 4 << 20) -> list[Event]:
        """Return new events, in order within each file; at most about `limit` bytes of each file per call."""
        events: list[Event] = []
        try:
            paths = sorted(self._folder.glob(self._pattern))
        except OSError:
            return events
        for path in paths:
            events.extend(self._read(path, limit))
        return events

    def _read(self, path: Path, limit: int) -> Iterator[Event]:
        offset = self._offsets.get(path.name, 0)
        try:
            if path.stat().st_size <= offset:
                return
            with path.open("rb") as file:
                file.seek(offset)
                chunk = file.read(limit)
                while (end := chunk.rfind(b"\n") + 1) == 0:
                    more = file.read(limit)
                    if not more:
                        return
                    chunk += more
        except OSError:  # the run was pruned while it was watched, or its disk is away for a moment
            return
        self._offsets[path.name] = offset + end
        of = _OF_RANK.fullmatch(path.name)
        writer = None if of is None else (int(of[1]), int(of[2]))
        for line in chunk[:end].splitlines():
            event = parse(line)
            # The supervisor, and the trackers of rank 0, have files of their own.
            if event is not None and (event.rank <= 0 if writer is None else (event.rank, event.attempt) == writer):
                yield event


def parse(line: bytes) -> Event | None:
    """The event of a line; None for one that is foreign, damaged or cut, which is not worth the run."""
    try:
        record = EVENT.take(json.loads(line))
        data = record.get("data", {})
        shape = EVENTS.get(record["kind"])
        return Event(
            run=record["run"],
            rank=record["rank"],
            attempt=record.get("attempt", 0),
            seq=record["seq"],
            time=record["time"],
            mono=record["mono"],
            kind=record["kind"],
            data=data if shape is None else shape.take(data),
        )
    except (Misfit, ValueError, RecursionError):
        return None
