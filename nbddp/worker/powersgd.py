"""PowerSGD: the gradient of a matrix travels as two thin factors (Vogels, Karimireddy, Jaggi, https://arxiv.org/abs/1905.13727).

Runs in the ranks, as a communication hook of DDP. Each gradient matrix M, with what earlier steps left out of it added, is sent as P = Q M' and, after the rows
of P are made orthonormal, Q = P M, both averaged over ranks; M becomes P' Q, and the rest is kept for the next step. What is kept belongs to a parameter, not
to a bucket of DDP, so that other buckets do no harm. Factors are RANK long rows: matrix products of a CPU are several times faster with these.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

RANK = 4
"""Rows of the factors."""
SAVING = 2
"""A gradient whose factors are not smaller by this travels whole, as vectors do."""
_BLOCK = 1 << 18
"""Elements that a CPU works on at a time, to have them in its caches."""


@dataclass(slots=True)
class _Memory:
    """Of one parameter: the factor that the next step starts from, the same on every rank, and what this rank's gradients left out."""

    q: torch.Tensor
    error: torch.Tensor


@dataclass(slots=True)
class _Matrix:
    """One gradient on its way: as DDP holds it; as a matrix with the error added; its first factor, of shape (RANK, rows)."""

    gradient: torch.Tensor
    matrix: torch.Tensor
    memory: _Memory
    p: torch.Tensor


@dataclass(slots=True)
class _Bucket:
    """One bucket on its way. On `wire` are the gradients that travel whole and the first factors, later the second factors."""

    buffer: torch.Tensor
    done: Future[torch.Tensor]
    wire: torch.Tensor
    work: dist.Work
    whole: list[torch.Tensor]
    matrices: list[_Matrix]
    finite: torch.Tensor


