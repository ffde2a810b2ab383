"""The peer: a training loop as one writes it by hand for torchrun.

`torchrun loop.py RESULT first` ends after the first optimizer step; `torchrun loop.py RESULT loader|batched EPOCHS` times epochs, with a DataLoader
over the dataset, or with batches that were cut beforehand. Rank 0 writes JSON to RESULT.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.workload import BATCH, LR, make_data, make_model


def main(result: Path, mode: str, epochs: int) -> None:
    """Train on this rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss_of = nn.CrossEntropyLoss()
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    batches = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler, drop_last=True)
    if mode == "batched":
        x, y = (part[rank::world_size] for part in data.tensors)
        batches = list(zip(x.split(BATCH // world_size), y.split(BATCH // world_size), strict=True))
    steps, started = [], time.perf_counter()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, target in batches:
            loss = loss_of(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if mode == "first":
                if rank == 0:
                    result.write_text(json.dumps({"first_step": time.time()}))
                leave()
                return
        now = time.perf_counter()
        steps.append(len(batches) / (now - started))
        started = now
    if rank == 0:
        result.write_text(json.dumps({"steps_per_s": steps}))
    leave()


def leave() -> None:
    """End this rank."""
    dist.barrier()  # a rank that closes its connections while the other uses them aborts it
    dist.destroy_process_group()
    os._exit(0)  # the model still holds the group, whose threads would abort the interpreter's end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
