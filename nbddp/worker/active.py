"""What a stage has of its own while it trains: replica, optimizer, scheduler, loss scaler, and the order of its samples."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from nbddp import norm
from nbddp.data import Shares
from nbddp.worker.optim import make_optimizer
from nbddp.worker.schedule import Scheduler
from nbddp.worker.step import StepModule
from nbddp.worker.update import Updater, precision_in_effect
from nbddp.worker.wrap import Replica

if TYPE_CHECKING:
    from nbddp.worker.compiling import Compiler
    from nbddp.worker.context import Context, RankStage
    from nbddp.worker.feed import Feed
    from nbddp.worker.freeze import Freezer
    from nbddp.worker.progress import Progress


class ActiveStage:
    """A stage on this rank, made when it begins; the model, the data and the channel of telemetry are those of the run."""

    def __init__(
        self,
        context: Context,
        stage: RankStage,
        freezer: Freezer,
        compiler: Compiler,
        feed: Feed,
    ) -> None:
        config, plan, ranks, hooks = stage.config, stage.plan, context.ranks, context.hooks
        self.stage, self._device = stage, ranks.device
        held = freezer.apply(stage.spec)
        if stage.spec is not None and stage.spec.freeze_batch_norm and not held:
            context.message(f"{stage.spec}: freeze_batch_norm holds no layer, since no BatchNorm has all of its parameters frozen", level="warning")
        torch.set_float32_matmul_precision(config.matmul_precision if "matmul_precision" in config.given else context.matmul_precision)
        self.shares = Shares(
            n=context.plan.n_train,
            batch_size=plan.batch_size,
            world_size=ranks.world_size,
            rank=ranks.rank,
            accumulate=plan.accumulate,
            drop_last=config.drop_last,
            shuffle=config.shuffle,
            seed=config.seed,
            stage=stage.index,
            sampler=feed.sampler,
        )
        self._layers = norm.batch_norm_layers(context.model).values()
        module = StepModule(context.model, hooks.training_step, hooks.training_name)
        self.optimizer = make_optimizer(context.model, config, lr=plan.lr, hook=stage.optimizer)
        compiler.compile(stage, module, precision_in_effect(stage, self.optimizer), lambda: feed.first_batch(self.shares))
        self.replica = Replica(module, stage, ranks)
        self.scheduler = Scheduler(self.optimizer, config, stage.scheduler, total_steps=plan.total_steps)
        self.updater = Updater(context, stage, self.replica, self.optimizer)

    @property
    def facts(self) -> dict[str, Any]:
        """What the stage's event says of it: what was planned, and what is known only here.

        `trainable` counts the elements of the parameters that train, `float32` says whether any of them is in float32, `batch_norm` counts the layers that
        take statistics of this rank's samples alone, `synced_norm` those for whose statistics the ranks meet in the forward pass, `cores` are those that
        this host gives the run, `capability` is that of the GPU (None on the CPU), `options` those of the stage (None where they are the run's).
        """
        plan, parameters = self.stage.plan, self.replica.trainable
        return {
            "epochs": plan.epochs,
            "batch_size": plan.batch_size,
            "lr": plan.lr,
            "precision": self.updater.precision,
            "trainable": sum(parameter.numel() for parameter in parameters),
            "float32": any(parameter.dtype is torch.float32 for parameter in parameters),
            "batch_norm": sum(layer.training and not norm.is_synchronized(layer) for layer in self._layers),
            "synced_norm": sum(layer.training and norm.is_synchronized(layer) for layer in self._layers),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cores": len(os.sched_getaffinity(0)),
            "capability": _capability(self._device),
            "options": None if self.stage.spec is None else self.stage.config.to_json(),
        }

    def steps_to_come(self, progress: Progress) -> int | None:
        """Steps that are left of the stage; None where their number is not known."""
        plan, within = self.stage.plan, progress.within_epoch
        left = [] if plan.max_steps is None else [plan.max_steps - progress.stage_step]
        if plan.epochs is not None:
            under_way = self.shares.steps_left(progress.epoch_samples) if within else 0
            left.append((plan.epochs - progress.stage_epochs_done - within) * plan.steps_per_epoch + under_way)
        return min(left, default=None)

    def position(self, progress: Progress) -> dict[str, Any]:
        """Where in the order of the samples a run is, and what sets that order."""
        order = {"seed": self.shares.seed, "n": self.shares.n, "shuffle": self.shares.shuffle, "sampler": self.shares.sampler is not None}
        return {**order, "stage": progress.stage, "epoch": progress.epoch, "step": progress.epoch_step, "samples": progress.epoch_samples}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state(),
            "scaler": self.updater.scaler_state(),
            "precision": self.updater.precision,
        }

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of this very rank."""
        compression = self.replica.compression
        return {"comm_hook": None if compression is None else compression.state()}


def _capability(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10
