"""Where a file and a model differ by their normalization layers alone: which swap makes them fit.

Decided by names, and by the types of the model's modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
_AFFINE = frozenset(("weight", "bias"))
_SHOWN = 4


def swap_hint(modules: Mapping[str, nn.Module], own: Collection[str], misfits: Mapping[str, set[str]], norm: Mapping[str, str]) -> str | None:
    """What to call so that file and model fit; None where they differ by something else.

    Args:
        modules: the model's modules by name.
        own: names of the model's entries.
        misfits: names of the entries that are missing and unexpected, and of others that don't fit.
        norm: the kinds of normalization layers that the run behind the file had, by name, where that is known.
    """
    missing, unexpected = misfits["missing"], misfits["unexpected"]
    if misfits["other"] or not (missing or unexpected):
        return None
    if not unexpected:
        return _to_swap(modules, own, missing, norm)
    return _swapped(modules, unexpected) if not missing else None


def _to_swap(modules: Mapping[str, nn.Module], own: Collection[str], missing: set[str], norm: Mapping[str, str]) -> str | None:
    """The model has BatchNorm layers, and the file is of a model that has others in their place."""
    known = set(own)
    layers = {name: {f"{name}.{part}" for part in STATISTICS | _AFFINE} & known for name, module in modules.items() if isinstance(module, _BatchNorm)}
    lacking: dict[str, list[str]] = {"statistics": [], "entries": []}
    explained: set[str] = set()
    for name, entries in layers.items():
        needed = entries - {f"{name}.num_batches_tracked"}  # which torch does without where the layer of the file had none
        statistics = {f"{name}.{part}" for part in STATISTICS} & needed
        if needed and needed <= missing and needed != statistics:
            lacking["entries"].append(name)
        elif statistics and statistics <= missing:
            lacking["statistics"].append(name)
        else:
            continue
        explained |= entries & missing
    if explained != missing:
        return None
    said = [f"no {what} of {_count(names, layers)}" for what, names in lacking.items() if names]
    calls = [_call(names, layers, norm, "none" if what == "entries" else "layer") for what, names in lacking.items() if names]
    return f"the file has {' and '.join(said)}, as after {' and '.join(calls)}: swap first, then load"


def _count(names: list[str], layers: Collection[str]) -> str:
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{'the' if len(names) == len(layers) else len(names)} BatchNorm layer{'s' if len(names) > 1 else ''} ({listed})"


def _call(names: list[str], layers: Collection[str], norm: Mapping[str, str], kind: str) -> str:
    kinds = {name: norm[name] for name in names if name in norm}
    if len(kinds) == len(names):
        one = set(kinds.values())
        to = repr(one.pop()) if len(one) == 1 else repr(kinds)
        whole = to[0] == "{" or len(names) == len(layers)
    else:
        to, whole = repr(kind), len(names) == len(layers)
    only = "" if whole else f", only={names!r}"
    either = ' or "group"' if kind == "layer" and len(kinds) != len(names) else ""
    return f"nbddp.swap_norm(net, {to}{only})".replace("'", '"') + either


def _swapped(modules: Mapping[str, nn.Module], unexpected: set[str]) -> str | None:
    """The model's BatchNorm layers were swapped, and the file is of the model before."""
    found: dict[str, set[str]] = {}
    for name in unexpected:
        layer, _, part = name.rpartition(".")
        module = modules.get(layer)
        known = STATISTICS | (_AFFINE if isinstance(module, nn.Identity) else frozenset())
        if not isinstance(module, nn.Identity | nn.LayerNorm | nn.GroupNorm) or part not in known:
            return None
        found.setdefault(layer, set()).add(part)
    if not all("running_mean" in parts for parts in found.values()):
        return None
    types = sorted({type(modules[layer]).__name__ for layer in found})
    kinds = sorted({_kind(modules[layer]) for layer in found})
    swap = f'nbddp.swap_norm(net, "{kinds[0]}")' if len(kinds) == 1 else "nbddp.swap_norm as before"
    names = sorted(found)
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"the file has running statistics of BatchNorm where the model has {' and '.join(types)} ({listed}): load before swapping. "
        f"Build the model anew, load into it, then {swap}"
    )


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Identity):
        return "none"
    return "group" if isinstance(module, nn.GroupNorm) and module.num_groups > 1 else "layer"
