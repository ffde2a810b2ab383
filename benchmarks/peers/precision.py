"""The peer of `benchmarks/precision.py`: one model trained in several ways by the same processes, taking turns, so that their ratios can be trusted.

`torchrun precision.py RESULT MODEL ROUNDS STEPS`; rank 0 writes JSON to RESULT: per way the milliseconds of a step in each round, and the seconds of its
first step, which compiles.
"""

import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.workload import make_model

WAYS = ("fp32", "bf16", "compiled", "compiled, whole graph", "compiled, outside", "bf16 compiled")


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The small MLP of the other benchmarks and 128 samples: steps of a few milliseconds, most of which is overhead."""
    return make_model(), torch.randn(128, 128), torch.randint(10, (128,))


def wide() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """An MLP of 5 M parameters: matrix products, and gradients in several buckets."""
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(64, 1024), torch.randint(10, (64,))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A CNN of four layers on images of 32 x 32 pixels."""

    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.ReLU()]

    body = [*block(3, 32, 1), *block(32, 64, 2), *block(64, 64, 1), *block(64, 128, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


MODELS = {"mlp": mlp, "wide": wide, "cnn": cnn}


class Step(nn.Module):
    """Model and loss as one module, as DDP wraps them; `call` may be compiled."""

    def __init__(self, model: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.call(self.model, inputs, target)


def loss_of(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What is compiled."""
    return nn.functional.cross_entropy(model(inputs), target)


class Way:
    """One way to train: a model, a replica and an optimizer of its own."""

    def __init__(self, name: str, make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]) -> None:
        torch.manual_seed(0)
        model, self._inputs, self._target = make()
        self._name, compiled = name, "compiled" in name
        inside = compiled and "outside" not in name
        # A function of its own: dynamo keeps what it compiled with the code object, and one way would run what it made for another.
        call = types.FunctionType(loss_of.__code__.replace(co_name=f"loss_{WAYS.index(name)}"), globals())
        self._forward: Any = DistributedDataParallel(Step(model, torch.compile(call) if inside else call))
        if compiled and not inside:
            self._forward = torch.compile(self._forward)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(self) -> None:
        """One optimizer step."""
        torch._dynamo.config.optimize_ddp = "whole" not in self._name
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in self._name):
            loss = self._forward(self._inputs, self._target)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def first(self) -> float:
        """Seconds of the first steps."""
        began = time.perf_counter()
        for _ in range(3):
            self.step()
        return time.perf_counter() - began

    def measure(self, steps: int) -> float:
        """Milliseconds of a step; both ranks begin together."""
        self.step()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps * 1e3


def main(result: Path, model: str, rounds: int, steps: int) -> None:
    """Train on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {name: Way(name, MODELS[model]) for name in WAYS}
    first = {name: way.first() for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name in WAYS if number % 2 else reversed(WAYS):
            times[name].append(ways[name].measure(steps))
    if dist.get_rank() == 0:
        result.write_text(json.dumps({"first_s": first, "step_ms": times}))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the models still hold the group, whose threads would abort the interpreter's end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
