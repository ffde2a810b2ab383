"""The one place where a model becomes replicated: once per stage, after freezing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbddp import norm
from nbddp.evaluation.errors import StepError
from nbddp.worker.compress import make_compression

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.evaluation.ranks import Ranks
    from nbddp.worker.context import RankStage
    from nbddp.worker.step import StepModule


class Replica:
    """A step module on this rank, kept equal to the others'. `compression` is that of the gradients on the wire, where there is one."""

    def __init__(self, module: StepModule, stage: RankStage, ranks: Ranks) -> None:
        config, self.module = stage.config, module
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._graph_known = not config.static_graph
        self._tolerant = config.find_unused_parameters or config.static_graph
        self._ddp = _ddp(module, config) if ranks.world_size > 1 else None
        self.forward: nn.Module = module if self._ddp is None else self._ddp
        if self._ddp is not None and not self._tolerant:
            self._fix_bucket_order()
        self.compression = make_compression(config.grad_compression, ranks)
        if self._ddp is not None and self.compression is not None:  # not before, or it would remember that pass
            self.compression.register(self._ddp)

    def inner(self) -> contextlib.AbstractContextManager[None]:
        """The context of micro-batches that are not synchronised.

        With a static graph those of the first step are: DDP learns the graph from its first synchronised pass. The sum of means is the mean of sums.
        """
        return self._ddp.no_sync() if self._ddp is not None and self._graph_known else contextlib.nullcontext()

    def _fix_bucket_order(self) -> None:
        """Let DDP settle its buckets before the first step.

        It rebuilds them after the first backward pass, so that at three ranks or more the sums of the first two steps differ in their last bits
        from those of a resumed run, which would start with a first step again. A backward pass that changes nothing brings that forward.
        """
        assert self._ddp is not None
        self._ddp.reducer.prepare_for_backward([])
        embeddings = (module for module in self.module.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
        sparse = {id(module.weight) for module in embeddings if module.sparse}
        total: Any = sum(_touch(parameter, sparse=id(parameter) in sparse).sum().real * 0 for parameter in self.trainable)
        total.backward()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients, also those of parameters that the optimizer does not hold."""
        for parameter in self.trainable:
            parameter.grad = None

    def check_gradients(self) -> None:
        """After a step's backward passes: every parameter has its gradient, else DDP never finished, and the replicas would part.

        Raises:
            StepError: names the parameters and the option.
        """
        self._graph_known = True
        if self._ddp is None or self._tolerant:
            return
        for parameter in self.trainable:
            if parameter.grad is None:
                raise StepError(unused_message([name for name, p in self.module.model.named_parameters() if p.requires_grad and p.grad is None]))

    def explain(self, error: RuntimeError) -> StepError | None:
        """Say DDP's error about unused parameters with the parameters' names; None for other errors."""
        text = str(error)
        if "Expected to have finished reduction in the prior iteration" not in text:
            return None
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        names = [name.removeprefix("model.") for name, p in self.module.named_parameters() if p.requires_grad]
        missing = [names[int(index)] for index in found[1].split() if int(index) < len(names)] if found else []
        return StepError(unused_message(missing))


def _touch(parameter: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    """A value that depends on a parameter, by a gradient of the kind that DDP expects of it."""
    if sparse:
        return nn.functional.embedding(torch.zeros(1, dtype=torch.int64, device=parameter.device), parameter, sparse=True)
    return parameter.reshape(-1)[:1]


def unused_message(missing: list[str]) -> str:
    """What is wrong with a step that leaves parameters out, and what to do."""
    named = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
    return (
        f"the step does not use {named or 'some parameters'}: no gradient arrives there, and the ranks would wait for it. "
        "Use or freeze them, or set --find-unused-parameters (DDP then searches for them in every step)"
    )


def _ddp(module: StepModule, config: TrainConfig) -> DistributedDataParallel:
    # Without device_ids, since batches are on the device already: DDP would take containers apart and rebuild them to look for tensors to move.
    alike = {id(buffer) for layer in module.modules() if norm.is_synchronized(layer) for buffer in layer.buffers()}
    return DistributedDataParallel(
        module,
        broadcast_buffers=any(id(buffer) not in alike for buffer in module.buffers()),  # in every step: not where all ranks compute the same ones
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
    )


def on_gradients_ready(loss: torch.Tensor, mark: Callable[[], None]) -> None:
    """Call `mark` when this rank's own gradients are done, before the wait for the other ranks.

    The callback is queued when the backward pass begins, so it runs before the one with which DDP waits for its all-reduces.
    """
    engine = torch.autograd.Variable._execution_engine  # torch's own DDP and FSDP use it so; there is no public name
    loss.register_hook(lambda _: engine.queue_callback(mark))
