"""Whether a swap is right for a model that keeps features apart: by its masks, or by autograd for an example. Runs in the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import ConfigError
from nbddp.norm.applied import shown, swapped
from nbddp.norm.dependence import calls, dependencies, gained
from nbddp.norm.layers import MIXING
from nbddp.norm.masked import mixing, networks
from nbddp.wrappers import named_modules, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn


def mixed(kinds: Mapping[str, str]) -> list[str]:
    """The layers that come to mix the features of a sample."""
    return [name for name, kind in kinds.items() if kind in MIXING]


def check_masks(model: nn.Module, kinds: Mapping[str, str], remedy: str = "example= verifies by autograd what depends on what") -> None:
    """Refuse what mixes the features of a sample between masked layers that keep them apart.

    Raises:
        ConfigError: names the layers, the reason and what works.
    """
    if not (found := mixing(unwrapped(model), mixed(kinds))):
        return
    first = next(iter(found))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    reason = found[first].removeprefix(f"{first} ")
    message = f"{kinds[first]} is refused for {shown(first)}{others}: it {reason}. sync and none work there; skip= leaves layers out; {remedy}"
    raise ConfigError(message)


def verify(model: nn.Module, kinds: Mapping[str, str], example: Any, device: torch.device) -> str:
    """Compare what depends on what before and after, in the model and in each of its masked networks.

    Of several transforms one after the other every output depends on every input anyhow. Networks that the example does not run through are judged by
    their masks.

    Returns:
        the words for what was looked at.

    Raises:
        ConfigError: names an output and the input that it would come to see.
    """
    plain = unwrapped(model)
    modules, nets = dict(named_modules(plain)), networks(plain, mixed(kinds))
    examples = {"": example, **calls(plain, example, nets)}
    for unseen in (name for name in nets if name not in examples):
        way = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in unseen.split("."))
        remedy = f"the example does not run through {unseen}: give an example of that network, swap_norm(model{way}, ..., example=...)"
        check_masks(plain, {name: kind for name, kind in kinds.items() if name.startswith(f"{unseen}.")}, remedy)
    before = {name: dependencies(modules[name], given) for name, given in examples.items()}
    with swapped(plain, kinds, device):
        after = {name: dependencies(modules[name], given) for name, given in examples.items()}
    for name, of_it in before.items():
        if (gain := gained(of_it, after[name])) is not None:
            what = " and ".join(dict.fromkeys(kind for kind in kinds.values() if kind in MIXING)) or "this swap"
            where = f" of {name}" if name else ""
            message = f"{what} is refused: {gain}{where}, which it does not before the swap. sync and none change no dependency; skip= leaves layers out"
            raise ConfigError(message)
    return f"no output came to depend on an input that it did not depend on before: looked at {before[''].checked}"
