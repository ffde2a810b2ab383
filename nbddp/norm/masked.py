"""Masked networks: where normalizing over the features of a sample would let an output depend on an input that the masks hide.

The density of an autoregressive flow is wrong then, without any error. Decided by the masks, without calling the model. Runs in the kernel and in the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules import activation, dropout
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from nbddp.norm.masks import Masked, masked, turned_classes
from nbddp.wrappers import named_modules, unwrapped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_ACROSS = {"Softmax", "Softmin", "LogSoftmax", "Softmax2d", "GLU", "MultiheadAttention"}  # activations that are not elementwise
_ELEMENTWISE = {nn.Identity, *(getattr(module, name) for module in (activation, dropout) for name in module.__all__ if name not in _ACROSS)}
_SHOWN = 3
_MATRIX = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A module in the place where it stands; one that is shared stands in several."""

    name: str
    module: nn.Module
    children: tuple[_Node, ...]
    masked: tuple[Masked, ...]
    """The masked layers at and below it, in the order of registration."""

    @property
    def is_masked(self) -> bool:
        return any(layer.module is self.module for layer in self.masked)

    @property
    def is_list(self) -> bool:
        return isinstance(self.module, nn.ModuleList | nn.ModuleDict)

    @property
    def is_sequence(self) -> bool:
        """Whether it does nothing but calling its children one after the other."""
        return isinstance(self.module, nn.Sequential) and type(self.module).forward is nn.Sequential.forward

    @property
    def parts(self) -> list[_Node]:
        """The children, those in lists included."""
        return [part for child in self.children for part in (child.parts if child.is_list else [child])]

    @property
    def holds_masked(self) -> bool:
        """Whether it is, or calls, a masked layer itself."""
        return self.is_masked or any(part.is_masked for part in self.parts)


