"""Names in state dicts without what wrappers add to them, and which name in a file stands for which in a model.

A wrapper around a model, or around a part of it, adds a part to names: ``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.``. An attribute of the user's may
be called the same, so that names of files are never shortened on their own where there is a model to compare them with.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from nbddp.errors import CheckpointError
from nbddp.wrappers import PREFIXES, inside

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import nn

_REAL = "module"
"""The one among the parts that is a likely name of an attribute as well."""
_GROUP = 6
"""Names that differ by wrappers alone, beyond which their possible assignments are not tried out."""


def bare(name: str) -> str:
    """A name without any part that a wrapper may have added."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in PREFIXES), last])


def wrappers_in(name: str) -> set[str]:
    """The parts of a name that a wrapper may have added."""
    return set(name.split(".")[:-1]) & set(PREFIXES)


def module_names(model: nn.Module) -> dict[str, str]:
    """For the name of each module of a model, as torch knows it, the name in which no wrapper shows: what is a wrapper is known by its class."""
    found: dict[str, str] = {}

    def walk(module: nn.Module, raw: str, plain: str) -> None:
        found[raw] = plain
        wrapper = inside(module)
        for child, other in module._modules.items():
            if other is not None:
                wrapped = wrapper is not None and other is wrapper[1]
                walk(other, _join(raw, child), plain if wrapped else _join(plain, child))

    walk(model, "", "")
    return found


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """For each name of a model's own state dict the one in which no wrapper shows; as it is where two would become the same."""
    modules = module_names(model)
    plain = {name: _renamed(name, modules) for name in names}
    taken = defaultdict(list)
    for name, other in plain.items():
        taken[other].append(name)
    return {name: other if len(taken[other]) == 1 else name for name, other in plain.items()}


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """A name whose longest part that is known as a module is replaced by what stands for that."""
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        if (known := modules.get(".".join(parts[:length]))) is not None:
            return _join(known, ".".join(parts[length:]))
    return name


def _join(first: str, second: str) -> str:
    return f"{first}.{second}" if first and second else first or second


def match(own: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Which name of a model each name of a file stands for; those that stand for none are left out.

    Args:
        own: the model's names, and what they are without wrappers.
        names: those of the file, with any wrappers.

    Raises:
        CheckpointError: where names that differ by wrappers alone could be assigned in more than one way.
    """
    by_plain = {plain: raw for raw, plain in own.items()}
    pairs = {name: by_plain[rest] for name, rest in _best_start(names, by_plain).items() if rest in by_plain}
    taken = set(pairs.values())
    ours, theirs = defaultdict(list), defaultdict(list)
    for plain, raw in by_plain.items():
        if raw not in taken:
            ours[bare(plain)].append(plain)
    for name in names:
        if name not in pairs:
            theirs[bare(name)].append(name)
    for short, group in theirs.items():
        if wanted := ours.get(short):
            pairs.update({name: by_plain[plain] for name, plain in _assigned(group, wanted).items()})
    return pairs


def _best_start(names: Collection[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The names without as many parts, common to all of them, as let most of them be wanted."""
    rest = {name: name for name in names}
    best, most = rest, sum(name in wanted for name in names)
    while rest and any(all(name.startswith(f"{part}.") for name in rest.values()) for part in PREFIXES):
        rest = {name: other.split(".", 1)[1] for name, other in rest.items()}
        if (hits := sum(other in wanted for other in rest.values())) > most:
            best, most = rest, hits
    return best


def _assigned(names: list[str], wanted: list[str]) -> dict[str, str]:
    """The only way in which names of the file can stand for those of the model, all of which are the same without wrappers."""
    if len(names) == len(wanted) == 1:
        return {names[0]: wanted[0]}
    ways = []
    if len(names) <= len(wanted) <= _GROUP:
        ways = [
            dict(zip(names, order, strict=True))
            for order in itertools.permutations(wanted, len(names))
            if all(_contains(name, plain) for name, plain in zip(names, order, strict=True))
        ]
    if len(ways) == 1:
        return ways[0]
    message = (
        f"{' and '.join(names[:3])} in the file are the same as {' and '.join(wanted[:3])} in the model, but for {', '.join(f'{part}.' for part in PREFIXES)}: "
        "which is which can't be told; rename them in the file"
    )
    raise CheckpointError(message)


def _contains(name: str, plain: str) -> bool:
    """Whether a name becomes another by leaving out parts of wrappers."""
    rest = plain.split(".")
    for part in name.split("."):
        if rest and part == rest[0]:
            rest.pop(0)
        elif part not in PREFIXES:
            return False
    return not rest


def translated(name: str, own_modules: Mapping[str, str]) -> str:
    """A name of the file that stands for none of the model's, under the module of the model that it belongs to: hooks of that module may know it."""
    return _renamed(bare(name), own_modules)


def versions_for(own_modules: Mapping[str, str], pairs: Mapping[str, str], versions: Mapping[str, Any], *, below: str = "") -> dict[str, Any]:
    """The modules' versions that torch keeps beside a state dict, under the model's own names of its modules.

    Args:
        own_modules: as `module_names` gives them.
        pairs: as `match` gives them, for all of the file's name.
        versions: those of the file.
        below: the part of the file's names that was left out.
    """
    exact = {raw.rpartition(".")[0]: versions.get(name.rpartition(".")[0]) for name, raw in pairs.items()}
    short: dict[str, Any] = {}
    for name, version in versions.items():  # wrappers come before what they hold, which wins
        rest = ".".join(part for part in name.split(".") if part not in PREFIXES)
        if not below or rest == below or rest.startswith(f"{below}."):
            short[rest[len(below) :].lstrip(".")] = version
    found = {raw: exact.get(raw) or short.get(bare(f"{plain}.x").rpartition(".")[0]) for raw, plain in own_modules.items()}
    return {raw: version for raw, version in found.items() if version is not None}


def without_wrappers(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict under names that no wrapper shows in, as far as that can be told without a model.

    ``module`` is left out where nothing else is beside it, as in wrappers; names that would become the same stay as they are.
    """
    names = {name: _without(name, _REAL) for name in state}
    alone = _only_children(names.values())
    short = {name: _dropped(other, alone) for name, other in names.items()}
    taken = defaultdict(list)
    for name, other in short.items():
        taken[other].append(name)
    renamed = OrderedDict((other if len(taken[other]) == 1 else name, state[name]) for name, other in short.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        inner = {_dropped(_without(f"{name}.x" if name else "x", _REAL), alone).rpartition(".")[0]: version for name, version in versions.items()}
        renamed._metadata = inner  # type: ignore[attr-defined]  # where load_state_dict looks for it
    return renamed


def _without(name: str, *but: str) -> str:
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in PREFIXES or part in but), last])


def _only_children(names: Iterable[str]) -> set[tuple[str, ...]]:
    """The paths below which there is ``module`` and nothing else."""
    children = defaultdict(set)
    for name in names:
        parts = tuple(name.split("."))
        for depth in range(len(parts)):
            children[parts[:depth]].add((parts[depth], depth == len(parts) - 1))
    return {path for path, below in children.items() if below == {(_REAL, False)}}


def _dropped(name: str, alone: set[tuple[str, ...]]) -> str:
    parts = tuple(name.split("."))
    return ".".join(part for depth, part in enumerate(parts) if not (part == _REAL and depth < len(parts) - 1 and parts[:depth] in alone))
