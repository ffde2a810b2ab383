"""From what all ranks measured to events, the log line and the means of the epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from nbddp.state import PHASES
from nbddp.worker.clock import BACKWARD, DATA, FORWARD, N_PHASES, OPTIMIZER
from nbddp.worker.telemetry import AGGREGATION, FIRST_SCALAR, LOSS, SAMPLES, STARVED, TIMES, WEIGHT, Gathered, StepRecord

if TYPE_CHECKING:
    from nbddp.events import EventWriter

LOG_PERIOD_S = 1.0
_ON_NAN = {"warn": "training goes on; --on-nan skip or stop keeps the weights finite", "skip": "the step is skipped", "stop": "the run stops"}
_LEFT_OUT = "the step is left out, and training goes on"


class EpochMeans:
    """Sums over the epoch so far; the same on every rank."""

    def __init__(self) -> None:
        self.loss_sum = self.weight = 0.0
        self.scalar_sums: dict[str, float] = {}
        self.times = np.zeros(3)
        self.steps = self.samples = 0

    @property
    def loss(self) -> float:
        """Mean over the samples of the epoch so far."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    @property
    def scalars(self) -> dict[str, float]:
        """Means of the step's own scalars over the same samples."""
        return {name: value / self.weight if self.weight else float("nan") for name, value in self.scalar_sums.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint in the middle of an epoch holds."""
        sums = {"loss": self.loss_sum, "weight": self.weight, "scalars": dict(self.scalar_sums)}
        return {**sums, "samples": self.samples, "steps": self.steps, "times": self.times.tolist()}

    @classmethod
    def of(cls, state: dict[str, Any]) -> EpochMeans:
        """The means that a checkpoint holds."""
        means = cls()
        means.loss_sum, means.weight = float(state["loss"]), float(state["weight"])
        means.scalar_sums = {str(name): float(value) for name, value in state["scalars"].items()}
        means.samples, means.steps, means.times = int(state["samples"]), int(state["steps"]), np.array(state["times"], dtype=np.float64)
        return means


class Reporter:
    """Takes what was gathered on every rank; rank 0 also writes it down."""

    def __init__(self, events: EventWriter, *, rank: int, world_size: int) -> None:
        self._events, self._rank, self._world_size = events, rank, world_size
        self._samples_per_epoch, self._on_nan, self._scaled = 0, "warn", False
        self.names: tuple[str, ...] = ()
        self.recompiles = 0
        self.means = EpochMeans()
        self._last_log = 0.0
        self._unlogged: str | None = None
        self._warned_of: set[str] = set()

    def begin_stage(self, *, samples_per_epoch: int, on_nan: str, scaled: bool) -> None:
        """`scaled` says that a loss scaler leaves out steps that are not finite."""
        self._samples_per_epoch, self._on_nan, self._scaled = samples_per_epoch, on_nan, scaled

    def begin_epoch(self) -> None:
        self.means = EpochMeans()

    def __call__(self, gathered: Gathered) -> None:
        """Fold the steps into the means; on rank 0 write a `steps` event and, once a second, the log line."""
        rows, records = gathered.rows, gathered.records
        phases = rows[:, :, TIMES : TIMES + N_PHASES]
        own = phases[:, :, [DATA, FORWARD, BACKWARD]].sum(axis=2)
        network = phases[:, :, FORWARD : OPTIMIZER + 1].sum(axis=2).max(axis=0)
        slowest = own.argmax(axis=0)
        data, aggregation = phases[:, :, DATA].max(axis=0), rows[:, :, AGGREGATION].max(axis=0)
        weight = rows[:, :, WEIGHT].sum(axis=0)
        with np.errstate(all="ignore"):  # what is not finite is said once, by a message
            loss_sum = rows[:, :, LOSS].sum(axis=0)
            loss = loss_sum / weight
            scalar_sums = rows[:, :, FIRST_SCALAR:].sum(axis=0)
            scalars = scalar_sums / weight[:, None]
        samples = [record.samples for record in records]
        means = self.means
        applied = np.array([record.applied for record in records])
        with np.errstate(all="ignore"):
            means.loss_sum += float(loss_sum[applied].sum())
            means.weight += float(weight[applied].sum())
            for index, name in enumerate(self.names):
                means.scalar_sums[name] = means.scalar_sums.get(name, 0.0) + float(scalar_sums[applied, index].sum())
        means.times += np.array([data.sum(), network.sum(), aggregation.sum()])
        means.steps += len(records)
        means.samples += sum(samples)
        if self._rank != 0:
            return
        self._warn(rows[:, :, LOSS], records)
        rates = _rates(rows, records)
        last, mean = (data[-1], network[-1], aggregation[-1]), means.times / means.steps
        chosen = phases[slowest, np.arange(len(records))]
        columns: dict[str, Any] = {
            "step": [record.step for record in records],
            "epoch": [record.epoch for record in records],
            "stage": [record.stage for record in records],
            "loss": loss.tolist(),
            "lr": [record.lr for record in records],
            "samples": samples,
            "warmup": [int(record.warmup) for record in records],
            **{f"{phase}_s": _rounded(chosen[:, index]) for index, phase in enumerate(PHASES)},
            "network_s": _rounded(network),
            "wait_s": _rounded(own.max(axis=0) - own.min(axis=0)),
            "slowest_rank": slowest.tolist(),
            "overflow": [int(record.overflow) for record in records],
            "recompiles": self.recompiles,
            "starved": round(float(rows[:, :, STARVED].mean()), 4),
            "scalars": {name: scalars[:, index].tolist() for index, name in enumerate(self.names)},
            "ranks": [
                {
                    "rank": rank,
                    **({} if rates is None else {"samples_per_s": rates[rank]}),
                    "memory": gathered.memory[rank],
                    **{f"{phase}_s": round(float(phases[rank, :, index].mean()), 7) for index, phase in enumerate(PHASES)},
                }
                for rank in range(self._world_size)
            ],
            "report": {
                "step": records[-1].step,
                "epoch": records[-1].epoch,
                "samples": means.samples,
                "samples_per_epoch": self._samples_per_epoch,
                "loss": float(loss[-1]),
                "epoch_loss": means.loss,
                **dict(zip(("data_s", "network_s", "aggregation_s"), _rounded(np.array(last)), strict=True)),
                **dict(zip(("mean_data_s", "mean_network_s", "mean_aggregation_s"), _rounded(mean), strict=True)),
            },
        }
        self._events.emit("steps", **columns)
        self._log(columns["report"])

    def _log(self, report: dict[str, Any]) -> None:
        self._unlogged = log_line(report, world_size=self._world_size)
        if time.monotonic() - self._last_log >= LOG_PERIOD_S:
            self.finish_log()

    def finish_log(self) -> None:
        """Write the last report's line if it was held back."""
        if self._unlogged is not None:
            print(self._unlogged, flush=True)  # noqa: T201 - the log line of rank 0
            self._last_log, self._unlogged = time.monotonic(), None

    def _warn(self, sums: np.ndarray, records: list[StepRecord]) -> None:
        """Say once what is not finite, with the rank where it began; `sums` are of shape (ranks, steps)."""
        does = _LEFT_OUT if self._on_nan == "warn" and self._scaled else _ON_NAN[self._on_nan]
        bad = ~np.isfinite(sums)
        if bad.any():
            index = int(np.flatnonzero(bad.any(axis=0))[0])
            self._warn_once("loss", f"step {records[index].step}: the loss of rank {int(np.flatnonzero(bad[:, index])[0])} is not finite; {does}")
        refused = [record.step for index, record in enumerate(records) if not (record.applied or record.overflow or bad[:, index].any())]
        if refused:
            self._warn_once("gradient", f"step {refused[0]}: a gradient is not finite, though the loss is; {does}")

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            self._events.emit("message", level="warning", text=text)


def _rates(rows: np.ndarray, records: list[StepRecord]) -> list[float] | None:
    """The samples per second of each rank: its own samples, by the time of its own steps; `rows` are of shape (ranks, steps, columns).

    What takes place between steps, such as validations and checkpoints, is left out, and so are the steps of the warm-up: None where there are no others.
    """
    warm = rows[:, [not record.warmup for record in records]]
    times = warm[:, :, TIMES : TIMES + N_PHASES].sum(axis=(1, 2))
    if not times.all():
        return None
    return [float(f"{rate:.4g}") for rate in warm[:, :, SAMPLES].sum(axis=1) / times]


def _rounded(values: np.ndarray) -> list[float]:
    return list(np.round(values, 7).tolist())


def log_line(report: dict[str, Any], *, world_size: int) -> str:
    """The log line: counter in global samples, in parentheses the mean over the epoch so far; times are maxima over ranks, in seconds."""
    of, seen = report["samples_per_epoch"], report["samples"]
    share = f"{100 * seen // of}%" if of else "?"
    parts = [
        f"Train Epoch: {report['epoch']} [{seen}/{of} ({share})]",
        f"Loss: {report['loss']:.3f} ({report['epoch_loss']:.3f})",
        f"Time Dataloader: {report['data_s']:.3f} ({report['mean_data_s']:.3f})",
        f"Time Network: {report['network_s']:.3f} ({report['mean_network_s']:.3f})",
    ]
    if world_size > 1:
        parts.append(f"Time Loss Aggregation: {report['aggregation_s']:.3f} ({report['mean_aggregation_s']:.3f})")
    return "   ".join(parts)
