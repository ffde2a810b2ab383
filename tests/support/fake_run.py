"""A run directory such as a supervisor and its ranks leave, without them: believable events, logs, checkpoints and a result.

For tests of what reads run directories. Written in pieces, so that a test can watch a run go on.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any

from nbddp.events import SUPERVISOR, EventWriter
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.state import PHASES

if TYPE_CHECKING:
    from pathlib import Path

MiB = 1 << 20
PLAN_LINE = "2 x CPU ranks · 128 = 2 x 64 · 390 steps/epoch, 80 samples dropped · lr 0.001 · fp32 (auto) · data 153 MiB, staged"


class FakeRun:
    """The writing side of a run.

    Args:
        root: the folder of run directories.
        nproc: ranks; `slow_rank` takes twice as long in forward.
        report_steps: steps per `steps` event.
    """

    def __init__(
        self,
        root: Path,
        *,
        name: str = "digits",
        nproc: int = 2,
        epochs: int = 10,
        steps_per_epoch: int = 390,
        report_steps: int = 50,
        slow_rank: int = 1,
        config: dict[str, object] | None = None,
        note: str | None = None,
    ) -> None:
        self.run_dir = RunDir.create(root, name)
        self.nproc, self.epochs, self.steps_per_epoch, self.report_steps, self.slow_rank = nproc, epochs, steps_per_epoch, report_steps, slow_rank
        self.samples_per_step = 64 * nproc
        self.step = 0
        self.epoch = 1
        self._random = random.Random(0)
        self._losses: list[float] = []
        self._saved: set[str] = set()
        self.requested = time.time()
        self.run_dir.write_supervisor(ProcessId.current())
        self.run_dir.write_spec(
            {
                "run": self.run_dir.id,
                "name": name,
                "config": {"nproc": nproc, "epochs": epochs, **(config or {})},
                "plan_line": PLAN_LINE,
                "note": note,
                "host": "here",
                "kernel": ProcessId.current().to_json(),
                "created": self.requested,
                "times": {"requested": self.requested, "bundled": self.requested},
            },
        )
        self.supervisor = EventWriter(self.run_dir.supervisor_events, run=self.run_dir.id, rank=SUPERVISOR)
        self.ranks = [EventWriter(self.run_dir.rank_events(rank, 0), run=self.run_dir.id, rank=rank) for rank in range(nproc)]

    @property
    def total_steps(self) -> int:
        """Steps that the run is planned for."""
        return self.epochs * self.steps_per_epoch

    def start(self) -> None:
        """What the ranks say before their first step."""
        for events in self.ranks:
            events.emit("started", device="cpu", backend="gloo", process=ProcessId.current().to_json())
        self.ranks[0].emit("plan", epochs=self.epochs, nproc=self.nproc, steps_per_epoch=self.steps_per_epoch, total_steps=self.total_steps)
        for events in self.ranks:
            events.emit("phase", phase="training")

    def train(self, steps: int, *, losses: list[float] | None = None) -> None:
        """Take this many steps, epoch ends with validation and checkpoints among them."""
        end = self.step + steps
        while self.step < end:
            epoch_end = self.epoch * self.steps_per_epoch
            count = min(end, epoch_end, self.step + self.report_steps) - self.step
            given = None if losses is None else [losses.pop(0) for _ in range(count)]
            self.ranks[0].emit("steps", **self._columns(count, given))
            self.step += count
            if self.step == epoch_end:
                self._end_epoch()

    def _loss(self, step: int) -> float:
        trend = 0.18 + 2.2 * math.exp(-step / (0.22 * self.total_steps))
        return trend * math.exp(self._random.gauss(0, 0.07))

    def _columns(self, count: int, losses: list[float] | None) -> dict[str, Any]:
        steps = range(self.step + 1, self.step + count + 1)
        losses = losses or [self._loss(step) for step in steps]
        self._losses += losses
        noise = [abs(self._random.gauss(1, 0.08)) for _ in steps]
        own = {"data": 0.15e-3, "forward": 0.8e-3, "backward": 1.1e-3, "sync": 0.6e-3, "optimizer": 0.5e-3}
        slow = {**own, "forward": 1.6e-3} if self.nproc > 1 else own
        quick = {**own, "sync": 1.4e-3} if self.nproc > 1 else own
        epoch_samples = len(self._losses) * self.samples_per_step
        network = sum(value for phase, value in slow.items() if phase != "data")
        return {
            "step": list(steps),
            "epoch": [self.epoch] * count,
            "stage": [0] * count,
            "loss": losses,
            "lr": [1e-3] * count,
            "samples": [self.samples_per_step] * count,
            "warmup": [int(step <= 3) for step in steps],
            **{f"{phase}_s": [slow[phase] * factor for factor in noise] for phase in PHASES},
            "network_s": [network * factor for factor in noise],
            "wait_s": [(0.8e-3 if self.nproc > 1 else 0.0) * factor for factor in noise],
            "slowest_rank": [self.slow_rank if self.nproc > 1 and self._random.random() < 0.96 else 0 for _ in steps],
            "scalars": {"accuracy": [1 - min(0.9, loss / 3) for loss in losses]},
            "ranks": [
                {
                    "rank": rank,
                    "samples_per_s": 64 / sum(slow.values()) * self._random.uniform(0.97, 1.03),
                    "memory": 412 * MiB + rank * MiB,
                    **{f"{phase}_s": (slow if rank == self.slow_rank else quick)[phase] for phase in PHASES},
                }
                for rank in range(self.nproc)
            ],
            "report": {
                "step": steps[-1],
                "epoch": self.epoch,
                "samples": epoch_samples,
                "samples_per_epoch": self.steps_per_epoch * self.samples_per_step,
                "loss": losses[-1],
                "epoch_loss": sum(self._losses) / len(self._losses),
                "data_s": slow["data"],
                "network_s": network * noise[-1],
                "aggregation_s": 0.8e-3 * noise[-1] if self.nproc > 1 else 0.0,
                "mean_data_s": slow["data"],
                "mean_network_s": network,
                "mean_aggregation_s": 0.8e-3 if self.nproc > 1 else 0.0,
            },
        }

    def _end_epoch(self) -> None:
        rank0 = self.ranks[0]
        loss = sum(self._losses) / len(self._losses)
        self._losses = []
        rank0.emit("epoch", epoch=self.epoch, step=self.step, stage=0, loss=loss, duration_s=self.steps_per_epoch * 4e-3)
        val_loss = 0.27 + 2.0 * math.exp(-self.step / (0.18 * self.total_steps)) + 0.12 * max(0.0, self.step / self.total_steps - 0.65)
        rank0.emit("validation", epoch=self.epoch, step=self.step, values={"val_loss": val_loss})
        self.checkpoint("last", None)
        self.print(f"epoch {self.epoch}: val_loss {val_loss:.4f}")
        self.epoch += 1

    def checkpoint(self, name: str, value: float | None) -> None:
        """Write the event of a checkpoint; `last`, `best` or a file's name."""
        self.ranks[0].emit("checkpoint", name=name, file=f"{name}.pt", epoch=self.epoch, step=self.step, value=value, bytes=int(1.3 * MiB), removed=[])

    def print(self, text: str, *, rank: int = 0, end: str = "\n") -> None:
        """Append to what a rank printed."""
        with self.run_dir.log(rank).open("a", encoding="utf-8", newline="") as log:
            log.write(text + end)

    def fail(self, rank: int = 1) -> None:
        """Let user code raise on a rank."""
        self.ranks[rank].emit(
            "failed",
            type="IndexError",
            message="index 10 is out of bounds for dimension 0 with size 10",
            traceback="Traceback (most recent call last):\n  Cell In[7], line 12, in step\n    y = table[labels]  # <b>\nIndexError: index 10 is out of bounds",
            cell=7,
            line=12,
        )

    def end(self, state: str = "finished", **result: object) -> None:
        """Write the result and the supervisor's last word; `result` adds to the former."""
        for events in self.ranks:
            if state == "finished":
                events.emit("finished")
            events.close()
        at = {"step": self.step, "epoch": self.epoch - (self.step % self.steps_per_epoch == 0)}
        self.run_dir.write_result({"state": state, "time": self.requested + self.step * 4e-3, "error": None, **at, **result})
        self.supervisor.emit("exited", state=state)
        self.supervisor.close()


def finished(root: Path, **options: Any) -> RunDir:
    """A whole run, from start to result."""
    run = FakeRun(root, **options)
    run.start()
    run.train(run.total_steps)
    run.end()
    return run.run_dir
