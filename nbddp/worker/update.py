"""One optimizer step of one rank: forward and backward passes, weighting, the update, and the times of it all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbddp import norm
from nbddp.data import Epoch, Micro
from nbddp.evaluation.errors import StepError
from nbddp.evaluation.step import Signature, StepResult
from nbddp.precision import autocast_context
from nbddp.worker.clock import DATA, FORWARD, NO_TIMES, OPTIMIZER, StepTimes, make_clock
from nbddp.worker.guard import Guard
from nbddp.worker.optim import needs_closure
from nbddp.worker.scaler import LossScaler
from nbddp.worker.wrap import Replica, on_gradients_ready

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nbddp.worker.context import Context, RankStage

CALLED_BACKWARD = "the step called backward() itself, and its gradients would count twice: return the loss, the loop calls backward()"

Batched = tuple[Any, Micro]


@dataclass(slots=True)
class Updated:
    """What a step did: sums of loss x weight, weight and scalars x weight of this rank; samples over all ranks, and of this one; what became of the update.

    `applied` says that the optimizer stepped; `overflow` that the loss scaler left the step out and found a smaller scale, which is nothing to warn of;
    `stop` that the run ends with this step, by `on_nan`. All three are the same on every rank.
    """

    sums: list[torch.Tensor | float] = field(default_factory=lambda: [0.0, 0.0])
    samples: int = 0
    own_samples: int = 0
    applied: bool = True
    overflow: bool = False
    stop: bool = False
    times: StepTimes = NO_TIMES
    own_weights: torch.Tensor | None = None


def precision_in_effect(stage: RankStage, optimizer: Optimizer) -> str:
    """That of the stage; fp16 with an optimizer that needs a closure is bf16."""
    return "bf16" if stage.plan.precision == "fp16" and needs_closure(optimizer) else stage.plan.precision


class Updater:
    """Takes steps with one replica and one optimizer; made anew in each stage.

    Each rank's mean loss is weighted by n_local x N / n_global, so that DDP's mean over ranks is the mean over all samples, however unevenly they
    are dealt. Where a step returns its own `weight`, the sum of weights over ranks is only known after the forward passes: it is reduced while
    the backward pass runs, and the gradients are divided by it afterwards. What has weight 0 contributes nothing, also where the loss is nan
    (as that of `nn.CrossEntropyLoss` is where every target is ignored); its gradient has to be finite.
    """

    def __init__(self, context: Context, stage: RankStage, replica: Replica, optimizer: Optimizer) -> None:
        config, self._ranks = stage.config, context.ranks
        self._replica, self._optimizer = replica, optimizer
        self._position, self._accumulate = context.position, config.accumulate
        self._closure = needs_closure(optimizer)
        self.precision = precision_in_effect(stage, optimizer)
        if self.precision != stage.plan.precision:
            why = f"{type(optimizer).__name__} calls the step itself and compares the losses, which can't be scaled then"
            context.message(f"precision={stage.plan.precision} runs as {self.precision}: {why}", level="warning")
        self._scaler = LossScaler(context.model.named_parameters(), self._ranks.device) if self.precision == "fp16" else None
        self._guard = Guard(config, context.model, replica.trainable, self._ranks, self._scaler)
        if self._closure and self._guard.refuses:
            message = f"on_nan={config.on_nan} can't undo a step of {type(optimizer).__name__}, which evaluates the model itself: --on-nan warn"
            raise StepError(message)
        self._clock = make_clock(context.ranks.device)
        self._graphs = config.compile and self._ranks.device.type == "cuda"
        self.signature = Signature(context.hooks.training_name)

    def step(self, batches: Iterator[Batched]) -> Updated:
        """Take one step with the next micro-batches."""
        self._clock.start()
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step left in the memory of CUDA graphs is not needed any more
        if self._closure:
            updated = self._step_with_closure([next(batches) for _ in range(self._accumulate)])
        else:
            self._guard.begin()
            updated = self._gradients(batches)
            verdict = self._guard.judge(updated.sums[0])
            updated.applied, updated.overflow, updated.stop = verdict.applied, verdict.overflow, verdict.stop
            if updated.applied:
                self._optimizer.step()
        self._replica.zero_grad()
        self._clock.lap(OPTIMIZER)
        updated.times = self._clock.stop()
        return updated

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaler, for a checkpoint; None where there is none."""
        return None if self._scaler is None else self._scaler.state()

    def load_scaler(self, state: dict[str, Any] | None) -> None:
        """Go on with the loss scale of a checkpoint; where it has none, or nothing is scaled here, the scale begins anew."""
        if self._scaler is not None and state is not None:
            self._scaler.load(state)

    def _step_with_closure(self, held: list[Batched]) -> Updated:
        """For optimizers such as LBFGS that evaluate the loss themselves: with the reduced loss, so that all ranks search the same line."""
        first: list[Updated] = []

        def closure() -> torch.Tensor:
            self._replica.zero_grad()
            updated = self._gradients(iter(held))
            if not first:
                first.append(updated)
            self._guard.judge()
            total = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._ranks.device) for value in updated.sums[:2]])
            if self._ranks.world_size > 1:
                dist.all_reduce(total)
            self._clock.lap(OPTIMIZER)
            return total[0] / total[1]

        self._optimizer.step(closure)  # type: ignore[arg-type]  # the signature says float, and LBFGS makes one of it
        return first[0]

    def _gradients(self, batches: Iterator[Batched]) -> Updated:
        """Forward and backward passes of all micro-batches; afterwards the gradients are those of the whole step on every rank."""
        updated, reduced = Updated(), None
        for number in range(self._accumulate):
            self._position.phase = "data"
            batch, share = next(batches)
            self._clock.lap(DATA)
            with norm.counting(share.weight):  # in the backward pass too, where checkpointed parts of a model go forward again
                if number < self._accumulate - 1:
                    with self._replica.inner():
                        self._backward(*self._weighed(self._forward(batch, first=number == 0), share, updated))
                else:
                    loss, scale = self._weighed(self._forward(batch, first=number == 0), share, updated)
                    reduced = None if updated.own_weights is None else self._reduce_weights(updated.own_weights)
                    if self._ranks.world_size > 1:
                        self._synchronised(loss, scale, batches)
                    else:
                        self._backward(loss, scale)
                    del loss
            del batch  # else it would lie in memory while the next one is made
            self._position.ticks += 1
        if reduced is not None:
            self._divide(*reduced)
        self._replica.check_gradients()
        self._position.phase = "optimizer"
        self._clock.lap(OPTIMIZER)
        return updated

    def _forward(self, batch: Any, *, first: bool) -> StepResult:
        self._position.phase = "forward"
        try:
            with autocast_context(self.precision, self._ranks.device):
                loss = self._replica.forward(batch)
        except RuntimeError as error:
            if (explained := self._replica.explain(error)) is not None:
                raise explained from None
            raise
        if first and any(parameter.grad is not None for parameter in self._replica.trainable):
            raise StepError(CALLED_BACKWARD)
        result = self._replica.module.results.pop()
        result.loss = loss
        if self.signature.check(result):
            self._position.phase = "sync"
            self.signature.agree(self._ranks.gather_objects(self.signature.describe()))
            self.signature.order(result)
        self._clock.lap(FORWARD)
        return result

    def _weighed(self, result: StepResult, share: Micro, updated: Updated) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Add to the sums; return the loss and the factor that makes DDP's mean over ranks that over samples (or, with own weights, a sum)."""
        loss, updated.samples = result.loss, share.n_global
        updated.own_samples += share.weight
        weight: torch.Tensor | float
        scale: torch.Tensor | float
        if result.weight is None:
            weight, scale = float(share.weight), share.weight * self._ranks.world_size / share.n_global
            if not share.weight:
                loss = loss.nan_to_num(0.0, 0.0, 0.0)
        else:
            own = torch.as_tensor(result.weight if share.weight else 0.0, dtype=torch.float64, device=self._ranks.device)
            updated.own_weights = own if updated.own_weights is None else updated.own_weights + own
            loss = torch.where(own != 0, loss, torch.zeros_like(loss))
            weight, scale = float(own) if own.device.type == "cpu" else own, own
        for index, value in enumerate((loss, 1.0, *result.scalars.values())):
            term = _times(value, weight)
            if index < len(updated.sums):
                updated.sums[index] = updated.sums[index] + term
            else:
                updated.sums.append(term)
        return loss, scale

    def _backward(self, loss: torch.Tensor, scale: torch.Tensor | float) -> None:
        self._position.phase = "backward"
        self._scaled(loss, scale).backward()
        self._clock.lap_backward()

    def _synchronised(self, loss: torch.Tensor, scale: torch.Tensor | float, batches: Iterator[Batched]) -> None:
        """The backward pass in which DDP reduces the gradients; while it waits for that, the next batch is made where it can be."""

        def ready() -> None:
            self._clock.gradients_ready()
            self._position.phase = "sync"
            if isinstance(batches, Epoch) and batches.fetch_ahead():
                self._clock.lap_ahead()

        self._position.phase = "backward"
        scaled = self._scaled(loss, scale)
        on_gradients_ready(scaled, ready)
        scaled.backward()
        self._clock.lap_backward()

    def _scaled(self, loss: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        if self._guard.refuses:  # a loss that is not finite makes every gradient so, on all ranks, also where its own gradient is finite
            scale = loss.detach() * 0 + scale
        scaled = loss if isinstance(scale, float) and scale == 1.0 else loss * scale
        return scaled if self._scaler is None else self._scaler.scaled(scaled)

    def _reduce_weights(self, own: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Begin to sum the step's own weights over ranks, before the backward pass, so that it is done when that is."""
        total = own.clone()
        return total, dist.all_reduce(total, async_op=True) if self._ranks.world_size > 1 else None

    def _divide(self, total: torch.Tensor, work: dist.Work | None) -> None:
        """From DDP's mean over ranks of summed gradients to the mean over all weights; where these are 0, nothing counts and the gradient is 0."""
        if work is not None:
            work.wait()
        factor = torch.where(total > 0, self._ranks.world_size / total, torch.zeros_like(total))
        for parameter in self._replica.trainable:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.real.dtype))


def _times(value: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Value x weight, and 0 where the weight is. A float, or on a GPU a float64 tensor, which must not be waited for."""
    if isinstance(value, torch.Tensor):
        value = float(value.detach()) if value.device.type == "cpu" else value.detach().double()
    if isinstance(weight, torch.Tensor):
        return torch.where(weight != 0, torch.as_tensor(value * weight), torch.zeros_like(weight))
    return value * weight if weight else 0.0
