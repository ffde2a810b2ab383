"""The process of one tracker: follows rank 0's event file, as a view in a kernel does, and passes the values on.

Started by rank 0 as ``python -m nbddp.worker.tracker NAME RUN_DIR ATTEMPT PID-OF-THE-RANK``. What goes wrong here is one warning among the events of the
run, and the end of this process. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nbddp.config import TrainConfig
from nbddp.events import EventReader, EventWriter
from nbddp.rundir import RunDir
from nbddp.state import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbddp.events import Event

SWITCHED_OFF = 3
"""Exit code of a tracker that failed and has said so."""
GONE_S = 3.0
"""A tracker whose rank has failed or is gone is given this long to say so to its service."""
_POLL_S = 0.1
_NICE = 10


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of a run before its first value: its id, its configuration with the defaults filled in, and its spec."""

    run: RunDir
    config: TrainConfig
    spec: dict[str, Any]
    attempt: int
    say: Callable[[str], None]

    def facts(self) -> dict[str, Any]:
        """The configuration, then the plan and where the run comes from."""
        spec = self.spec
        about = {"run": self.run.id, "parent": spec.get("parent"), "note": spec.get("note"), "host": spec.get("host"), "model": spec.get("model_type")}
        return {**self.config.model_dump(mode="json"), **about, "plan": spec.get("plan", {}), "versions": spec.get("versions", {})}


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended: ``finished``, ``stopped`` or ``failed``, and why."""

    state: str
    reason: str = ""

    @property
    def exit_code(self) -> int:
        return int(self.state == "failed")


class Tracker(Protocol):
    """Made with the first values of a run; any of its methods may raise."""

    def __init__(self, start: Start) -> None: ...

    def log(self, step: int, time_s: float, values: dict[str, float]) -> None:
        """Take the values of a step, which were measured at a unix time; steps never go back."""

    def flush(self) -> None:
        """Let nothing that was logged wait in memory."""

    def finish(self, end: End) -> None:
        """Pass everything on."""


def make_tracker(name: str, start: Start) -> Tracker:
    """The tracker of that name; imports its package."""
    if name == "wandb":
        from nbddp.worker.tracker_wandb import Wandb

        return Wandb(start)
    from nbddp.worker.tracker_tensorboard import TensorBoard

    return TensorBoard(start)


def values_of(event: Event) -> Iterator[tuple[int, dict[str, float]]]:
    """What an event records: steps and their values, by group and the names of ``run.history`` and ``run.epochs``."""
    data = event.data
    if event.kind == "steps":
        last = len(data["step"]) - 1
        for index, step in enumerate(data["step"]):
            values = {"loss": data["loss"], "lr": data["lr"], **data.get("scalars", {}), "epoch": data["epoch"], "stage": data["stage"]}
            timing = _timing(data) if index == last else {}
            yield step, {**{f"train/{name}": float(column[index]) for name, column in values.items()}, **timing}
    elif event.kind == "epoch":
        values = {"loss": data["loss"], "duration_s": data["duration_s"], **data.get("values", {})}
        yield data["step"], {f"epoch/{name}": float(value) for name, value in values.items()}
    elif event.kind == "reported":
        yield data["step"], {f"epoch/{name}": float(value) for name, value in data["values"].items()}
    elif event.kind == "validation":
        yield data["step"], {f"val/{name.removeprefix('val_')}": float(value) for name, value in data["values"].items()}


def _timing(data: dict[str, Any]) -> dict[str, float]:
    """Means over the steps of a report, of the slowest rank in each, and the samples per second of all ranks."""
    columns = {name: data[name] for name in (*(f"{phase}_s" for phase in PHASES), "network_s", "wait_s") if name in data}
    rates = [float(row["samples_per_s"]) for row in data.get("ranks", []) if "samples_per_s" in row]  # none of steps that are all warm-up
    throughput = {"throughput/samples_per_s": sum(rates)} if rates else {}
    return {**{f"time/{name}": sum(map(float, column)) / len(column) for name, column in columns.items()}, **throughput}


def end_of(event: Event) -> End | None:
    """How the run ended, where an event says so."""
    if event.kind == "phase" and event.data.get("phase") == "trackers":
        return End("stopped" if event.data.get("stopped") else "finished", str(event.data.get("reason") or ""))
    if event.kind == "failed":
        return End("failed", f"{event.data.get('type')}: {event.data.get('message')}")
    return None


class Rank(threading.Thread):
    """Notices the end of the rank. From then on this process has `GONE_S` left, whatever it is in: the kernel's alarm clock ends it."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self.gone = threading.Event()
        self._pid = pid

    def run(self) -> None:
        """Look until it is gone."""
        closed = threading.Event()
        while os.getppid() == self._pid:
            closed.wait(_POLL_S)
        _hurry()
        self.gone.set()


def _hurry() -> None:
    signal.setitimer(signal.ITIMER_REAL, GONE_S)


def follow(name: str, start: Start, rank: Rank) -> None:
    """Pass values on until the run has ended. A run that ends before its first step is not tracked, as it keeps no checkpoint either."""
    path = start.run.rank_events(0, start.attempt)
    reader = EventReader(path.parent, path.name)
    tracker: Tracker | None = None
    while True:
        gone = rank.gone.is_set()  # asked before reading: what the rank wrote before its end is read
        events = reader.poll()
        for event in events:
            for step, values in values_of(event):
                tracker = tracker or make_tracker(name, start)
                tracker.log(step, event.time, values)
            if (end := end_of(event)) is not None:
                _finish(tracker, end)
                return
        if gone and not events:
            _finish(tracker, End("failed", "rank 0 was killed or vanished"))
            return
        if tracker is not None and events:
            tracker.flush()
        if not events:
            rank.gone.wait(_POLL_S)


def _finish(tracker: Tracker | None, end: End) -> None:
    if end.state == "failed":
        _hurry()
    if tracker is not None:
        tracker.finish(end)


def main(name: str, run_dir: str, attempt: str, pid: str) -> int:
    """Follow the run; return the exit code."""
    os.nice(_NICE)
    rank = Rank(int(pid))
    rank.start()
    run = RunDir(Path(run_dir))
    events = EventWriter(run.events / f"tracker-{name}.{attempt}.jsonl", run=run.id, rank=0, attempt=int(attempt))

    def say(text: str, level: str = "info") -> None:
        with contextlib.suppress(OSError):  # the disk is full, or the directory was deleted: nobody reads it either
            events.emit("message", level=level, text=text)

    try:
        spec = run.read_spec()
        assert spec is not None, "spec.json is written before the launch"
        follow(name, Start(run, TrainConfig(**spec["config"]), spec, int(attempt), say), rank)
    except BaseException as error:  # noqa: BLE001 - the boundary of a foreign package: whatever it raises switches the tracker off, and nothing else
        traceback.print_exc()
        reason = next(iter(str(error).splitlines()), "")
        say(f"{name} is switched off, training goes on: {type(error).__name__}{': ' if reason else ''}{reason}", "warning")
        return SWITCHED_OFF
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handler of a foreign package may keep the rank waiting
