"""The loop of nbddp on ranks of its own, in which the telemetry's tick does its work in every other block of steps, and nothing in the others.

`torchrun aggregation.py RESULT BLOCKS`; rank 0 writes JSON to RESULT: seconds per step of each pair of blocks, with and without, and what the tick itself took.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.workload import LR, make_data, make_model
from nbddp.config import TrainConfig
from nbddp.events import EventWriter
from nbddp.planning import Machine, make_plan
from nbddp.rundir import RunDir
from nbddp.worker.context import Context, Hooks
from nbddp.worker.group import Ranks
from nbddp.worker.loop import train
from nbddp.worker.position import Position
from nbddp.worker.telemetry import StepRecord, Telemetry

BATCH = 640
"""Steps of about 5 ms on two cores."""
BLOCK, SETTLING = 300, 30
"""Steps of a block, and how many at its beginning are not timed."""


class SwitchedTelemetry(Telemetry):
    """Does nothing in the blocks of odd number, and goes on after them as if they had not been."""

    blocks: list[float] = []  # noqa: RUF012 - of the one object that there is
    ticks: list[tuple[float, float]] = []  # noqa: RUF012 - the same
    calls = 0
    began = 0.0

    def tick(self, record: StepRecord | None = None) -> None:
        """Count a step, or do nothing."""
        block, step = divmod(self.calls, BLOCK)
        type(self).calls += 1
        if step == 0 and block % 2 == 1:
            self.flush()  # the pace stays what it had become
        if step == SETTLING:
            type(self).began = time.perf_counter()
        if block % 2 == 0:
            before, cpu = time.perf_counter(), time.thread_time()
            super().tick(record)
            if step >= SETTLING:
                self.ticks.append((time.perf_counter() - before, time.thread_time() - cpu))
        if step == BLOCK - 1:
            self.blocks.append((time.perf_counter() - self.began) / (BLOCK - 1 - SETTLING))


def main(result: Path, blocks: int, folder: Path) -> None:
    """Train on this rank."""
    import nbddp.worker.loop as loop

    loop.Telemetry = SwitchedTelemetry  # type: ignore[misc] # the one change to the loop
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = RunDir(folder)
    run.logs.mkdir(exist_ok=True)
    for path in (run.events, run.checkpoints):
        path.mkdir(exist_ok=True)
    config = TrainConfig(nproc=world_size, devices="cpu", batch_size=BATCH, max_steps=blocks * BLOCK, lr=LR)
    data = make_data()
    context = Context(
        run_dir=run,
        spec={},
        config=config,
        plan=make_plan(config, n_train=len(data), n_val=0, machine=Machine((), 2)),
        ranks=Ranks(rank, world_size, rank, torch.device("cpu"), "gloo", dist.new_group(backend="gloo")),
        events=EventWriter(run.rank_events(rank, 0), run=run.id, rank=rank),
        position=Position(),
        hooks=Hooks.of({"loss": nn.CrossEntropyLoss()}),
        model=make_model(),
        train_data=data,
        val_data=None,
    )
    train(context)
    if rank == 0:
        pairs = list(zip(SwitchedTelemetry.blocks[::2], SwitchedTelemetry.blocks[1::2], strict=False))
        wall, cpu = (statistics.fmean(tick[index] for tick in SwitchedTelemetry.ticks) for index in (0, 1))
        result.write_text(json.dumps({"pairs": pairs, "tick_s": wall, "tick_cpu_s": cpu}))
    dist.barrier()  # a rank that closes its connections while the other uses them aborts it
    os._exit(0)  # the model still holds the group, whose threads would abort the interpreter's end


if __name__ == "__main__":
    given = Path(sys.argv[1])
    main(given, int(sys.argv[2]), given.parent)
