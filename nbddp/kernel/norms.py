"""What the option `norm` makes of a model on the ranks of a plan, and what there is to say about it.

Runs in the kernel before anything is written; the ranks do what is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nbddp import norm
from nbddp.errors import ConfigError
from nbddp.remarks import SMALL_NORM_BATCH
from nbddp.stage import trainable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbddp.config import TrainConfig
    from nbddp.plans import Plan
    from nbddp.stage import Stage

_BECOMES = {
    "layer": "LayerNorm over the channels of each sample (for images GroupNorm(1, C)); running statistics are dropped",
    "group": "GroupNorm; running statistics are dropped",
    "none": "Identity; weights and running statistics are dropped",
}


def decide(config: TrainConfig, model: nn.Module, plan: Plan, *, asked: bool) -> tuple[dict[str, str], list[str]]:
    """What becomes, or became, of which BatchNorm layer, by name, as `norm.apply` takes it; and what there is to say, a line each.

    `asked` says that the option was written in the cell, rather than carried over from a run.

    Raises:
        ConfigError: for patterns that fit no layer, lazy layers, layers that can't train as they are, and what a masked network forbids.
    """
    device = torch.device(plan.device)
    layers = norm.batch_norm_layers(model)
    if not layers and isinstance(config.norm, str):
        idle = asked and config.norm not in ("auto", "keep") and not any(norm.is_kind(module, config.norm, device) for module in model.modules())
        return norm.became(model), [f"norm={config.norm} has no effect: the model has no BatchNorm"] if idle else []
    choice = norm.choose(model, _kinds(config.norm, plan.nproc), device=device)
    _check_masks(model, choice.kinds)
    notes = _told(config, model, choice.kinds, plan)
    after = {name: choice.kinds.get(name, "sync" if norm.is_synchronized(layer) else "batch") for name, layer in layers.items()}
    own = [name for name, kind in after.items() if kind == "batch"]
    if plan.device == "cpu" and plan.nproc > 1 and (refused := [n for n, m in layers.items() if n not in choice.kinds and isinstance(m, nn.SyncBatchNorm)]):
        message = f"norm=keep: {norm.listed(refused)} is torch's SyncBatchNorm, which trains on GPUs only: --norm auto has one for ranks on the CPU"
        raise ConfigError(message)
    if plan.nproc > 1 and own:
        notes.append(_on_its_own(own, min(stage.micro_batch_size for stage in plan.stages), choice.left, by_pattern=not isinstance(config.norm, str)))
    return {**norm.became(model), **choice.kinds}, notes


def check_stages(stages: Iterable[Stage], model: nn.Module, swaps: Mapping[str, str]) -> None:
    """Whether the patterns of each stage match parameters that are there after the swap.

    Raises:
        ConfigError: names the stage.
    """
    gone = [name for name, kind in swaps.items() if kind == "none"]
    if not gone:
        return
    with norm.swapped(model, swaps):
        names = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for stage in stages:
        try:
            trainable(names, stage)
        except ConfigError as error:
            message = f"{error} norm=none leaves no parameters in {norm.listed(gone)}"
            raise ConfigError(message) from None


def _kinds(given: str | Mapping[str, str], nproc: int) -> str | dict[str, str]:
    """The option with `auto` resolved, as `norm.choose` takes it."""

    def resolved(kind: str) -> str:
        return kind if kind != "auto" else "sync" if nproc > 1 else "keep"

    if isinstance(given, str):
        return {"*": "keep"} if resolved(given) == "keep" else resolved(given)
    return {pattern: resolved(kind) for pattern, kind in given.items()}


def _check_masks(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """As for `swap_norm`, in the words of the option."""
    if (found := norm.forbidden(model, kinds)) is not None:
        others = f" (and {found.others} more)" if found.others else ""
        message = f"norm={kinds[found.layer]} is refused for {norm.shown(found.layer)}{others}: it {found.reason}. --norm sync and --norm none work there"
        raise ConfigError(message)


def _told(config: TrainConfig, model: nn.Module, kinds: Mapping[str, str], plan: Plan) -> list[str]:
    """One line about what is swapped."""
    if not kinds:
        return []
    layers = norm.batch_norm_layers(model)
    synced = [name for name, kind in kinds.items() if kind == "sync"]
    if config.norm == "auto":
        other = "" if norm.mixing(model, synced) else "; --norm layer needs none"
        kept = "--norm keep leaves each rank its own"
        return [
            f"note: BatchNorm ({norm.listed(synced)}) is synchronised over the {plan.nproc} ranks: statistics of the global batch, "
            f"for an exchange per layer in the forward and in the backward pass{other}; {kept}"
        ]
    lines = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name, other in kinds.items() if other == kind]
        lines.append(f"norm: {norm.listed(names)} become{'s' if len(names) == 1 else ''} {_BECOMES.get(kind, norm.BECOMES[kind])}")
        few = [name for name in names if kind == "group" and norm.few_features(layers[name])]
        if few:
            lines.append(f"note: {norm.listed(few)}: {norm.few_features(layers[few[0]])}")
    return lines


def _on_its_own(names: list[str], per_rank: int, left: Mapping[str, str], *, by_pattern: bool) -> str:
    """What it means that the statistics of layers are those of each rank."""
    small = ", which is small" if per_rank < SMALL_NORM_BATCH else ""
    samples = "one sample, on which features (N, C) can't train" if per_rank == 1 else f"{per_rank} samples{small}"
    why = next((f"; {reason}" for name, reason in left.items() if name in names and "would be lost" in reason), "")
    other = "; '*=auto' as the last pattern synchronises them" if by_pattern and not why else ""
    return f"note: BatchNorm ({norm.listed(names)}) uses the statistics of each rank's {samples}; rank 0's running statistics are kept{why}{other}"
