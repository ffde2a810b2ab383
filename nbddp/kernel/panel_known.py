"""What a configuration panel keeps from one check to the next, since it checks with every key: what became of which layer, who holds which GPU.

Runs in the kernel's main thread, and for the GPUs in a thread that runs none of the user's code.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from nbddp import norm
from nbddp.errors import NbddpError
from nbddp.kernel import norms
from nbddp.kernel.machine import check_devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from nbddp.config import TrainConfig
    from nbddp.plans import Plan

    Decided = tuple[dict[str, str], list[str]]

DEVICES_S = 10.0
"""How long what is known of the GPUs holds."""


class Decisions:
    """`nbddp.kernel.norms.decide`, which looks through all modules of the model, once for each answer.

    The modules of a model are what they were until code of the user's runs: then `forget`.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[object, ...], tuple[int, Decided | NbddpError]] = {}
        self._layers: dict[int, dict[str, bool]] = {}

    def forget(self) -> None:
        """Look anew the next time."""
        self._answers.clear()
        self._layers.clear()

    def layers(self, model: nn.Module) -> dict[str, bool]:
        """The BatchNorm layers by name, and whether each has the statistics of all ranks already."""
        if id(model) not in self._layers:
            self._layers[id(model)] = {name: norm.is_synchronized(layer) for name, layer in norm.batch_norm_layers(model).items()}
        return self._layers[id(model)]

    def __call__(self, config: TrainConfig, model: nn.Module, plan: Plan, *, asked: bool) -> Decided:
        """As `norms.decide`."""
        batch = min(stage.micro_batch_size for stage in plan.stages)
        key = (id(model), repr(config.norm), asked, plan.device, plan.nproc)
        if (known := self._answers.get(key)) is None or (known[0] != batch and self._speaks_of_the_batch(model, known[1])):
            try:
                known = (batch, norms.decide(config, model, plan, asked=asked))
            except NbddpError as error:
                known = (batch, error)
            self._answers[key] = known
        if isinstance(known[1], NbddpError):
            raise known[1]
        return known[1]

    def _speaks_of_the_batch(self, model: nn.Module, answer: Decided | NbddpError) -> bool:
        """Whether layers keep the statistics of each rank, whose number of samples is told then."""
        if isinstance(answer, NbddpError):
            return False
        return any(answer[0].get(name, "sync" if synced else "batch") == "batch" for name, synced in self.layers(model).items())


class Devices:
    """`nbddp.kernel.machine.check_devices`, which runs a program and reads the other runs: in a thread, with what it said last until then.

    Args:
        changed: called from that thread when it says something else than before.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], tuple[float, list[str] | NbddpError]] = {}
        self._looking: set[tuple[object, ...]] = set()

    def __call__(self, plan: Plan, root: Path) -> list[str]:
        """As `check_devices`, a little late."""
        if plan.device != "cuda":
            return []
        key = (plan.device_indices, root)
        with self._lock:
            looked, said = self._known.get(key, (float("-inf"), []))
            if time.monotonic() - looked > DEVICES_S and key not in self._looking:
                self._looking.add(key)
                threading.Thread(target=self._look, args=(key, plan, root), name="nbddp-panel-devices", daemon=True).start()
        if isinstance(said, NbddpError):
            raise said
        return said

    def _look(self, key: tuple[object, ...], plan: Plan, root: Path) -> None:
        said: list[str] | NbddpError
        try:
            said = check_devices(plan, root)
        except NbddpError as error:
            said = error
        with self._lock:
            before = self._known.get(key, (0.0, []))[1]
            self._known[key] = (time.monotonic(), said)
            self._looking.discard(key)
        if str(said) != str(before):
            self._changed()
