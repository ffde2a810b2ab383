"""The random streams of a process: torch, its GPU, Python and numpy. Runs in the ranks and, for evaluation, in the kernel."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbddp.sampler import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Give every rank streams of its own, so that dropout differs between ranks; `step` where a run goes on on another number of ranks."""
    own = derive_seed("rank", seed, rank, *([step] if step else []))
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)  # numpy's global stream: user code draws from it


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all streams, as tensors and plain types."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": {"version": version, "internal": torch.tensor(internal), "next_gauss": next_gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set all streams to a captured state."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["next_gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the streams as if nothing had been drawn in between."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


@contextlib.contextmanager
def seeded(device: torch.device, *key: str | int) -> Iterator[None]:
    """Draw from streams that depend on the key alone; afterwards they are as if nothing had been drawn.

    A GPU is named with its index; the streams of others are left alone.
    """
    with preserved(device):
        own = derive_seed(*key)
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(own)
        random.seed(own)
        np.random.seed(own % 2**32)  # numpy's global stream: user code draws from it
        yield
