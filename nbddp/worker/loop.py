"""The training loop of a rank: stages, epochs, steps, and what happens between them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp import checkpoint
from nbddp.data import Batches, LoaderOptions, Part, Shares, make_fetch, split_indices
from nbddp.worker import rng
from nbddp.worker.errors import StepError
from nbddp.worker.optim import Scheduler, make_optimizer
from nbddp.worker.progress import Best, Progress
from nbddp.worker.report import Reporter
from nbddp.worker.saver import Every, Saver
from nbddp.worker.step import StepModule
from nbddp.worker.telemetry import SAVE_DUE, SAVE_OK, STOP_ASKED, STOP_TIME, StepRecord, Telemetry
from nbddp.worker.update import Updater
from nbddp.worker.validate import Validation
from nbddp.worker.wrap import Replica

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.worker.context import Context

WARMUP_STEPS = 3
"""First steps of a stage, kept out of throughput, ETA and advice."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One entry of the list that the loop runs over, with the options that hold in it."""

    index: int
    config: TrainConfig


def train(context: Context) -> Progress:
    """Train from the first step to the last, or until all ranks agree to stop."""
    return Training(context).run()


class Training:
    """A run on one rank. All ranks make the same calls that communicate, in the same order."""

    def __init__(self, context: Context) -> None:
        config, plan, ranks = context.config, context.plan, context.ranks
        self._context, self._progress, self._best = context, Progress(), Best.of(config)
        self._began = time.monotonic()
        samples = plan.n_train - plan.dropped
        self._reporter = Reporter(context.events, rank=ranks.rank, world_size=ranks.world_size, samples_per_epoch=samples, on_nan=config.on_nan)
        self._telemetry = Telemetry(ranks, decide=self._decide, apply=self._reporter)
        self._saver = Saver(context)
        self._val_every = Every.parse(config.val_every)
        self._validated_at = self._monitored_at = -1
        self._saved_as: tuple[int, ...] | None = None
        self._due = self._old_enough = self._done = False
        self._values: dict[str, float] = {}
        self._fresh: float | None = None
        train_data, val_data = context.train_data, context.val_data
        if config.val_split is not None:
            train_indices, val_indices = split_indices(len(train_data), config.val_split, config.seed)
            train_data, val_data = Part(train_data, train_indices), Part(train_data, val_indices)
        options = LoaderOptions(
            num_workers=plan.workers_per_rank,
            prefetch_factor=config.prefetch_factor,
            persistent=config.persistent_workers,
            pin_memory=ranks.device.type == "cuda" if config.pin_memory is None else config.pin_memory and torch.cuda.is_available(),
            worker_init_fn=context.hooks.worker_init_fn,
        )
        self._batches = Batches(make_fetch(train_data, context.hooks.collate_fn), options, ranks.device)
        self._validation = Validation(context, val_data, options) if val_data is not None and plan.n_val else None

    def run(self) -> Progress:
        context, progress = self._context, self._progress
        context.model.to(context.ranks.device)
        if not context.model.training:
            context.model.train()
        rng.seed_rank(context.config.seed, context.ranks.rank)
        self._saver.write_initial()
        try:
            for stage in (Stage(0, context.config),):
                self._enter(stage)
                self._epochs(stage)
                if progress.reason is not None:
                    break
            self._end()
        except BaseException:
            self._saver.give_up()
            raise
        finally:
            self._batches.close()
            if self._validation is not None:
                self._validation.close()
        self._saver.close()
        return progress

    def _enter(self, stage: Stage) -> None:
        """Everything that a stage has of its own: replica, optimizer, scheduler, sampler."""
        context, hooks, ranks, plan = self._context, self._context.hooks, self._context.ranks, self._context.plan
        self._progress.stage = stage.index
        hooks.prepare_loss(context.model, ranks.device)
        replica = Replica(StepModule(context.model, hooks.training_step, hooks.training_name), stage.config, ranks)
        self._optimizer = make_optimizer(context.model, stage.config, hooks.optimizer)
        self._scheduler = Scheduler(self._optimizer, stage.config, hooks.scheduler)
        self._updater = Updater(context, replica, self._optimizer)
        self._shares = Shares(
            n=plan.n_train,
            batch_size=plan.batch_size,
            world_size=ranks.world_size,
            rank=ranks.rank,
            accumulate=stage.config.accumulate,
            drop_last=stage.config.drop_last,
            shuffle=stage.config.shuffle,
            seed=stage.config.seed,
            stage=stage.index,
        )
        self._warmup_until = self._progress.step + WARMUP_STEPS
        self._phase("training")

    def _epochs(self, stage: Stage) -> None:
        progress = self._progress
        while not self._over() and progress.epochs_done != self._context.plan.epochs:
            progress.epoch, progress.epoch_step = progress.epochs_done + 1, 0
            self._epoch(stage)

    def _over(self) -> bool:
        limit = self._context.plan.max_steps
        return self._progress.reason is not None or (limit is not None and self._progress.step >= limit)

    def _epoch(self, stage: Stage) -> None:
        progress, position = self._progress, self._context.position
        position.epoch, began = progress.epoch, time.monotonic()
        self._reporter.begin_epoch()
        batches = self._batches.epoch(self._shares.epoch(progress.epoch))
        aggregation_s = 0.0
        while True:
            updated = self._updater.step(batches)
            progress.step += 1
            progress.epoch_step += 1
            position.step, position.phase = progress.step, "training"
            if progress.step == 1:
                self._first_step()
            record = StepRecord(
                step=progress.step,
                epoch=progress.epoch,
                stage=stage.index,
                lr=float(self._optimizer.param_groups[0].get("lr", math.nan)),
                samples=updated.samples,
                warmup=progress.step <= self._warmup_until,
                applied=updated.applied,
                sums=updated.sums,
                times=updated.times,
                aggregation_s=aggregation_s,
            )
            if updated.applied:
                self._scheduler.after_step()
            elif stage.config.on_nan == "stop":
                self._stop("on_nan", f"step {progress.step}: the loss or a gradient is not finite; the weights are those before this step")
            before = time.perf_counter()
            self._telemetry.tick(record)
            aggregation_s = time.perf_counter() - before
            self._heed()
            if self._over() or progress.epoch_step == self._shares.steps:
                break
            self._between()
            if self._over():
                break
        batches.close()
        self._after_epoch(time.monotonic() - began)

    def _first_step(self) -> None:
        """Names are known now; the kernel learns that training works."""
        names = self._updater.signature.names or ()
        self._reporter.names = names
        self._telemetry.open(len(names))
        if self._context.ranks.rank == 0:
            self._context.events.emit("phase", phase="training", first_step=True)
            for name, state in self._optimizer_state().items():  # now rather than at the first checkpoint
                checkpoint.check_plain(state, name)

    def _between(self) -> None:
        """What is due by the number of steps, within an epoch."""
        step = self._progress.step
        better = self._val_every.at_step(step) and self._validate()
        self._heed()
        due = self._due or self._saver.at_step(step)
        if better or due:
            self._save(best=better, last=due)

    def _heed(self) -> None:
        """Take rank 0's decisions in."""
        flags = self._telemetry.take()
        self._due = self._due or bool(flags & SAVE_DUE)
        self._old_enough = self._old_enough or bool(flags & SAVE_OK)
        if self._done:
            return
        if flags & STOP_ASKED:
            self._stop("asked", "stopped as asked")
        elif flags & STOP_TIME:
            self._stop("max_time", f"max_time of {self._context.config.max_time:g} s is over")

    def _stop(self, reason: str, text: str) -> None:
        """Leave after this step. What the user wishes goes before a limit of time, which still brings a validation."""
        progress = self._progress
        if progress.stopped or progress.reason == reason:
            return
        progress.reason, progress.stopped = reason, reason != "max_time"
        if self._context.ranks.rank == 0:
            self._context.events.emit("stopping", reason=reason, text=text, step=progress.step)

    def _after_epoch(self, duration_s: float) -> None:
        """The end of an epoch, or of the part of one that a run ends with. A stop leaves the epoch open: its validation and checkpoint are still to come."""
        progress, whole = self._progress, self._progress.epoch_step == self._shares.steps
        self._telemetry.flush()
        self._reporter.finish_log()
        means = self._reporter.means
        if self._context.ranks.rank == 0:
            self._context.events.emit("epoch", loss=means.loss, duration_s=duration_s, samples=means.samples, whole=whole, **self._at())
        self._heed()
        if progress.stopped:
            return
        ends = self._over() or progress.epochs_done + whole == self._context.plan.epochs
        wanted = ends or self._val_every.at_step(progress.step) or (whole and self._val_every.at_epoch(progress.epoch))
        better = wanted and self._validate()
        complete = not wanted or self._validation is None or self._validated_at == progress.step
        self._done = ends and complete
        self._heed()
        if not complete:
            return
        if self._context.plan.monitor == "loss":
            better = self._monitor({"loss": means.loss})
        if whole:
            progress.epochs_done += 1
            self._scheduler.after_epoch(self._fresh)
            self._fresh = None
        due = self._due or self._saver.at_step(progress.step) or (whole and self._saver.at_epoch(progress.epoch, old_enough=self._old_enough))
        if better or due:
            self._save(best=better, last=due or ends)

    def _validate(self) -> bool:
        """Validate unless these weights were validated already; return whether they are the best so far, which those of a validation left early are not."""
        progress = self._progress
        if self._validation is None or self._validated_at == progress.step:
            return False
        self._telemetry.flush()
        self._phase("validation")
        began = time.monotonic()
        values = self._validation.run(progress.epoch, self._tick_in_validation)
        self._phase("training")
        if values is None:
            return False
        self._values, self._validated_at = values, progress.step
        if self._context.ranks.rank == 0:
            self._context.events.emit("validation", values=values, duration_s=time.monotonic() - began, **self._at())
            shown = "   ".join(f"{name}: {value:.4f}" for name, value in values.items())
            print(f"Validation Epoch: {progress.epoch}   {shown}", flush=True)  # noqa: T201 - rank 0's log
        return self._context.plan.monitor != "loss" and self._monitor(values)

    def _tick_in_validation(self) -> bool:
        """Count a batch; return whether all ranks leave the validation here."""
        self._telemetry.tick()
        return bool(self._telemetry.flags & STOP_ASKED)

    def _monitor(self, values: dict[str, float]) -> bool:
        """Compare the monitored value with the best before.

        Raises:
            StepError: where nothing of that name is recorded.
        """
        name = self._context.plan.monitor
        if name not in values:
            message = f"monitor={name} is not recorded; recorded are {', '.join(dict.fromkeys([*values, 'loss']))}"
            raise StepError(message)
        self._monitored_at, self._fresh = self._progress.step, values[name]
        return self._best.update(values[name], self._progress)

    def _save(self, *, best: bool, last: bool) -> None:
        """A checkpoint of this very step: what was measured so far is applied first."""
        self._telemetry.flush()
        self._heed()
        self._phase("checkpoint")
        value = self._best.last if self._monitored_at == self._progress.step else None
        self._saver.save(self._state(), value=value, best=best, last=last)
        if last:
            self._saved_as, self._due, self._old_enough = self._now(), False, False
        self._phase("training")

    def _now(self) -> tuple[int, ...]:
        """What tells two states of the run apart."""
        return self._progress.step, self._progress.epochs_done, self._validated_at, self._monitored_at

    def _at(self) -> dict[str, int]:
        return {"epoch": self._progress.epoch, "step": self._progress.step, "stage": self._progress.stage}

    def _optimizer_state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state()}

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the weights, the random states and the versions."""
        progress, config, means = self._progress, self._context.config, self._reporter.means
        return {
            **self._optimizer_state(),
            **self._at(),
            "epochs_done": progress.epochs_done,
            "sampler": {"seed": config.seed, "stage": progress.stage, "epoch": progress.epoch, "step": progress.epoch_step},
            "epoch_sums": {"loss": means.loss_sum, "weight": means.weight, "samples": means.samples, "steps": means.steps, "times": means.times.tolist()},
            "values": dict(self._values),
            "metrics": {},
            "early_stop": {},
            "best": self._best.state(),
        }

    def _end(self) -> None:
        """The last checkpoint: of the weights that training ended with."""
        self._telemetry.flush()
        self._reporter.finish_log()
        if self._saved_as != self._now():
            self._save(best=False, last=True)

    def _decide(self) -> int:
        """Rank 0's decisions, which travel with its telemetry."""
        self._saver.release_best()
        flags = 0
        if self._context.run_dir.asked() == "stop":
            flags |= STOP_ASKED
        limit = self._context.config.max_time
        if limit is not None and time.monotonic() - self._began >= limit:
            flags |= STOP_TIME
        if self._saver.due():
            flags |= SAVE_DUE
        if self._saver.old_enough():
            flags |= SAVE_OK
        return flags

    def _phase(self, phase: str) -> None:
        self._context.position.phase = phase
        self._reporter.resume()
        if self._context.ranks.rank == 0:
            self._context.events.emit("phase", phase=phase)
