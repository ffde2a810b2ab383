"""Going on from a checkpoint: what the ranks put back before the first step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp import checkpoint, rng
from nbddp.config import TrainConfig
from nbddp.evaluation.errors import StepError
from nbddp.worker.report import EpochMeans

if TYPE_CHECKING:
    from nbddp.worker.active import ActiveStage
    from nbddp.worker.context import Context
    from nbddp.worker.progress import Monitor, Progress
    from nbddp.worker.report import Reporter

_OF_GROUPS = ("weight_decay", "momentum")
"""Options that live in the optimizer's parameter groups, which a checkpoint brings back; the learning rate is the scheduler's to set."""


class Resumed:
    """A checkpoint that this run goes on from; what the cell says otherwise wins."""

    def __init__(self, context: Context, content: dict[str, Any]) -> None:
        self._context, self._content = context, content
        self.stage, self.elapsed_s = int(content["stage"]), float(content["elapsed_s"])
        self.values, self.validated_at = dict(content["values"]), int(content["early_stop"]["validated_at"])
        best = context.spec.get("resume_best")
        self.best = None if best is None else Path(best)
        self._best_is_gone = "resume_best" in context.spec and best is None

    @classmethod
    def of(cls, context: Context) -> Resumed | None:
        """Read the checkpoint that the run was told to go on from, and its weights into the model; None for a run that begins.

        Raises:
            CheckpointError: where it is gone, incomplete, or does not fit.
        """
        given = context.spec.get("resume")
        if given is None:
            return None
        path = Path(given)
        content = checkpoint.read_resumable(path)
        checkpoint.load_state(context.model, content["model"], strict=True, what=str(path), undo=False)
        return cls(context, content)

    def restore(self, stage: ActiveStage, progress: Progress, monitor: Monitor, reporter: Reporter) -> None:
        """Put everything back that a run which never stopped would have at this step. Called once, after all else is set up: the random streams last."""
        content = self._content
        progress.stage_step, progress.stage_epochs_done = int(content["stage_step"]), int(content["stage_epochs_done"])
        progress.epoch, progress.step, progress.epochs_done = int(content["epoch"]), int(content["step"]), int(content["epochs_done"])
        progress.epoch_step, progress.epoch_samples = int(content["sampler"]["step"]), int(content["sampler"]["samples"])
        monitor.load(content["early_stop"], content["best"])
        if self._best_is_gone:  # nothing could be loaded as the best, so the best begins anew
            monitor.best.value = None
        reporter.means = EpochMeans.of(content["epoch_sums"])
        self._restore_optimizer(stage, self._changed(stage))
        self._restore_streams(stage, progress)

    def _changed(self, stage: ActiveStage) -> set[str]:
        """Options that differ from the checkpoint's, as they hold in this stage."""
        stored, spec = TrainConfig(**self._content["config"]), stage.stage.spec
        own = {} if spec is None else spec.options  # the checkpoint's own are not known: they count as the same
        return {name for name in TrainConfig.model_fields if own.get(name, getattr(stored, name)) != getattr(stage.stage.config, name)}

    def _restore_optimizer(self, stage: ActiveStage, changed: set[str]) -> None:
        content, said = self._content, self._context.message
        if stage.stage.optimizer is None and "optimizer" in changed:
            said("the optimizer is another one than the checkpoint's: it begins anew, and so does the schedule")
            return
        own = [{key: value for key, value in group.items() if key != "params"} for group in stage.optimizer.param_groups]
        saved = copy.deepcopy(content["optimizer"])
        if "fused" in changed and stage.stage.optimizer is None:  # before the state is loaded, which goes where the kernels want it
            for group, wanted in zip(saved["param_groups"], own, strict=False):
                group["fused"] = wanted.get("fused")
        try:
            stage.optimizer.load_state_dict(saved)
        except (ValueError, KeyError) as error:
            message = f"the checkpoint's optimizer state does not fit the optimizer: {error}; --init with the same run starts from its weights alone"
            raise StepError(message) from error
        if content["scaler"] is not None:
            stage.updater.load_scaler(content["scaler"])
        if not stage.scheduler.load(content["scheduler"]):
            said("the schedule is another one than the checkpoint's: it is entered at this step")
        if stage.stage.optimizer is None:
            for group, wanted in zip(stage.optimizer.param_groups, own, strict=True):
                group.update({name: wanted[name] for name in _OF_GROUPS if name in changed and name in wanted})

    def _restore_streams(self, stage: ActiveStage, progress: Progress) -> None:
        content, ranks = self._content, self._context.ranks
        if content["world_size"] == ranks.world_size:
            own = (content.get("comm_hook") or [None] * ranks.world_size)[ranks.rank]
            if stage.replica.compression is not None and own is not None:
                stage.replica.compression.load(own)
            rng.restore(content["rng"][ranks.rank], ranks.device)
            return
        rng.seed_rank(self._context.config.seed, ranks.rank, progress.step)
        self._context.message(
            f"the checkpoint is of {content['world_size']} rank{'s' if content['world_size'] > 1 else ''}, this run has {ranks.world_size}: "
            "the order of the samples goes on, the random streams of the ranks (dropout) are new"
        )
