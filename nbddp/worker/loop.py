"""The training loop of a rank: stages, epochs, steps, and what happens between them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from nbddp import rng
from nbddp.errors import suggest
from nbddp.evaluation.errors import StepError
from nbddp.worker.active import ActiveStage
from nbddp.worker.compiling import Compiler
from nbddp.worker.decisions import Decisions
from nbddp.worker.epoch_end import EpochEnd, HookFailed
from nbddp.worker.feed import Feed
from nbddp.worker.freeze import Freezer
from nbddp.worker.progress import Monitor, Progress
from nbddp.worker.report import Reporter
from nbddp.worker.resume import Resumed
from nbddp.worker.saver import Every, Saver
from nbddp.worker.telemetry import STOP_ASKED, StepRecord, Telemetry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbddp.data import Epoch
    from nbddp.worker.context import Context, RankStage

WARMUP_STEPS = 3
"""First steps of a stage, kept out of throughput, ETA and advice."""


def train(context: Context) -> Progress:
    """Train from the first step to the last, or until all ranks agree to stop."""
    return Training(context).run()


class Training:
    """A run on one rank. All ranks make the same calls that communicate, in the same order."""

    def __init__(self, context: Context) -> None:
        ranks = context.ranks
        self._context, self._progress, self._monitor = context, Progress(), Monitor()
        self._reporter = Reporter(context.events, rank=ranks.rank, world_size=ranks.world_size)
        self._saver = Saver(context)
        self._decisions = Decisions(context, self._saver, self._progress)
        self._telemetry = Telemetry(ranks, decide=self._decisions.decide, apply=self._reporter)
        self._compiler = Compiler(context)
        self._epoch_end = None if context.hooks.on_epoch_end is None else EpochEnd(context.hooks.on_epoch_end, ranks)
        self._validated_at = -1
        self._saved_as: tuple[int, ...] | None = None
        self._values: dict[str, float] = {}
        self._lr = math.nan
        self._open = False
        self._feed = Feed.of(context)
        self._validation = self._feed.validation
        self._val_names: list[str] | None = [] if self._validation is None else ["val_loss"]

    def run(self) -> Progress:
        context, progress = self._context, self._progress
        context.model.to(context.ranks.device)
        self._freezer = Freezer(context.model)
        rng.seed_rank(context.config.seed, context.ranks.rank)
        self._saver.write_initial()
        resumed = Resumed.of(context)
        try:
            context.hooks.prepare_loss(context.model, context.ranks.device)
            for stage in context.stages:
                if resumed is None or stage.index >= resumed.stage:
                    self._enter(stage, resumed if resumed is not None and stage.index == resumed.stage else None)
                    self._epochs()
                if progress.reason is not None:
                    break
            self._end()
        except BaseException:
            self._saver.give_up()
            raise
        finally:
            self._feed.close()
        self._saver.close()
        return progress

    # -- stages

    def _enter(self, stage: RankStage, resumed: Resumed | None) -> None:
        """Everything that a stage has of its own; where the run goes on within it, as its checkpoint says."""
        progress = self._progress
        progress.enter_stage(stage.index)
        self._telemetry.begin()
        self._monitor.enter(stage)
        self._stage = ActiveStage(self._context, stage, self._freezer, self._compiler, self._feed)
        self._val_every = Every.parse(stage.config.val_every)
        self._reporter.begin_stage(
            samples_per_epoch=self._context.plan.n_train - stage.plan.dropped, on_nan=stage.config.on_nan, scaled=self._stage.updater.precision == "fp16"
        )
        if self._validation is not None and self._needs_names():
            self._val_names = self._validation.probe(self._stage.updater.precision)
        if resumed is not None:
            self._decisions.went_on_for(resumed.elapsed_s)
            resumed.restore(self._stage, progress, self._monitor, self._reporter)
            self._values, self._validated_at = resumed.values, resumed.validated_at
            if resumed.best is not None and self._monitor.best.value is not None:
                self._saver.adopt_best(resumed.best)
        if self._context.ranks.rank == 0:
            at = {"stage": stage.index, "name": stage.name, "step": progress.step, "total_steps": self._total_steps()}
            self._context.events.emit("stage", **at, **self._stage.facts)
        self._warmup_until = progress.step + WARMUP_STEPS
        self._phase("training")

    def _total_steps(self) -> int | None:
        """Where the run will end, as of now: one that went on with another batch size has taken other steps than planned."""
        limit, stages = self._context.plan.max_steps, self._context.plan.stages
        steps = [self._stage.steps_to_come(self._progress), *(stage.total_steps for stage in stages[self._stage.stage.index + 1 :])]
        limits = [] if limit is None else [limit]
        if None not in steps:
            limits.append(self._progress.step + sum(count for count in steps if count is not None))
        return min(limits, default=None)

    def _needs_names(self) -> bool:
        """Whether it matters before the first validation what it will record."""
        return bool(self._context.hooks.metrics) or any(plan.monitor not in ("loss", "val_loss") for plan in self._context.plan.stages)

    def _over(self) -> bool:
        """Whether the run ends here, and not just the stage."""
        limit = self._context.plan.max_steps
        return self._progress.reason is not None or (limit is not None and self._progress.step >= limit)

    def _stage_over(self) -> bool:
        progress, limit = self._progress, self._stage.stage.plan.max_steps
        return self._over() or self._monitor.exhausted or (limit is not None and progress.stage_step >= limit)

    def _is_last(self) -> bool:
        return self._stage.stage.index == len(self._context.plan.stages) - 1

    # -- epochs

    def _epochs(self) -> None:
        progress = self._progress
        while not self._stage_over() and progress.stage_epochs_done != self._stage.stage.plan.epochs:
            if not progress.within_epoch:
                progress.begin_epoch()
                self._reporter.begin_epoch()
            self._epoch()

    def _epoch(self) -> None:
        progress, position = self._progress, self._context.position
        position.epoch, began = progress.epoch, time.monotonic()
        self._epoch_steps = progress.epoch_step + self._stage.shares.steps_left(progress.epoch_samples)
        batches = self._feed.batches.epoch(self._stage.shares.epoch(progress.epoch, start=progress.epoch_samples))
        self._aggregation_s = 0.0
        if progress.epoch_step and not self._epoch_over():  # gone on from a checkpoint: where the run was stopped, this was still to come
            self._between()
        while not self._epoch_over():
            self._step(batches)
            if not self._epoch_over():
                self._between()
        batches.close()
        self._after_epoch(time.monotonic() - began)

    def _epoch_over(self) -> bool:
        return self._progress.epoch_step >= self._epoch_steps or self._stage_over()

    def _step(self, batches: Epoch) -> None:
        progress, position, stage = self._progress, self._context.position, self._stage
        updated = stage.updater.step(batches)
        progress.took_step(updated.samples)
        position.step, position.phase = progress.step, "training"
        if progress.stage_step == 1 or not self._open:
            self._first_step()
        self._lr = float(stage.optimizer.param_groups[0].get("lr", math.nan))
        record = StepRecord(
            step=progress.step,
            epoch=progress.epoch,
            stage=progress.stage,
            lr=self._lr,
            samples=updated.samples,
            own_samples=updated.own_samples,
            warmup=progress.step <= self._warmup_until,
            applied=updated.applied,
            overflow=updated.overflow,
            sums=updated.sums,
            times=updated.times,
            aggregation_s=self._aggregation_s,
        )
        self._reporter.recompiles = self._compiler.recompiles
        if updated.applied:
            stage.scheduler.after_step()
        if updated.stop:
            self._decisions.stop("on_nan", f"step {progress.step}: the loss or a gradient is not finite; the weights are those before this step")
        before = time.perf_counter()
        self._telemetry.tick(record)
        self._aggregation_s = time.perf_counter() - before
        self._heed()

    def _first_step(self) -> None:
        """Of the process, or of a stage: names are known now; the kernel learns that training works."""
        names = self._stage.updater.signature.names or ()
        if not self._open:
            self._open = True
            self._reporter.names = names
            self._telemetry.open(len(names))
            if self._context.ranks.rank == 0:
                self._context.events.emit("phase", phase="training", first_step=True)
        elif names != self._reporter.names:
            before, now = (", ".join(some) or "none" for some in (self._reporter.names, names))
            message = f"the scalars of the step are {now} in stage {self._stage.stage.name}, and were {before}: it returns the same names in all stages"
            raise StepError(message)
        self._saver.prepare(self._stage.state())  # what can't be saved is known now, rather than at the first checkpoint
        if self._epoch_end is None:  # what that reports is known after the first epoch
            self._check_monitor([])

    def _check_monitor(self, reported: Iterable[str]) -> None:
        """Whether anything records what this stage and those after it monitor.

        Raises:
            StepError: lists what is recorded.
        """
        if self._val_names is None:  # the first validation will tell
            return
        recorded = ["loss", *self._reporter.names, *self._val_names, *reported]
        for plan in self._context.plan.stages[self._progress.stage :]:
            if plan.monitor not in recorded:
                message = f"monitor={plan.monitor} is not recorded; recorded are {', '.join(recorded)}.{suggest(plan.monitor, recorded)}"
                raise StepError(message)

    def _between(self) -> None:
        """What is due by the number of steps, within an epoch."""
        step = self._progress.step
        better = self._val_every.at_step(step) and self._validate(counts=True)
        self._heed()
        due = self._decisions.due or self._saver.at_step(step)
        if better or due:
            self._save(best=better, last=due)

    def _heed(self) -> None:
        """Take rank 0's decisions in."""
        self._decisions.heed(self._telemetry.take())

    def _after_epoch(self, duration_s: float) -> None:
        """The end of an epoch, or of the part of one that a run ends with. A stop leaves the epoch open: its validation and checkpoint are still to come."""
        progress, whole = self._progress, self._progress.epoch_step >= self._epoch_steps
        self._telemetry.flush()
        self._reporter.finish_log()
        means = self._reporter.means
        if self._context.ranks.rank == 0:
            self._context.events.emit("epoch", loss=means.loss, values=means.scalars, duration_s=duration_s, samples=means.samples, whole=whole, **self._at())
        self._heed()
        if progress.stopped:
            return
        regular = self._val_every.at_step(progress.step) or (whole and self._val_every.at_epoch(progress.epoch))
        wanted = regular or self._ends(whole=whole)
        better = wanted and self._validate(counts=regular)
        complete = not wanted or self._validation is None or self._validated_at == progress.step
        self._decisions.settled = complete and self._ends(whole=whole) and (self._over() or self._is_last())
        self._heed()
        if not complete:
            return
        if whole or self._ends(whole=whole):
            better = self._judge_epoch(whole=whole) or better
        if whole:
            progress.finish_epoch()
            self._stage.scheduler.after_epoch(self._monitor.take_fresh())
        self._finish_epoch(whole=whole, better=better)

    def _finish_epoch(self, *, whole: bool, better: bool) -> None:
        """The checkpoint that is due after an epoch, or after the last step of a stage."""
        progress = self._progress
        ends = self._stage_over() or progress.stage_epochs_done == self._stage.stage.plan.epochs
        several = len(self._context.plan.stages) > 1 and ends and not self._over()
        if self._monitor.exhausted:
            self._context.message(f"stage {self._stage.stage.name} ends: {self._monitor.why}" if not self._is_last() else f"the run ends: {self._monitor.why}")
            if self._is_last() and progress.reason is None:
                progress.reason = "patience"
        due = self._decisions.due or self._saver.at_step(progress.step)
        due = due or (whole and self._saver.at_epoch(progress.epoch, old_enough=self._decisions.old_enough))
        if better or due or ends:
            self._save(best=better, last=due or ends, names=(f"stage-{progress.stage}",) if several else ())

    def _ends(self, *, whole: bool) -> bool:
        """Whether the stage ends with this epoch."""
        return self._stage_over() or self._progress.stage_epochs_done + whole == self._stage.stage.plan.epochs

    def _judge_epoch(self, *, whole: bool) -> bool:
        """The hook of the epoch's end, and the monitored value where a validation does not know it; return whether it is the best."""
        recorded = {"loss": self._reporter.means.loss, **self._reporter.means.scalars}
        if whole and self._epoch_end is not None:
            try:
                reported = self._report_epoch()
            except HookFailed as failed:
                self._save(best=False, last=True)  # what the epoch learned is not the hook's to lose
                failed.end()
                raise
            recorded.update(reported)
            self._check_monitor(reported)
        name = self._monitor.name
        return name in recorded and self._monitor.judge(recorded[name], self._progress, counts=whole)

    def _report_epoch(self) -> dict[str, float]:
        """Call on_epoch_end; return what it reported, on every rank."""
        assert self._epoch_end is not None
        progress, groups = self._progress, self._stage.optimizer.param_groups
        rates = [float(group.get("lr", math.nan)) for group in groups]
        reported = self._epoch_end.call(
            **self._at(),
            stage_name=self._stage.stage.name,
            loss=self._reporter.means.loss,
            values=self._values if self._validated_at == progress.step else {},
            lr=self._lr,
            model=self._context.model,
            optimizer=self._stage.optimizer,
            taken=frozenset(self._reporter.names),
        )
        if self._stage.scheduler.sets_rates and rates != [float(group.get("lr", math.nan)) for group in groups]:
            text = "on_epoch_end sets lr, and so does the schedule in every step: what the hook sets holds for one step"
            self._context.message(f"{text}; --schedule constant leaves lr to the hook", level="warning")
        if reported and self._context.ranks.rank == 0:
            self._context.events.emit("reported", values=reported, **self._at())
        return reported

    # -- validation and checkpoints

    def _validate(self, *, counts: bool) -> bool:
        """Validate unless these weights were validated already; return whether they are the best so far, which those of a validation left early are not."""
        progress = self._progress
        if self._validation is None or self._validated_at == progress.step:
            return False
        self._telemetry.flush()
        self._phase("validation")
        began = time.monotonic()
        with rng.preserved(self._context.ranks.device):  # a run that goes on draws the same numbers wherever it was validated
            values = self._validation.run(progress.epoch, self._tick_in_validation, self._stage.updater.precision)
        self._phase("training")
        if values is None:
            return False
        self._values, self._validated_at, self._val_names = values, progress.step, list(values)
        if self._context.ranks.rank == 0:
            self._context.events.emit("validation", values=values, duration_s=time.monotonic() - began, **self._at())
            shown = "   ".join(f"{name}: {value:.4f}" for name, value in values.items())
            print(f"Validation Epoch: {progress.epoch}   {shown}", flush=True)  # noqa: T201 - rank 0's log
        if self._epoch_end is None:
            self._check_monitor([])
        name = self._monitor.name
        return name in values and self._monitor.judge(values[name], progress, counts=counts)

    def _tick_in_validation(self) -> bool:
        """Count a batch; return whether all ranks leave the validation here."""
        self._telemetry.tick()
        return bool(self._telemetry.flags & STOP_ASKED)

    def _save(self, *, best: bool, last: bool, names: tuple[str, ...] = ()) -> None:
        """A checkpoint of this very step: what was measured so far is applied first."""
        self._telemetry.flush()
        self._heed()
        self._phase("checkpoint")
        value = self._monitor.last if self._monitor.judged_at == self._progress.step else None
        self._saver.save(self._state(), value=value, best=best, last=last, names=names, own=self._stage.own_state())
        if last:
            self._saved_as = self._now()
            self._decisions.saved()
        self._phase("training")

    def _now(self) -> tuple[int, ...]:
        """What tells two states of the run apart."""
        return self._progress.step, self._progress.epochs_done, self._validated_at, self._monitor.judged_at

    def _at(self) -> dict[str, int]:
        return {"epoch": self._progress.epoch, "step": self._progress.step, "stage": self._progress.stage}

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the weights, the random states and the versions."""
        progress = self._progress
        return {
            **self._stage.state(),
            **self._at(),
            "stage_name": self._stage.stage.name,
            "stage_step": progress.stage_step,
            "stage_epochs_done": progress.stage_epochs_done,
            "epochs_done": progress.epochs_done,
            "sampler": self._stage.position(progress),
            "epoch_sums": self._reporter.means.state(),
            "values": dict(self._values),
            "metrics": {},
            "early_stop": {**self._monitor.state(), "validated_at": self._validated_at},
            "best": self._monitor.best.state(),
            "elapsed_s": self._decisions.elapsed_s,
        }

    def _end(self) -> None:
        """The last checkpoint: of the weights that training ended with."""
        self._telemetry.flush()
        self._reporter.finish_log()
        if self._saved_as != self._now():
            self._save(best=False, last=True)

    def _phase(self, phase: str) -> None:
        self._context.position.phase = phase
        if self._context.ranks.rank == 0:
            self._context.events.emit("phase", phase=phase)
