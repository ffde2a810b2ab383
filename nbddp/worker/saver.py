"""When checkpoints are written, and what is in them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbddp import checkpoint, rng
from nbddp.version import __version__
from nbddp.worker.replicas import Comparison, digests, named_parameters
from nbddp.worker.writer import Job, Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbddp.worker.context import Context
    from nbddp.worker.staging import Layout, Staging

AT_MOST_EVERY_S = 20.0
BEST_EVERY_WRITES = 100
"""The best checkpoint is written soon where files are small: at most a hundredth of the time goes into writing it."""
AT_LEAST_EVERY_S = 30 * 60.0


@dataclass(frozen=True, slots=True)
class Every:
    """A cadence of the options: `2 epochs`, `500 steps`, `10 min`."""

    count: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> Every:
        count, unit = text.split()
        return cls(int(count), unit.rstrip("s"))

    def at_step(self, step: int) -> bool:
        return self.unit == "step" and step % self.count == 0

    def at_epoch(self, epoch: int) -> bool:
        return self.unit == "epoch" and epoch % self.count == 0


class Saver:
    """Checkpoints of one rank: every rank calls the same methods, rank 0 writes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._folder: Path = context.run_dir.checkpoints
        self._every = Every.parse(context.config.checkpoint_every)
        self._last = self._last_best = time.monotonic()
        # By default every epoch, where they are long; a cadence that is written out is kept.
        self._limited = not {"checkpoint_every", "keep_last"} & context.config.given
        self._first = True
        self._asked = False
        self._held_best: Job | None = None
        ranks = context.ranks
        self._writer: Writer | None = None
        if ranks.rank == 0:
            keep_last, buffers = context.config.keep_last, checkpoint.buffer_names(context.model)
            self._writer = Writer(self._folder, context.events, device=ranks.device, keep_last=keep_last, buffers=buffers)

    def at_step(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after this step."""
        return self._every.at_step(step)

    def at_epoch(self, epoch: int, *, old_enough: bool) -> bool:
        """Whether a checkpoint is due after this epoch; `old_enough` is rank 0's word on the one before."""
        return self._every.at_epoch(epoch) and (old_enough or self._first or not self._limited)

    def due(self) -> bool:
        """By rank 0's clock: the cadence in minutes, and never longer than half an hour without one. Said once until it is written."""
        every = self._every.count * 60.0 if self._every.unit == "min" else AT_LEAST_EVERY_S
        due = not self._asked and time.monotonic() - self._last >= min(every, AT_LEAST_EVERY_S)
        self._asked = self._asked or due
        return due

    def old_enough(self) -> bool:
        return time.monotonic() - self._last >= AT_MOST_EVERY_S

    def write_initial(self) -> None:
        """initial.pt: the weights first bundled for this model, which an earlier run may have written."""
        if self._writer is None:
            return
        earlier = self._context.spec.get("initial")
        target = self._folder / "initial.pt"
        facts = {"epoch": 0, "step": 0, "stage": 0, "value": None}
        if earlier is not None and (source := self._context.run_dir.root / earlier).is_file():
            checkpoint.link(source, target)
            self._writer.announce(target, {**facts, "finite": True})
            return
        staging = self._writer.stage()
        state = checkpoint.model_state(self._context.model, staging.copy)
        staging.end()
        self._writer.put(Job(("initial",), {"model": state, **facts}, staging))

    def adopt_best(self, path: Path) -> None:
        """Let best.pt be a file of the run that this one goes on from, whose weights are still to be surpassed.

        Raises:
            CheckpointError: where the file is gone or incomplete.
        """
        if self._writer is None:
            return
        content, target = checkpoint.read(path), self._folder / "best.pt"
        checkpoint.link(path, target)
        self._writer.announce(target, content)

    def prepare(self, state: dict[str, Any]) -> None:
        """After the first step of a stage: see that its state can be saved, and take hold of the memory for that while training goes on.

        Args:
            state: the part of what `save` is given that holds tensors.

        Raises:
            CheckpointError: names the entry that a checkpoint cannot hold.
        """
        if self._writer is None:
            return
        for name, part in state.items():
            checkpoint.check_plain(part, name)
        layout: list[Layout] = []

        def note(tensor: torch.Tensor, where: str) -> torch.Tensor:
            layout.append((where, torch.empty_like(tensor, device="meta")))
            return tensor

        checkpoint.model_state(self._context.model, note)
        checkpoint.plain(state, "state", note)
        self._writer.provide(layout)

    def save(
        self, state: dict[str, Any], *, value: float | None, best: bool, last: bool, names: tuple[str, ...] = (), own: dict[str, Any] | None = None
    ) -> None:
        """Copy the run's state to the CPU and hand it to the writer. Collective: replicas are compared, every rank's random state is gathered.

        Args:
            state: optimizer, scheduler, precision, position and sums, without model and random states.
            value: the monitored value.
            best: it is the best so far. Where no other file is written as well, best.pt is at most every 20 s (more often where files are small), and at
                the end. Weights that are not finite are never the best.
            last: write last.pt and, with keep_last above 1, a file of this epoch or step.
            names: further files, which stay as long as the run does.
            own: what every rank has of its own; the file holds lists of it, by rank.

        Raises:
            ReplicasDiffer: where the model was not the same bits on all ranks at the checkpoint before this one, which was not written for it.
            CheckpointError: where this state can't be saved, or a file before it could not be written.
        """
        context, ranks, began = self._context, self._context.ranks, time.monotonic()
        ranks.broadcast_buffers(context.model)
        own = {"comm_hook": None, **(own or {})}
        outlines = checkpoint.plain(own, "own", lambda tensor, _: _outline(tensor))
        parameters = named_parameters(context.model) if ranks.world_size > 1 else {}
        if last:
            self._last, self._asked, self._first = time.monotonic(), False, False
        if self._writer is None:
            ranks.gather_objects((rng.capture(ranks.device), outlines, digests(parameters.values(), ranks.device).tolist()))
            checkpoint.plain(own, "own", self._send)
            return
        if best and self._held_best is not None and checkpoint.non_finite(context.model.state_dict(), checkpoint.buffer_names(context.model)) is None:
            self._writer.release(self._held_best.staging)
            self._held_best = None
        staging = self._writer.stage()
        content = {
            "model": checkpoint.model_state(context.model, staging.copy),
            **checkpoint.plain(state, "state", staging.copy),
            "config": context.config.to_json(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "world_size": ranks.world_size,
            "norm": self._context.spec.get("norm") or {},
            "versions": {"nbddp": __version__, "torch": str(torch.__version__)},
            "run": context.run_dir.id,
            "value": value,
        }
        own_digests = self._own_digests(parameters, staging)
        mine: tuple[dict[str, Any], dict[str, Any], list[int]] = (rng.capture(ranks.device), outlines, [])
        gathered = ranks.gather_objects(mine)  # the others made their digests while this rank copied
        by_rank = [checkpoint.plain(own, "own[0]", staging.copy), *(self._receive(one, rank, staging) for rank, (_, one, _) in enumerate(gathered) if rank)]
        content.update({name: [one[name] for one in by_rank] for name in own}, rng=[streams for streams, _, _ in gathered])
        staging.end()
        content["pause_s"] = time.monotonic() - began
        comparison = Comparison(tuple(parameters), own_digests, [theirs for _, _, theirs in gathered[1:]])
        kept = (self._kept_name(state),) if context.config.keep_last > 1 else ()
        files = ("last", *kept, *names) if last else names
        if files:
            self._writer.put(Job((*files, "best") if best else files, content, staging, comparison))
        elif best and self._held_best is None:
            self._held_best = Job(("best",), content, staging, comparison)
            self.release_best()
        else:
            self._writer.release(staging)

    def _own_digests(self, parameters: dict[str, torch.Tensor], staging: Staging) -> Callable[[], list[int]]:
        """Rank 0's digests, for later: of the copies on the CPU; on a GPU its own are made faster, in the order of its stream."""
        device = self._context.ranks.device
        if device.type == "cuda":
            made = staging.copy(digests(parameters.values(), device), "digests")
            return lambda: list(made.tolist())
        copies = [staging.copy_of(parameter) for parameter in parameters.values()]
        return lambda: list(digests(copies, device).tolist())

    def _send(self, tensor: torch.Tensor, _where: str) -> torch.Tensor:
        self._context.ranks.send(tensor)
        return tensor

    def _receive(self, outlines: dict[str, Any], rank: int, staging: Staging) -> dict[str, Any]:
        received: dict[str, Any] = checkpoint.plain(
            outlines, f"own[{rank}]", lambda outline, where: self._context.ranks.receive(staging.buffer(outline, where), rank)
        )
        return received

    @staticmethod
    def _kept_name(state: dict[str, Any]) -> str:
        return f"epoch-{state['epoch']:04d}" if state["epochs_done"] == state["epoch"] else f"step-{state['step']:08d}"

    def release_best(self, *, force: bool = False) -> None:
        """Write the best checkpoint that was held back so as not to write too often. Called often, it also tells soon of what went wrong in the writer.

        Raises:
            ReplicasDiffer, CheckpointError: what kept the writer from writing a checkpoint.
        """
        if self._writer is None:
            return
        self._writer.check()
        if self._held_best is None:
            return
        wait_s = min(AT_MOST_EVERY_S, self._writer.write_s * BEST_EVERY_WRITES)
        if force or (time.monotonic() - self._last_best >= wait_s and self._writer.idle):
            job, self._held_best = self._held_best, None
            self._last_best = time.monotonic()
            self._writer.put(job)

    def close(self) -> None:
        """Write what was held back and wait until everything is on disk.

        Raises:
            CheckpointError: where a file could not be written.
        """
        if self._writer is not None:
            self.release_best(force=True)
            self._writer.close()

    def give_up(self) -> None:
        """After a failure: let what was held back be written, if it is done in a moment."""
        if self._writer is not None:
            self._writer.give_up(self._held_best)


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and dtype of a tensor, without its data; contiguous, as it is received."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
