"""The thread that writes checkpoints on rank 0 while training goes on, and the memory that it writes them from."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp import checkpoint
from nbddp.worker.replicas import Comparison
from nbddp.worker.staging import Layout, Staging

if TYPE_CHECKING:
    from pathlib import Path

    from nbddp.events import EventWriter

GIVE_UP_S = 1.0
"""A run that failed waits this long for the file that is being written: whoever waits for this rank is to hear of it first."""
MOST_STAGINGS = 2
_KEPT = re.compile(r"epoch-\d{4,}|step-\d{8,}")
"""The files that keep_last counts."""


@dataclass(frozen=True, slots=True)
class Job:
    """Files of one content, in the memory of a staging: one is written, the others are linked to it. No best.pt is made of weights that are not finite."""

    names: tuple[str, ...]
    content: dict[str, Any]
    staging: Staging
    comparison: Comparison | None = None


class Writer:
    """Writes one checkpoint after the other.

    Costs the memory of one copy of the state; of two from the first time that a state is to be copied while the copy before it is still in use. Where both
    are, `stage` waits.
    """

    def __init__(self, folder: Path, events: EventWriter, *, device: torch.device, keep_last: int, buffers: frozenset[str]) -> None:
        self._folder, self._events, self._device, self._keep_last = folder, events, device, keep_last
        self._buffers = buffers
        self._kept: list[str] = []
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | list[Layout] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        self._stagings = 0
        self._provided = threading.Event()
        self._provided.set()
        self.write_s = 0.0
        """How long the last file took."""
        checkpoint.clear_unfinished(folder)
        self._thread = threading.Thread(target=self._work, name="nbddp-checkpoints", daemon=True)
        self._thread.start()

    # -- called by the thread that trains

    def stage(self) -> Staging:
        """Memory for a snapshot, until it is written or released.

        Raises:
            ReplicasDiffer, CheckpointError: where a checkpoint could not be written.
        """
        self._provided.wait()
        try:
            staging = self._free.get_nowait()
        except queue.Empty:
            staging = self._make_staging() if self._stagings < MOST_STAGINGS else self._free.get()
        self.check()
        staging.begin()
        return staging

    def release(self, staging: Staging) -> None:
        """Give memory back whose snapshot is not to be written."""
        self._free.put(staging)

    def provide(self, layout: list[Layout]) -> None:
        """Let the memory of a snapshot to come be there before it is needed."""
        self._provided.clear()
        self._jobs.put(layout)

    def put(self, job: Job) -> None:
        """Write files soon.

        Raises:
            ReplicasDiffer, CheckpointError: where one before could not be written.
        """
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what kept this from writing a checkpoint, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return self._jobs.empty()

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            ReplicasDiffer, CheckpointError: where a checkpoint could not be written.
        """
        self._jobs.put(None)
        self._thread.join()
        self.check()

    def give_up(self, last: Job | None) -> None:
        """After a failure: give what is being written, and one more job, a moment; if it is not done then, the files before it stay."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(GIVE_UP_S)

    def _make_staging(self) -> Staging:
        self._stagings += 1
        return Staging(self._device)

    # -- the thread that writes

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else memory that is pinned here would open the first GPU as well
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, Job):
                    self._write(job)
                else:
                    self._provide(job)
            except BaseException as error:  # noqa: BLE001 - without this thread the main one would wait for ever; it raises the error
                self._error = self._error or error

    def _provide(self, layout: Sequence[Layout]) -> None:
        """The other thread trains meanwhile, or waits for this: only one of them makes a staging."""
        try:
            with contextlib.suppress(queue.Empty):  # where a snapshot that is held back has the only one
                staging = self._make_staging() if self._stagings == 0 else self._free.get_nowait()
                staging.provide(layout)
                self._free.put(staging)
        finally:
            self._provided.set()

    def _write(self, job: Job) -> None:
        began = time.monotonic()
        try:
            if self._error is not None:  # the other thread raises it at its next checkpoint
                return
            job.staging.wait()
            if job.comparison is not None:
                job.comparison.check()
            content = job.content
            content["finite"] = checkpoint.non_finite(content["model"], self._buffers) is None
            if names := [name for name in job.names if name != "best" or content["finite"]]:
                first, *others = (self._folder / f"{name}.pt" for name in names)
                checkpoint.write(first, content)
                self.announce(first, content)
                for path in others:
                    checkpoint.link(first, path)
                    self.announce(path, content)
        finally:
            self._free.put(job.staging)
        self.write_s = time.monotonic() - began

    def announce(self, path: Path, content: dict[str, Any]) -> None:
        """Say that a file is there, and which ones went for it."""
        name = path.stem
        removed = self._remove_old(name) if _KEPT.fullmatch(name) else []
        facts = {key: content[key] for key in ("epoch", "step", "stage", "value", "finite")}
        self._events.emit("checkpoint", name=name, file=path.name, bytes=path.stat().st_size, removed=removed, **facts)

    def _remove_old(self, newest: str) -> list[str]:
        self._kept = [name for name in self._kept if name != newest] + [newest]
        removed, self._kept = self._kept[: -self._keep_last], self._kept[-self._keep_last :]
        for name in removed:
            (self._folder / f"{name}.pt").unlink(missing_ok=True)
        return removed
