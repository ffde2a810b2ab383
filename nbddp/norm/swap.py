"""Swapping the normalization layers of a model: which become what, and what there is to say about it. Runs in the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbddp.errors import ConfigError, suggest
from nbddp.norm.applied import LAZY, apply, device_of, shown
from nbddp.norm.layers import KINDS, MIXING, batch_norm_layers, dimension, groups_of, is_kind, is_result, obstacle, scripted_layers, unseen
from nbddp.norm.report import Swapped, SwapReport
from nbddp.norm.verify import check_masks, verify
from nbddp.stage import matching
from nbddp.wrappers import inside, named_modules

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

Patterns = str | Sequence[str] | None
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to become of the BatchNorm layers of a model: the kind for each that changes, and the reason for each that does not, by name."""

    kinds: dict[str, str]
    left: dict[str, str]


def swap_norm(model: Any, to: str | Mapping[str, str] = "sync", only: Patterns = None, skip: Patterns = None, example: Any = None) -> SwapReport:
    """Let the BatchNorm layers of a model become other normalization layers, in place.

    ========  ====================================================================================================================
    ``to``    a BatchNorm layer, or a SyncBatchNorm, becomes
    ========  ====================================================================================================================
    sync      on GPUs `torch.nn.SyncBatchNorm`, on CPUs a class of nbddp with the same numbers: statistics over the batches of all
              ranks. Weights and running statistics stay; state dicts fit those of BatchNorm.
    batch     BatchNorm again, of the dimension that it had.
    layer     LayerNorm over the channels of each sample: `LayerNorm(C)` for a BatchNorm1d, `GroupNorm(1, C)` for images.
              The affine weights stay, the running statistics are dropped.
    group     `GroupNorm` with the largest divisor of C up to 32 as number of groups (for a BatchNorm1d, one that leaves two channels in
              a group); weights as for layer.
    none      `Identity`: weights and running statistics are dropped.
    ========  ====================================================================================================================

    Parameters that stay are the same objects, so that optimizers and ties go on; mode, device, dtype, requires_grad, hooks and further attributes of a
    layer stay too. Layers that occur several times become one layer. A model in DDP, DataParallel or torch.compile is changed inside its wrapper.

    Args:
        model: changed in place, or not at all where an error is raised.
        to: one of the above, or by pattern over layer names: ``{"encoder.*": "sync", "head.*": "layer"}``. The first pattern that fits a layer
            decides; layers that none fits stay, as do those of kind ``keep``.
        only: pattern, or patterns, over layer names as in ``model.named_modules()``: other layers stay.
        skip: the same for layers that stay.
        example: an input of the model, a tuple of inputs, or a dict of named inputs, with the samples in the first dimension: verifies by autograd, on a
            copy, that no output of the model comes to depend on an input that it did not depend on before. Without it, `layer` and `group` are refused
            between masked layers of an autoregressive network, where that would happen.

    Returns:
        the report: a sequence of rows (layer, before, after, note) that displays as a table.

    Raises:
        ConfigError: for values that can't be, patterns that fit no layer, lazy layers that have not seen a batch, and where an output would come to
            depend on an input that it must not see; names both.
    """
    if not isinstance(model, nn.Module):
        message = f"swap_norm takes a torch.nn.Module, not a {type(model).__name__}"
        raise ConfigError(message)
    device = device_of(model)
    choice = choose(model, to, only=only, skip=skip, device=device)
    verified: list[str] = []
    if example is None:
        check_masks(model, choice.kinds)
    else:
        verified = [verify(model, choice.kinds, example, device)]
    layers = batch_norm_layers(model)
    types = {name: type(layer) for name, layer in layers.items()}
    left = {**scripted_layers(model), **{name: kind.__name__ for name, kind in types.items()}}
    notes = {name: _note(layers[name], kind) for name, kind in choice.kinds.items()}
    apply(model, choice.kinds, device)
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module._assign_modules_buffers()  # it looks at its list before it makes it anew, and fails where no buffer is left
    rows = [Swapped(shown(name), *_type_names(types[name], layers[name]), notes[name]) for name in choice.kinds]
    rows += [Swapped(shown(name), left[name], left[name], why) for name, why in choice.left.items()]
    return SwapReport(rows, choice.kinds, [*verified, *_about(model, choice.kinds)])


def choose(model: nn.Module, to: str | Mapping[str, str], *, only: Patterns = None, skip: Patterns = None, device: torch.device) -> Choice:
    """Decide what becomes of each BatchNorm layer; changes nothing.

    Raises:
        ConfigError: as `swap_norm`, without the checks of what depends on what.
    """
    layers = batch_norm_layers(model)
    wanted = _wanted(model, to, list(layers), device)
    known = [name for name, module in named_modules(model) if name in layers or is_result(module)]
    chosen = _names(only, "only", known)
    skipped = _names(skip, "skip", known) or set()
    kinds: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, layer in layers.items():
        kind = wanted.get(name, "keep")
        if kind == "keep":
            left[name] = "kept" if name in wanted else "no pattern of to= fits it"
        elif name in skipped or (chosen is not None and name not in chosen):
            left[name] = "skipped" if name in skipped else "not among only="
        elif is_kind(layer, kind, device):
            left[name] = f"is {type(layer).__name__} already"
        elif (why := obstacle(layer, kind)) is not None:
            left[name] = why
        else:
            kinds[name] = kind
    if lazy := [name for name in kinds if unseen(layers[name])]:
        message = f"{_listed(lazy)}: {LAZY}; skip= leaves it out"
        raise ConfigError(message)
    left |= dict.fromkeys(scripted_layers(model), "is compiled by torch.jit: swap before that")
    return Choice(kinds, left)


