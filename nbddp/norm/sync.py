"""BatchNorm over the samples of all ranks, for ranks on the CPU, which torch's own SyncBatchNorm refuses.

Runs in the ranks, where a process group is there; in a kernel the layer is a BatchNorm. All ranks make the same calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_alone = False
_counted = True


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let layers use the statistics of this process only, and wait for no other rank: for a pass that the others don't make at the same time."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


@contextlib.contextmanager
def counting(samples: int) -> Iterator[None]:
    """Leave a batch that has no `samples` of its own out of the statistics: a rank without samples repeats one, to keep step with the others."""
    global _counted
    before, _counted = _counted, samples > 0
    try:
        yield
    finally:
        _counted = before


class BatchNorm(_BatchNorm):
    """BatchNorm of inputs of shape (N, C) or (N, C, *): what a SyncBatchNorm of unknown dimension turns back into."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            message = f"expected at least 2D input (got {input.dim()}D input)"
            raise ValueError(message)


class SyncBatchNorm(BatchNorm):
    """BatchNorm whose training statistics are those of the batches of all ranks together, on any device that the process group serves.

    Inputs are of shape (N, C) or (N, C, *), N of any size on each rank, also 0. Outputs, gradients and running statistics are those of one process with
    the whole batch. Parameters and buffers are those of `torch.nn.BatchNorm1d` to `3d` and of `torch.nn.SyncBatchNorm`, so that state dicts can be
    exchanged. Without a process group of several ranks, and in eval mode, it is a BatchNorm.

    Raises:
        ValueError: in training, where all ranks together have one value per channel.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        return self._over_ranks(input)

    def _over_ranks(self, input: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() < 2:
            return super().forward(input)
        self._check_input_dim(input)
        output: torch.Tensor
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, _counted, _alone)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None and self.track_running_stats:
            momentum = self.momentum or 0.0
            if self.num_batches_tracked is not None:  # which layers of old files don't have
                self.num_batches_tracked.add_(1)
                momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), momentum)
        return output


def cut_compiled_code() -> None:
    """Let compiled code be cut at these layers, before anything is compiled in a rank: what they exchange can't be traced.

    Not where the class is made, since it imports the compiler, which takes a second.
    """
    SyncBatchNorm._over_ranks = torch.compiler.disable(SyncBatchNorm._over_ranks)  # type: ignore[method-assign]


class _Normalize(torch.autograd.Function):
    """One exchange of statistics in the forward pass, one in the backward pass; both wait for the other ranks.

    Gradients can be differentiated again, as for a gradient penalty; that takes further exchanges.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, counted: bool, alone: bool) -> Any:
        dims = [0, *range(2, x.dim())]
        wide = x if x.dtype is torch.float64 else x.float()
        local = torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)  # mean, sum of squared deviations, count
        if counted and x.numel():
            own_var, own_mean = torch.var_mean(wide, dims, correction=0)
            count = x.numel() // x.shape[1]
            local = torch.cat([own_mean.double(), own_var.double() * count, local.new_tensor([count])])
        everyone = local.unsqueeze(0) if alone else _gathered(local)
        means, squares, counts = everyone.split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        if float(total) <= 1 and not alone:
            message = f"Expected more than 1 value per channel when training, got {int(total)} over all ranks, input size {tuple(x.shape)} on this one"
            raise ValueError(message)
        mean = (means * counts).sum(0) / total
        var = (squares + counts * (means - mean).square()).sum(0) / total
        shape = [1, -1, *[1] * (x.dim() - 2)]
        invstd = (var + eps).rsqrt()
        normalized = (wide - mean.to(wide.dtype).view(shape)) * invstd.to(wide.dtype).view(shape)
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.dims, ctx.shape, ctx.eps, ctx.counted, ctx.alone, ctx.has_bias = dims, shape, eps, counted, alone, bias is not None
        output = normalized if weight is None else normalized * weight.to(wide.dtype).view(shape)
        output = output if bias is None else output + bias.to(wide.dtype).view(shape)
        ctx.mark_non_differentiable(mean, var, total)
        return output.to(x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, invstd, total = ctx.saved_tensors
        inputs, wide = (tensor if x.dtype is torch.float64 else tensor.float() for tensor in (x, grad))
        if torch.is_grad_enabled() and ctx.needs_input_grad[0]:
            mean, invstd = _with_history(ctx, inputs, total)
        normalized = (inputs - mean.to(inputs.dtype).view(ctx.shape)) * invstd.to(inputs.dtype).view(ctx.shape)
        sums = torch.stack([wide.sum(ctx.dims), (wide * normalized).sum(ctx.dims)])
        grad_weight = sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = sums[0].to(weight.dtype if weight is not None else grad.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            # The other ranks wait in theirs: an input that needs no gradient needs none on any rank.
            return None, grad_weight, grad_bias, None, None, None
        over_ranks = sums.double() if ctx.alone else _Sum.apply(sums.double())  # type: ignore[no-untyped-call]
        scale = invstd if weight is None else invstd * weight.double()
        if ctx.counted or torch.is_grad_enabled():  # a part of the history on every rank, since the others wait for it
            mean_grad, mean_product = (over_ranks / total * ctx.counted).to(wide.dtype)
            wide = wide - mean_grad.view(ctx.shape) - normalized * mean_product.view(ctx.shape)
        return (wide * scale.to(wide.dtype).view(ctx.shape)).to(grad.dtype), grad_weight, grad_bias, None, None, None


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """Those of all ranks, stacked; waits for them. For small tensors gloo is several times slower to reduce than to gather, and this sums in one order."""
    everyone = own.new_empty(dist.get_world_size(), *own.shape)
    dist.all_gather(list(everyone.unbind()), own.contiguous())
    return everyone


class _Sum(torch.autograd.Function):
    """The sum over ranks, to any order of differentiation."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _gathered(x).sum(0)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        return _Sum.apply(grad)  # type: ignore[no-untyped-call]


def _with_history(ctx: Any, inputs: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation once more, as functions of the inputs of all ranks."""

    def averaged(values: torch.Tensor) -> torch.Tensor:
        own = (values if ctx.counted else values[:0]).sum(ctx.dims).double()  # of nothing, and a part of the history all the same: the others wait for it
        return (own if ctx.alone else _Sum.apply(own)) / total  # type: ignore[no-untyped-call]

    mean = averaged(inputs)
    var = averaged((inputs - mean.to(inputs.dtype).view(ctx.shape)).square())
    return mean, (var + ctx.eps).rsqrt()


def sync_type(device: torch.device) -> type[_BatchNorm]:
    """The class of synchronised BatchNorm for a device: torch's own on GPUs."""
    return nn.SyncBatchNorm if device.type == "cuda" else SyncBatchNorm
