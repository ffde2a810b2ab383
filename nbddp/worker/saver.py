"""When checkpoints are written, and the thread that writes them on rank 0 while training goes on."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp import checkpoint
from nbddp.version import __version__
from nbddp.worker import rng

if TYPE_CHECKING:
    from pathlib import Path

    from nbddp.worker.context import Context

AT_MOST_EVERY_S = 20.0
BEST_EVERY_WRITES = 100
"""The best checkpoint is written soon where files are small: at most a hundredth of the time goes into writing it."""
AT_LEAST_EVERY_S = 30 * 60.0
GIVE_UP_S = 1.0
"""A run that failed waits this long for the file that is being written: whoever waits for this rank is to hear of it first."""


@dataclass(frozen=True, slots=True)
class Every:
    """A cadence of the options: `2 epochs`, `500 steps`, `10 min`."""

    count: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> Every:
        count, unit = text.split()
        return cls(int(count), unit.rstrip("s"))

    def at_step(self, step: int) -> bool:
        return self.unit == "step" and step % self.count == 0

    def at_epoch(self, epoch: int) -> bool:
        return self.unit == "epoch" and epoch % self.count == 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to write, and the names that it gets besides."""

    name: str
    content: dict[str, Any]
    others: tuple[str, ...] = ()


class Saver:
    """Checkpoints of one rank: every rank calls the same methods, rank 0 writes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._folder: Path = context.run_dir.checkpoints
        self._writes = context.ranks.rank == 0
        self._every = Every.parse(context.config.checkpoint_every)
        self._last = self._last_best = time.monotonic()
        # By default every epoch, where they are long; a cadence that is written out is kept.
        self._limited = not {"checkpoint_every", "keep_last"} & context.config.given
        self._first = True
        self._write_s = 0.0
        self._asked = False
        self._held_best: _Job | None = None
        self._kept: list[str] = []
        self._error: BaseException | None = None
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        if self._writes:
            checkpoint.clear_unfinished(self._folder)
            self._thread = threading.Thread(target=self._write_jobs, name="nbddp-checkpoints", daemon=True)
            self._thread.start()

    def at_step(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after this step."""
        return self._every.at_step(step)

    def at_epoch(self, epoch: int, *, old_enough: bool) -> bool:
        """Whether a checkpoint is due after this epoch; `old_enough` is rank 0's word on the one before."""
        return self._every.at_epoch(epoch) and (old_enough or self._first or not self._limited)

    def due(self) -> bool:
        """By rank 0's clock: the cadence in minutes, and never longer than half an hour without one. Said once until it is written."""
        every = self._every.count * 60.0 if self._every.unit == "min" else AT_LEAST_EVERY_S
        due = not self._asked and time.monotonic() - self._last >= min(every, AT_LEAST_EVERY_S)
        self._asked = self._asked or due
        return due

    def old_enough(self) -> bool:
        return time.monotonic() - self._last >= AT_MOST_EVERY_S

    def write_initial(self) -> None:
        """initial.pt: the weights first bundled for this model, which an earlier run may have written."""
        if not self._writes:
            return
        earlier = self._context.spec.get("initial")
        target = self._folder / "initial.pt"
        if earlier is not None and (source := self._context.run_dir.root / earlier).is_file():
            checkpoint.link(source, target)
            self._announce("initial", target, {"epoch": 0, "step": 0, "stage": 0, "value": None, "finite": True})
            return
        state = checkpoint.model_state(self._context.model)
        content = {"model": state, "epoch": 0, "step": 0, "stage": 0, "value": None, "finite": checkpoint.non_finite(state) is None}
        self._put(_Job("initial", content))

    def save(self, state: dict[str, Any], *, value: float | None, best: bool, last: bool) -> None:
        """Copy the run's state to the CPU and hand it to the writer. Collective: replicas are compared, every rank's random state is gathered.

        Args:
            state: optimizer, scheduler, position and sums, without model and random states.
            value: the monitored value.
            best: it is the best so far. Where last.pt is not written as well, best.pt is at most every 20 s (more often where files are small), and at the end.
            last: write last.pt and, with keep_last above 1, a file of this epoch or step.
        """
        context = self._context
        began = time.monotonic()
        context.ranks.broadcast_buffers(context.model)
        context.ranks.compare_replicas(context.model)
        streams = context.ranks.gather_objects(rng.capture(context.ranks.device))
        if last:
            self._last, self._asked, self._first = time.monotonic(), False, False
        if not self._writes:
            return
        weights = checkpoint.model_state(context.model)
        finite = checkpoint.non_finite(weights) is None
        content = {
            "model": weights,
            **checkpoint.plain(state, "state"),
            "scaler": None,
            "comm_hook": None,
            "rng": streams,
            "config": context.config.to_json(),
            "precision": context.plan.precision,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "world_size": context.ranks.world_size,
            "versions": {"nbddp": __version__, "torch": str(torch.__version__)},
            "run": context.run_dir.id,
            "value": value,
            "finite": finite,
            "pause_s": time.monotonic() - began,
        }
        best = best and finite
        if best:
            self._held_best = None
        if last:
            others = (self._kept_name(state),) if context.config.keep_last > 1 else ()
            self._put(_Job("last", content, (*others, "best") if best else others))
        elif best:
            self._held_best = _Job("best", content)
            self.release_best()

    @staticmethod
    def _kept_name(state: dict[str, Any]) -> str:
        return f"epoch-{state['epoch']:04d}" if state["epochs_done"] == state["epoch"] else f"step-{state['step']:08d}"

    def release_best(self, *, force: bool = False) -> None:
        """Write the best checkpoint that was held back so as not to write too often."""
        if self._held_best is None:
            return
        wait_s = min(AT_MOST_EVERY_S, self._write_s * BEST_EVERY_WRITES)
        if force or (time.monotonic() - self._last_best >= wait_s and self._jobs.empty()):
            job, self._held_best = self._held_best, None
            self._last_best = time.monotonic()
            self._put(job)

    def close(self) -> None:
        """Write what was held back and wait until everything is on disk.

        Raises:
            CheckpointError: where a file could not be written.
        """
        if self._thread is not None:
            self.release_best(force=True)
            self._jobs.put(None)
            self._thread.join()
        self._raise()

    def give_up(self) -> None:
        """After a failure: give the file that is being written a moment; if it is not done then, the one before it stays."""
        if self._thread is None:
            return
        deadline = time.monotonic() + GIVE_UP_S
        try:
            for job in (*([self._held_best] if self._held_best is not None else []), None):
                self._jobs.put(job, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _put(self, job: _Job) -> None:
        self._raise()
        self._jobs.put(job)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is not None:
                continue  # the main thread raises it at its next checkpoint
            began = time.monotonic()
            try:
                self._write(job)
                self._write_s = time.monotonic() - began
            except BaseException as error:  # noqa: BLE001 - without this thread the main one would wait for ever; it raises the error
                self._error = error

    def _write(self, job: _Job) -> None:
        path = self._folder / f"{job.name}.pt"
        checkpoint.write(path, job.content)
        self._announce(job.name, path, job.content)
        for other in job.others:
            target = self._folder / f"{other}.pt"
            checkpoint.link(path, target)
            self._announce(other, target, job.content, removed=[] if other == "best" else self._remove_old(other))

    def _remove_old(self, newest: str) -> list[str]:
        keep = self._context.config.keep_last
        self._kept = [name for name in self._kept if name != newest] + [newest]
        removed, self._kept = self._kept[:-keep], self._kept[-keep:]
        for name in removed:
            (self._folder / f"{name}.pt").unlink(missing_ok=True)
        return removed

    def _announce(self, name: str, path: Path, content: dict[str, Any], *, removed: list[str] | None = None) -> None:
        facts = {key: content[key] for key in ("epoch", "step", "stage", "value", "finite")}
        self._context.events.emit("checkpoint", name=name, file=path.name, bytes=path.stat().st_size, removed=removed or [], **facts)
