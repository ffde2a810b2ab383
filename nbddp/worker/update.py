"""One optimizer step of one rank: forward and backward passes, weighting, clipping, the update, and the times of it all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbddp.data import Micro
from nbddp.precision import autocast_context
from nbddp.worker.clock import DATA, FORWARD, OPTIMIZER, make_clock
from nbddp.worker.errors import StepError
from nbddp.worker.optim import needs_closure
from nbddp.worker.step import Signature, read_result
from nbddp.worker.wrap import Replica, on_gradients_ready

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nbddp.worker.clock import StepTimes
    from nbddp.worker.context import Context

Batched = tuple[Any, Micro]


@dataclass(slots=True)
class Updated:
    """What a step did: sums of loss x weight, weight and scalars x weight of this rank; whether the update was applied."""

    sums: list[torch.Tensor | float]
    times: StepTimes
    samples: int
    applied: bool


class Updater:
    """Takes steps with one replica and one optimizer; made anew in each stage.

    Each rank's mean loss is weighted by n_local x N / n_global, so that DDP's mean over ranks is the mean over all samples, however unevenly they
    are dealt. Where a step returns its own `weight`, the sum of weights over ranks is only known after the forward passes: it is reduced while
    the backward pass runs, and the gradients are divided by it afterwards.
    """

    def __init__(self, context: Context, replica: Replica, optimizer: Optimizer) -> None:
        config, self._ranks = context.config, context.ranks
        self._context, self._replica, self._optimizer = context, replica, optimizer
        self._accumulate, self._clip_norm = config.accumulate, config.clip_norm
        self._guard = config.on_nan in ("skip", "stop")
        self._closure = needs_closure(optimizer)
        if self._closure and self._guard:
            message = f"on_nan={config.on_nan} can't undo a step of {type(optimizer).__name__}, which evaluates the model itself: --on-nan warn"
            raise StepError(message)
        self._clock = make_clock(context.ranks.device)
        self.signature = Signature(context.hooks.training_name)
        self._first = True

    def step(self, batches: Iterator[Batched]) -> Updated:
        """Take one step with the next micro-batches."""
        self._clock.start()
        if self._closure:
            return self._step_with_closure([next(batches) for _ in range(self._accumulate)])
        updated = self._gradients(next(batches) for _ in range(self._accumulate))
        updated.applied = self._clip()
        if updated.applied:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._clock.lap(OPTIMIZER)
        updated.times = self._clock.stop()
        return updated

    def _step_with_closure(self, held: list[Batched]) -> Updated:
        """For optimizers such as LBFGS that evaluate the loss themselves: with the reduced loss, so that all ranks search the same line."""
        first: list[Updated] = []

        def closure() -> torch.Tensor:
            self._optimizer.zero_grad()
            updated = self._gradients(iter(held))
            first.append(updated) if not first else None
            self._clip()
            total = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._ranks.device) for value in updated.sums[:2]])
            if self._ranks.world_size > 1:
                dist.all_reduce(total)
            self._clock.lap(OPTIMIZER)
            return total[0] / total[1]

        self._optimizer.step(closure)  # type: ignore[arg-type] - the optimizer's own signature asks for it
        self._optimizer.zero_grad()
        self._clock.lap(OPTIMIZER)
        first[0].times = self._clock.stop()
        return first[0]

    def _gradients(self, batches: Iterator[Batched]) -> Updated:
        """Forward and backward passes of all micro-batches; afterwards the gradients are those of the whole step on every rank."""
        clock, n = self._clock, self._ranks.world_size
        updated = Updated([0.0, 0.0], None, 0, applied=True)  # type: ignore[arg-type] - the times follow when the step is over
        own_weights: torch.Tensor | None = None
        for number in range(self._accumulate):
            batch, share = next(batches)
            clock.lap(DATA)
            last = number == self._accumulate - 1
            with _when(self._replica.inner, not last):
                try:
                    with autocast_context(self._context.plan.precision, self._ranks.device):
                        returned = self._replica.forward(batch)
                except RuntimeError as error:
                    if (explained := self._replica.explain(error)) is not None:
                        raise explained from None
                    raise
                result = read_result(returned, self._context.hooks.training_name, training=True)
                del returned
                if self.signature.check(result):
                    self._agree()
                clock.lap(FORWARD)
                if result.weight is None:
                    weight: Any = share.weight
                    scale: Any = share.weight * n / share.n_global
                else:
                    weight = scale = torch.as_tensor(result.weight, dtype=torch.float64, device=self._ranks.device) * bool(share.weight)
                    own_weights = weight if own_weights is None else own_weights + weight
                reduced = self._reduce_weights(own_weights) if last and own_weights is not None else None
                self._backward(result.loss, scale, sync=last)
            updated.samples = share.n_global
            _add(updated.sums, [_number(value) * weight for value in (result.loss, 1.0, *result.scalars.values())])
            self._context.position.ticks += 1
        if reduced is not None:
            self._divide(*reduced)
        if self._first:
            self._first = False
            self._replica.check_gradients()
        clock.lap(OPTIMIZER)
        return updated

    def _backward(self, loss: torch.Tensor, scale: Any, *, sync: bool) -> None:  # noqa: ANN401 - float or tensor
        clock = self._clock
        if self._guard:  # a loss that is not finite makes every gradient so, on all ranks, also where its own gradient is finite
            scale = loss.detach() * 0 + scale
        scaled = loss if isinstance(scale, float) and scale == 1.0 else loss * scale
        if sync and self._ranks.world_size > 1:
            on_gradients_ready(scaled, clock.gradients_ready)
        scaled.backward()  # type: ignore[no-untyped-call]
        clock.lap_backward()

    def _agree(self) -> None:
        """After the first forward pass: all ranks return the same names."""
        self.signature.agree(self._ranks.gather_objects(self.signature.describe()))

    def _reduce_weights(self, own: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Begin to sum the steps' own weights over ranks, before the backward pass, so that it is done when that is."""
        total = own.clone()
        return total, dist.all_reduce(total, async_op=True) if self._ranks.world_size > 1 else None

    def _divide(self, total: torch.Tensor, work: dist.Work | None) -> None:
        """From DDP's mean over ranks of summed gradients to the mean over all weights."""
        if work is not None:
            work.wait()
        factor = self._ranks.world_size / total.clamp(min=torch.finfo(torch.float64).tiny)
        for parameter in self._replica.trainable:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype) if not parameter.grad.is_complex() else factor)

    def _clip(self) -> bool:
        """Clip the gradients; return False where they are not finite and the options say not to step then.

        After DDP's reduction the gradients are the same on all ranks, so every rank decides the same.
        """
        if self._clip_norm is None and not self._guard:
            return True
        gradients = [p.grad for p in self._replica.trainable if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._guard and not math.isfinite(float(norm)):
            return False
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._replica.trainable, self._clip_norm, norm)
        return True


def _when(context: Callable[[], Any], condition: bool) -> Any:  # noqa: ANN401, FBT001 - a context manager
    return context() if condition else _NOTHING


class _Nothing:
    """A context that costs nothing per step."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


def _number(value: torch.Tensor | float) -> Any:  # noqa: ANN401 - a float, or a float64 tensor on a GPU, which must not be waited for
    if not isinstance(value, torch.Tensor):
        return value
    return float(value.detach()) if value.device.type == "cpu" else value.detach().double()


def _add(sums: list[torch.Tensor | float], values: list[torch.Tensor | float]) -> None:
    sums.extend([0.0] * (len(values) - len(sums)))
    for index, value in enumerate(values):
        sums[index] = sums[index] + value