class PowerSGD:
    """Compresses the gradients of matrices; those of vectors, sparse and complex ones travel as they are.

    The sums of all buckets are asked for in one order on every rank. That is why the second factors wait until the backward pass has asked for the first ones
    of every bucket: asked for as soon as a sum arrives, which is how torch's own hook does it, their order would depend on timing.

    What a step leaves out is kept in that step's scale: where fp16's loss scale changes, the next step counts it by as much too high or too low, once.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._names: dict[int, str] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._memories: dict[str, _Memory] = {}
        self._saved: dict[str, Any] = {}
        self._sent: list[_Bucket] = []
        self._at_once = False

    def register(self, ddp: DistributedDataParallel) -> None:
        for name, parameter in ddp.module.named_parameters():
            self._names[id(parameter)] = plain = name.replace("_orig_mod.", "")
            self._shapes[plain] = _shape(parameter)
        self._at_once = ddp.static_graph
        ddp.register_comm_hook(self, lambda compression, bucket: compression.send(bucket))

    def state(self) -> dict[str, Any]:
        """By parameter: `q` (RANK, columns) and `error` (rows, columns)."""
        return {"matrices": {**self._saved, **{name: {"q": memory.q, "error": memory.error} for name, memory in self._memories.items()}}}

    def load(self, state: dict[str, Any] | None) -> None:
        """Each parameter's memory is taken over when it next sends a gradient.

        Raises:
            CheckpointError: where `state` is of another compression, or of parameters that this model does not have.
        """
        saved = {} if state is None else state.get("matrices")
        misfits = ["it is not PowerSGD's"] if not isinstance(saved, dict) else [text for name in saved if (text := self._misfit(name, saved[name]))]
        if misfits:
            message = f"the checkpoint's memory of compressed gradients does not fit: {'; '.join(misfits[:4])}"
            raise CheckpointError(message)
        self._saved, self._memories = dict(saved or {}), {}

    def _misfit(self, name: str, saved: dict[str, torch.Tensor]) -> str | None:
        if name not in self._shapes:
            return f"the model has no parameter {name.removeprefix('model.')}"
        own, found = self._shapes[name], tuple(saved["error"].shape)
        return None if found == own else f"{name.removeprefix('model.')} is a matrix of {own} in the model and {found} in the file"

    def send(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Ask for the sums of what travels whole and of the first factors; have the rest done when the backward pass is through."""
        buffer = bucket.buffer()
        done: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        whole: list[torch.Tensor] = []
        matrices: list[_Matrix] = []
        parameters = bucket.parameters()
        if not buffer.is_sparse and not parameters[0].is_complex():  # complex ones are in the buffer as pairs, of which bucket.gradients() are copies
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                if _worthwhile(*_shape(gradient)):
                    matrices.append(self._matrix(self._names[id(parameter)], gradient))
                else:
                    whole.append(gradient)
        wire = buffer if not matrices else _flat([*whole, *(matrix.p for matrix in matrices)], matrices[0].p.dtype)
        wire.div_(self.world_size)
        self._sent.append(_Bucket(buffer, done, wire, dist.all_reduce(wire, async_op=True), whole, matrices, wire))
        if bucket.is_last() and self._at_once:
            # With a static graph DDP sends, and waits for, the buckets of the first pass when that is over.
            self._at_once = False
            self._finish()
        elif bucket.is_last():
            # Runs after the callback that tells the clock that this rank's own gradients are ready, and before the one in which DDP waits for the buckets.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return done

    def _matrix(self, name: str, gradient: torch.Tensor) -> _Matrix:
        matrix = gradient.view(len(gradient), -1)  # a part of the buffer: of images in channels-last order, columns are in that order
        if matrix.dtype.itemsize < 4:
            matrix = matrix.float()  # there is no QR in 16 bits
        if name not in self._memories:
            self._memories[name] = self._remembered(name, matrix)
        memory = self._memories[name]
        matrix.add_(memory.error)
        return _Matrix(gradient, matrix, memory, memory.q @ matrix.T)

    def _remembered(self, name: str, matrix: torch.Tensor) -> _Memory:
        if (saved := self._saved.pop(name, None)) is not None:
            q, error = (saved[key].to(device=matrix.device, dtype=matrix.dtype, copy=True) for key in ("q", "error"))
            return _Memory(q, error)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on every rank, without a draw from the ranks' own streams
        q = torch.randn(min(*matrix.shape, RANK), matrix.shape[1], generator=generator, dtype=matrix.dtype)
        return _Memory(q.to(matrix.device), torch.zeros_like(matrix))

    @torch.no_grad()
    def _finish(self) -> None:
        """The second factors of all buckets, and the gradients that come of them."""
        sent, self._sent = self._sent, []
        for bucket in sent:
            bucket.work.wait()
            if bucket.matrices:
                self._send_second(bucket)
        for bucket in sent:
            if bucket.matrices:
                bucket.work.wait()
                _write(bucket)
            bucket.done.set_result(bucket.buffer)

    def _send_second(self, bucket: _Bucket) -> None:
        """Take in what was summed first; ask for the sums of the second factors."""
        bucket.finite = torch.isfinite(bucket.wire).all()
        parts = iter(bucket.wire.split([part.numel() for part in [*bucket.whole, *(matrix.p for matrix in bucket.matrices)]]))
        for gradient in bucket.whole:
            gradient.copy_(next(parts).view(gradient.shape))
        for matrix in bucket.matrices:
            p = torch.where(bucket.finite, next(parts).view_as(matrix.p), 0.0)
            matrix.p = torch.linalg.qr(p.T).Q.T  # orthonormal also where p is 0
        bucket.wire = _flat([matrix.p @ matrix.matrix for matrix in bucket.matrices], bucket.wire.dtype).div_(self.world_size)
        work = dist.all_reduce(bucket.wire, async_op=True)
        assert work is not None
        bucket.work = work


def _write(bucket: _Bucket) -> None:
    """Gradients and memory from the factors. What is not finite, on any rank, makes every gradient so and leaves the memory as it was."""
    finite = bucket.finite & torch.isfinite(bucket.wire).all()
    parts = iter(bucket.wire.split([matrix.memory.q.numel() for matrix in bucket.matrices]))
    for matrix in bucket.matrices:
        memory, q = matrix.memory, next(parts).view_as(matrix.memory.q)
        memory.q.copy_(torch.where(finite, q, memory.q))
        rows, columns = matrix.matrix.shape
        block = rows if finite.is_cuda else max(1, _BLOCK // columns)
        for whole, error, p in zip(matrix.matrix.split(block), memory.error.split(block), matrix.p.split(block, dim=1), strict=True):
            low = p.T @ q
            if finite.is_cuda:  # without a look at what it holds, for which the host would wait
                error.copy_(torch.where(finite, whole - low, error))
                whole.copy_(torch.where(finite, low, torch.nan))
            elif finite:
                torch.sub(whole, low, out=error)
                whole.copy_(low)
            else:
                whole.fill_(torch.nan)
        if matrix.gradient.dtype != matrix.matrix.dtype:
            matrix.gradient.copy_(matrix.matrix.view(matrix.gradient.shape))


def _flat(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def _shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix; a vector is one column."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // rows if rows else 0


def _worthwhile(rows: int, columns: int) -> bool:
    return (rows + columns) * min(rows, columns, RANK) * SAVING < rows * columns
