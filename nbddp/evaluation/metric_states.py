"""The states of torchmetrics objects, merged over the ranks.

torchmetrics would gather each state by itself, and hangs or mixes bytes up where ranks differ in what they hold: a rank without samples has empty lists of
another dtype and shape, and lists that are not joined have other lengths. Here all states of a metric travel at once, and ranks that took no batch in are
left out.

Imports torchmetrics only where an object of it is at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from nbddp.evaluation.gather import gather_tensors

if TYPE_CHECKING:
    from nbddp.evaluation.ranks import Ranks

State = torch.Tensor | list[Any]


def alone(metric: Any) -> None:
    """Keep a metric, and all that it is made of, from gathering by itself."""
    for leaf in _leaves(metric).values():
        leaf.distributed_available_fn = _never


def _never() -> bool:
    return False


@contextlib.contextmanager
def merged(metric: Any, ranks: Ranks) -> Iterator[None]:
    """Within it, the states are those of all ranks, on every rank; afterwards they are this rank's own again."""
    if ranks.world_size == 1:
        yield
        return
    leaves = _leaves(metric)
    kept = {name: (leaf._update_count, {state: getattr(leaf, state) for state in leaf._defaults}) for name, leaf in leaves.items()}
    everyone = _exchange({name: (leaf._update_count, _states(leaf)) for name, leaf in leaves.items()}, ranks)
    try:
        for name, leaf in leaves.items():
            updated = [(count, states) for count, states in (one[name] for one in everyone if name in one) if count]
            if updated:
                leaf._update_count = sum(count for count, _ in updated)  # torchmetrics warns where nothing was taken in
                _merge(leaf, [states for _, states in updated])
        yield
    finally:
        for name, (count, states) in kept.items():
            leaves[name]._update_count = count
            for state, value in states.items():
                setattr(leaves[name], state, value)


def _leaves(metric: Any) -> dict[str, Any]:
    """The metrics in a collection or wrapper, the outermost included, by name."""
    from torchmetrics import Metric

    return {name: module for name, module in metric.named_modules() if isinstance(module, Metric)}


def _states(leaf: Any) -> dict[str, State]:
    """What travels; lists that will be joined are joined here already."""
    states = dict(leaf.metric_state)
    for name, value in states.items():
        if isinstance(value, list) and value and _joins(leaf, name):
            states[name] = [torch.cat(_rows(value))]
    return states


def _joins(leaf: Any, name: str) -> bool:
    from torchmetrics.utilities.data import dim_zero_cat

    return leaf._reductions[name] is dim_zero_cat


def _rows(value: State) -> list[torch.Tensor]:
    return [part.reshape(1) if part.ndim == 0 else part for part in ([value] if isinstance(value, torch.Tensor) else value)]


def _merge(leaf: Any, ranks: list[dict[str, State]]) -> None:
    """Reduce the states of the ranks that took batches in, as each was declared to be."""
    device = torch.device("cpu") if leaf.compute_on_cpu else leaf.device
    for name, reduction in leaf._reductions.items():
        parts: list[Any] = [states[name] for states in ranks]
        if isinstance(parts[0], list) or _joins(leaf, name):
            value: Any = [element for part in parts for element in (part if isinstance(part, list) else [part])]
            if _joins(leaf, name):
                value = [row for row in _rows(value) if row.numel()] or value[:1]
                value = torch.cat(value) if value else []
            elif reduction is not None:
                value = reduction(value)
        elif len(parts) == 1:
            value = parts[0]
        else:
            value = torch.stack(parts)
            value = value if reduction is None else reduction(value)
        setattr(leaf, name, _on(value, device))


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(element, device) for element in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


class _Slot(int):
    """The place of a tensor, in what travels beside the tensors."""


def _exchange(mine: dict[str, tuple[int, dict[str, State]]], ranks: Ranks) -> list[dict[str, tuple[int, dict[str, State]]]]:
    """Every rank's update counts and states; tensors travel as bytes, and what else stands in a list, such as masks of a detection, by pickle."""
    tensors: list[torch.Tensor] = []

    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _Slot(len(tensors) - 1)
        return [outline(element) for element in value] if isinstance(value, list) else value

    outlines = ranks.gather_objects({name: (count, {state: outline(value) for state, value in states.items()}) for name, (count, states) in mine.items()})
    gathered = gather_tensors(tensors, ranks)

    def filled(value: Any, of: list[torch.Tensor]) -> Any:
        if isinstance(value, _Slot):
            return of[value]
        return [filled(element, of) for element in value] if isinstance(value, list) else value

    return [
        {name: (count, {state: filled(value, of) for state, value in states.items()}) for name, (count, states) in one.items()}
        for one, of in zip(outlines, gathered, strict=True)
    ]