def mixing(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """The BatchNorm layers in whose place mixing the features of a sample would, or might, add a dependency, each with the reason.

    Layers that are not in the answer can all mix features at once: no output comes to depend on an input that it did not depend on. Networks that are
    plain sequences of masked, linear and elementwise layers are decided exactly; in others a layer passes where all features that it may normalize see the
    same, or are all seen together, whatever the order of use.

    Args:
        model: the model; nothing of it is called.
        names: of BatchNorm layers, as in ``model.named_modules()`` without the names of wrappers.

    Returns:
        name -> reason, one clause that begins with the layer's name.
    """
    if not names:
        return {}
    root = _tree("", model, turned_classes(model))
    if not root.masked:
        return {}
    reasons: dict[str, str] = {}
    passed: set[int] = set()
    for name, layer in named_modules(model):
        if name in names and isinstance(layer, _BatchNorm):
            found = (why for lineage in _lineages(root, layer) if (why := _reason(lineage, layer, passed)) is not None)
            if (why := next(found, None)) is not None:
                reasons[name] = f"{name} {why}"
            else:
                passed.add(id(layer))
    return reasons


def networks(model: nn.Module, names: Collection[str]) -> list[str]:
    """The networks of masked layers around BatchNorm layers, by name: what is to depend on nothing that masks hide is the output of each, not of the model.

    The outputs of a flow depend on all inputs after two transforms already, and its density is right only where each transform is.

    Args:
        model: the model; nothing of it is called.
        names: of BatchNorm layers, as for `mixing`.
    """
    root = _tree("", model, turned_classes(model))
    found: dict[str, None] = {}
    for name, layer in named_modules(model):
        if name in names and isinstance(layer, _BatchNorm):
            nets = (_net(lineage, through_lists=False) for lineage in _lineages(root, layer))
            found.update(dict.fromkeys(net.name for net in nets if net is not None))
    return list(found)


def _tree(name: str, module: nn.Module, turned: set[type[nn.Module]]) -> _Node:
    module = unwrapped(module)
    own = masked(name, module, turned)
    children = tuple(_tree(f"{name}.{key}" if name else key, child, turned) for key, child in module._modules.items() if child is not None)
    below = () if own is not None else tuple(layer for child in children for layer in child.masked)
    return _Node(name, module, children, (own,) if own is not None else below)


def _lineages(node: _Node, layer: nn.Module) -> Iterator[list[_Node]]:
    """The ways from a node down to a layer."""
    if node.module is layer:
        yield [node]
    for child in node.children:
        for rest in _lineages(child, layer):
            yield [node, *rest]


def _reason(lineage: list[_Node], layer: _BatchNorm, passed: set[int]) -> str | None:
    """Why a layer must not mix features where it stands; None where it may."""
    net = _net(lineage)
    if net is None:
        return None
    sequence = _sequence(lineage)
    hidden = _Chain.of(sequence).gained(passed, id(layer)) if sequence is not None else None
    if (hidden is not None and hidden.pair is None) or _same_for_all(net.masked, layer.num_features):
        return None
    if hidden is not None:
        assert sequence is not None
        return f"{_place(sequence, layer)}: {_would(hidden, sequence)}"
    listed = ", ".join(entry.name or "the model itself" for entry in net.masked[:_SHOWN]) + (
        f" and {len(net.masked) - _SHOWN} more" if len(net.masked) > _SHOWN else ""
    )
    where = f"stands among masked layers ({listed})"
    if (likely := _in_order(net.masked, layer.num_features)) is not None:
        return f"{where}: {_would(likely, net)}"
    return f"{where}: whether normalizing over features would let an output depend on an input that they hide cannot be read from the masks alone"


def _net(lineage: list[_Node], *, through_lists: bool = True) -> _Node | None:
    """The network of masked layers that a layer, the last of a lineage, stands in; None where it stands beside them, as in an embedding network.

    The modules of a list may be blocks of one network or networks of their own: with `through_lists`, what holds the list counts as the network.
    """
    above = [node for node in lineage[:-1] if not node.is_list] or lineage[:1]
    holders = [index for index, node in enumerate(above) if node.masked]
    if not holders:
        return None
    at = holders[-1]
    if not _within(above[at], lineage):
        at = next((index for index in reversed(holders) if above[index].holds_masked), -1)
        if at < 0:
            return None
    while at > 0 and (above[at - 1].is_sequence or above[at - 1].holds_masked or (through_lists and above[at] not in above[at - 1].children)):
        at -= 1
    return above[at]


def _within(node: _Node, lineage: list[_Node]) -> bool:
    """Whether what a node does with its masked layers may lead through the last module of a lineage."""
    parts = node.parts
    branch = next(part for part in parts if part in lineage)
    if node.is_sequence or node.holds_masked or branch is lineage[-1]:
        return True
    at = parts.index(branch)
    between = any(part.masked for part in parts[:at]) and any(part.masked for part in parts[at + 1 :])
    return between and not _is_dense(branch, lineage[-1].module)


def _is_dense(branch: _Node, layer: nn.Module) -> bool:
    """Whether a module without masks is a network whose own linear layers see all features that a layer in it normalizes, as that of a coupling transform."""
    features = getattr(layer, "num_features", None)
    weights = [getattr(module, "weight", None) for module in branch.module.modules() if hasattr(module, "in_features")]
    shapes = [
        weight.shape for weight in weights if isinstance(weight, nn.Parameter) and not isinstance(weight, UninitializedParameter) and weight.dim() == _MATRIX
    ]
    made, used = [shape for shape in shapes if shape[0] == features], [shape for shape in shapes if shape[1] == features]
    # Square ones alone may be those of a conditional norm, which scale and shift the features without seeing them.
    return bool(made and used) and any(len(set(shape)) > 1 for shape in made + used)


def _sequence(lineage: list[_Node]) -> _Node | None:
    """The outermost sequence that a module, the last of a lineage, is a member of, through sequences alone."""
    found = None
    for node in reversed(lineage[:-1]):
        if not node.is_sequence:
            break
        found = node
    return found


def _members(node: _Node) -> Iterator[_Node]:
    """The modules of a sequence in the order of calls."""
    for child in node.children:
        if child.is_sequence:
            yield from _members(child)
        else:
            yield child


@dataclass(frozen=True, slots=True)
class _Gained:
    """What mixing adds: the first output and the input that it comes to depend on; None where nothing."""

    pair: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Chain:
    """Layers in the order of calls: a matrix of what sees what, or the BatchNorm layer that may come to mix. None where one of them is unknown."""

    links: tuple[torch.Tensor | _BatchNorm, ...] | None

    @classmethod
    def of(cls, sequence: _Node) -> _Chain:
        links: list[torch.Tensor | _BatchNorm] = []
        for member in _members(sequence):
            module = member.module
            if member.is_masked and member.masked[0].sees is not None:
                links.append(member.masked[0].sees)
            elif isinstance(module, _BatchNorm):
                links.append(module)
            elif type(module) is nn.Linear and not member.is_masked:
                links.append(torch.ones(module.out_features, module.in_features, dtype=torch.bool))
            elif type(module) not in _ELEMENTWISE:
                return cls(None)
        return cls(tuple(links))

    def gained(self, passed: set[int], layer: int) -> _Gained | None:
        """What mixing at a layer adds where those that passed mix too; None where that cannot be told."""
        plain, mixed = self._reach(set()), self._reach({*passed, layer})
        return _Gained(_first(mixed & ~plain)) if plain is not None and mixed is not None else None

    def _reach(self, mixers: set[int]) -> torch.Tensor | None:
        """Which outputs depend on which inputs where some BatchNorm layers, by id, mix all features; None where the layers do not fit."""
        if self.links is None:
            return None
        seen: torch.Tensor | None = None
        for link in self.links:
            if seen is not None and seen.shape[0] != (link.shape[1] if isinstance(link, torch.Tensor) else link.num_features):
                return None
            if isinstance(link, torch.Tensor):
                seen = link if seen is None else _through(link, seen)
            elif id(link) in mixers:
                seen = _mixed(seen, link.num_features)
        return seen


def _same_for_all(layers: Sequence[Masked], features: int) -> bool:
    """Whether features that are normalized somewhere among masked layers all see the same inputs, or are seen by the same outputs.

    Mixing them adds nothing then, whatever lies before, after and between. Which layers they may come from and go to is told by their number; so is whether
    they may be the inputs or the outputs of the network.
    """
    matrices = [layer.sees for layer in layers if layer.sees is not None]
    if len(matrices) < len(layers):
        return False
    sources = [sees for sees in matrices if sees.shape[0] == features]
    targets = [sees for sees in matrices if sees.shape[1] == features]
    if sources and matrices[0].shape[1] != features and all(bool((sees == sees[:1]).all()) for sees in sources):
        return True
    return bool(targets) and matrices[-1].shape[0] != features and all(bool((sees.all(1) | ~sees.any(1)).all()) for sees in targets)


def _in_order(layers: Sequence[Masked], features: int) -> _Gained | None:
    """What mixing adds in each place that a number of features allows, where masked layers are called in the order of registration; the first pair.

    None where the layers do not fit in that order, or where mixing adds nothing in one of the places.
    """
    matrices = [layer.sees for layer in layers]
    plain: torch.Tensor | None = None
    reached: list[torch.Tensor | None] = []
    for sees in matrices:
        if sees is None or (plain is not None and plain.shape[0] != sees.shape[1]):
            return None
        reached = [_through(sees, before) if before is not None else None for before in reached]
        if sees.shape[1] == features:
            reached.append(_through(sees, _mixed(plain, features)))
        plain = sees if plain is None else _through(sees, plain)
    if plain is not None and plain.shape[0] == features:
        reached.append(_mixed(plain, features))
    pairs = [_first(mixed & ~plain) for mixed in reached if mixed is not None and plain is not None]
    return _Gained(pairs[0]) if pairs and all(pair is not None for pair in pairs) else None


def _through(sees: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return (sees.float() @ before.float()) > 0


def _mixed(seen: torch.Tensor | None, features: int) -> torch.Tensor:
    """What features see once they are mixed: each what any of them saw; each of the inputs where they are the inputs."""
    return torch.ones(features, features, dtype=torch.bool) if seen is None else seen.any(0).expand(features, -1)


def _first(added: torch.Tensor) -> tuple[int, int] | None:
    found = added.nonzero()
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


def _would(gained: _Gained, network: _Node) -> str:
    assert gained.pair is not None
    where = f" (of {network.name})" if network.name else ""
    return f"normalizing over features would let output {gained.pair[0]} depend on input {gained.pair[1]}{where}, which the masks hide"


def _place(sequence: _Node, layer: nn.Module) -> str:
    """Where a layer stands in a sequence: before, after or between masked layers."""
    members = list(_members(sequence))
    at = next(index for index, member in enumerate(members) if member.module is layer)
    before = [member.name for member in members[:at] if member.masked]
    after = [member.name for member in members[at + 1 :] if member.masked]
    if before and after:
        return f"stands between masked layers ({before[-1]}, {after[0]})"
    return f"stands after the masked layer {before[-1]}" if before else f"stands before the masked layer {after[0]}"
