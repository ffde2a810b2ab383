"""Memory on the CPU that a run's state is copied into for a checkpoint. Runs on rank 0, filled by the thread that trains, read by the one that writes.

The memory is kept from one checkpoint to the next: fresh memory costs several times what the copy does, since the system hands it out page by page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

Layout = tuple[str, torch.Tensor]
"""The name of a tensor in a snapshot, and a tensor of its shape, strides and dtype."""
_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Staging:
    """One snapshot's tensors, by the names that they have in it. Costs as much memory as these; pinned on GPU ranks, where torch rounds sizes up.

    A GPU's tensors are copied on its current stream, after the step that wrote them and before the next, which the host does not wait for: `wait` does,
    in the thread that reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, tuple[_Kind, torch.Tensor]] = {}
        self._used: set[str] = set()
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Begin a snapshot; what the one before it held may be overwritten."""
        self._used.clear()
        self._copies.clear()

    def copy(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """A copy of a tensor, in the memory kept for its name."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.detach().to("cpu", copy=True)
        buffer = self._copies[_place(tensor)] = self.buffer(tensor, where)
        return buffer.copy_(tensor.detach(), non_blocking=tensor.device == self._device and buffer.is_pinned())

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of this very tensor in the snapshot, else one that is made now."""
        found = self._copies.get(_place(tensor))
        return tensor.to("cpu", copy=True) if found is None else found

    def buffer(self, like: torch.Tensor, where: str) -> torch.Tensor:
        """Memory for a tensor of this shape and dtype, whose content is undefined."""
        if where in self._used:  # several tensors go by one name, such as those that are keys of a dict
            return _allocate(like, pinned=False)
        self._used.add(where)
        kind = like.shape, like.stride(), like.dtype
        kept = self._kept.get(where)
        if kept is None or kept[0] != kind:
            self._kept.pop(where, None)  # before there is more
            kept = self._kept[where] = kind, _allocate(like, pinned=self._device.type == "cuda")
        return kept[1]

    def end(self) -> None:
        """End a snapshot: memory of names that were not in it is given back."""
        self._kept = {where: kept for where, kept in self._kept.items() if where in self._used}
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the snapshot is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def provide(self, layout: Iterable[Layout]) -> None:
        """Take hold of the memory of a snapshot to come, described by tensors without data; of what is kept already, nothing changes."""
        self.begin()
        for where, like in layout:
            if where not in self._kept:
                _touch(self.buffer(like, where))


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _allocate(like: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """Uninitialised memory; where the system refuses to pin as much, pageable memory, from which copies are slower."""
    if pinned:
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError:
            pass
    return torch.empty_like(like, device="cpu", requires_grad=False)


def _touch(buffer: torch.Tensor) -> None:
    """Let the system hand the memory out now. Through torch, which does not hold Python's lock while it writes."""
    if not buffer.is_pinned():
        torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()).zero_()