def _wanted(model: nn.Module, to: Any, names: list[str], device: torch.device) -> dict[str, str]:
    """The kind for each layer that is spoken of. A pattern may fit layers that became of that kind before: a cell that swaps can be run again."""
    if isinstance(to, str):
        _check_kind(to, KINDS, "to")
        return dict.fromkeys(names, to)
    if not isinstance(to, Mapping):
        message = f"to={to!r} must be one of {', '.join(KINDS)}, or a dict of patterns over layer names"
        raise ConfigError(message)
    wanted: dict[str, str] = {}
    for pattern, kind in to.items():
        if not isinstance(pattern, str):
            message = f"to: the pattern {pattern!r} must be a string over layer names, as in 'encoder.*'"
            raise ConfigError(message)
        _check_kind(kind, (*KINDS, "keep"), f"to[{pattern!r}]")
        known = [name for name, module in named_modules(model) if name in names or (is_result(module) and (kind == "keep" or is_kind(module, kind, device)))]
        for name in matching(known, [pattern], what="BatchNorm layer"):
            wanted.setdefault(name, kind)
    return wanted


def _check_kind(kind: object, known: Sequence[str], what: str) -> None:
    if kind not in known:
        hint = suggest(str(kind), known)
        if kind == "auto":
            hint = " auto is an option of training: here it is sync"
        elif isinstance(kind, str) and "=" in kind:
            pairs = [pair.partition("=") for pair in kind.split(",")]
            hint = f" By pattern it is a dict: { ({pattern.strip(): value.strip() for pattern, _, value in pairs}) }"
        message = f"{what}={kind!r} must be one of {', '.join(known)}.{hint}"
        raise ConfigError(message)


def _names(patterns: Any, what: str, names: list[str]) -> set[str] | None:
    if patterns is None:
        return None
    given = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Sequence | set | frozenset) or not all(isinstance(pattern, str) for pattern in given):
        message = f"{what}={patterns!r} must be a pattern over layer names, or a list of them, as in ['encoder.*', 'head.1']"
        raise ConfigError(message)
    return matching(names, given, what="BatchNorm layer")


def _note(layer: _BatchNorm, kind: str) -> str:
    """What is lost, and what to know about it."""
    parts = []
    if kind == "group":
        groups = groups_of(layer)
        parts.append(f"{groups} group{'s' if groups > 1 else ''} of {layer.num_features // groups}")
        if (few := few_features(layer)) is not None:
            parts.append(few)
    if kind in (*MIXING, "none"):
        lost = [*(["affine weights"] if layer.affine and kind == "none" else []), *(["running statistics"] if layer.track_running_stats else [])]
        parts += [f"{' and '.join(lost)} dropped"] if lost else []
    if getattr(layer, "process_group", None) is not None:
        parts.append("its process group is dropped: all ranks")
    return "; ".join(parts)


def few_features(layer: _BatchNorm) -> str | None:
    """What groups of so few channels mean for inputs (N, C); None where there are more, or the inputs have positions besides."""
    size = layer.num_features // groups_of(layer)
    if dimension(layer) in (2, 3) or size > 2:
        return None
    left = "the bias alone" if size == 1 else "little more than signs"
    return f"for inputs (N, {layer.num_features}), groups of {size} leave {left}: layer leaves more"


def _about(model: nn.Module, kinds: Mapping[str, str]) -> list[str]:
    """What a swap means for wrappers that the user put around the model."""
    notes, found = [], model
    while (inner := inside(found)) is not None:
        wrapper, within = inner
        if wrapper == "torch.compile" and kinds:
            notes.append("the model is compiled again when it is called next")
        if wrapper in ("DistributedDataParallel", "FSDP") and "none" in kinds.values():
            notes.append(f"{wrapper} still waits for gradients of the weights that are gone: wrap the model anew")
        assert isinstance(within, nn.Module)
        found = within
    return notes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _type_names(before: type[nn.Module], layer: nn.Module) -> tuple[str, str]:
    """The class that a layer was and the one that it is: for GroupNorm with what it groups, for two of one name with the package of each."""
    after = f"GroupNorm({layer.num_groups}, {layer.num_channels})" if isinstance(layer, nn.GroupNorm) else type(layer).__name__
    if before.__name__ != after:
        return before.__name__, after
    one, other = (f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in (before, type(layer)))
    return one, other
