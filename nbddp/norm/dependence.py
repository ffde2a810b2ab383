"""Which outputs of a model depend on which inputs, by autograd on a copy, and which dependencies a change of the model adds. Runs in the kernel."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbddp.errors import ConfigError
from nbddp.norm.nested import mapped, tensors_in
from nbddp.norm.probe import (
    FEW_OUTPUTS,
    FEW_SAMPLES,
    LARGE,
    MOST_OUTPUTS,
    SAMPLES,
    Probe,
    called,
    copy_of,
    differentiable,
    in_short,
    prepared,
    remedy,
    undisturbed,
)
from nbddp.wrappers import named_modules, unwrapped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from nbddp.norm.probe import Leaf


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """Which entries of the outputs depend on which entries of the inputs, from `dependencies`."""

    outputs: tuple[Leaf, ...]
    inputs: tuple[Leaf, ...]
    rows: torch.Tensor
    """Positions of the output entries that were differentiated, over all outputs one after the other."""
    draws: tuple[torch.Tensor | None, ...]
    """For each draw of the weights, booleans (rows, input entries); None where the outputs were not finite."""

    @property
    def table(self) -> torch.Tensor:
        """Booleans (rows, input entries): whether an output depends on an input with any of the weights."""
        return _united([draw for draw in self.draws if draw is not None])

    @property
    def checked(self) -> str:
        """How much of the outputs was looked at, in words."""
        total = sum(leaf.entries for leaf in self.outputs)
        return f"all {total} outputs" if len(self.rows) == total else f"{len(self.rows)} of {total} outputs (a seeded choice)"


@dataclass(frozen=True, slots=True)
class Gain:
    """A dependency that was added, in words: ``output 3``, ``input 5``; entries of tensors with further dimensions as ``output (3, 0, 1)``."""

    output: str
    input: str

    def __str__(self) -> str:
        return f"{self.output} would depend on {self.input}"


def dependencies(model: nn.Module, example: Any) -> Dependencies:
    """Compute which entries of a model's outputs depend on which entries of its inputs, within a sample.

    Runs a copy of the model in eval mode (BatchNorm mixes nothing then), in float64 where the model can, with its own weights and with random ones in place of
    all parameters, so that units that are dead, layers that start at zero and gates that are closed hide nothing; buffers, such as masks, stay. The model, its
    gradients and the random number streams are left alone. An entry whose gradient is nan counts as one that depends.

    Costs 7 forwards of 8 samples with, in each, a backward for each output entry of a sample that has not been seen to depend on everything. Of more than 256
    output entries a seeded choice is looked at, with the first and the last; of models of images (over 1024 input entries a sample) 64, on 2 samples.

    Args:
        model: maps tensors to tensors; wrappers are taken off.
        example: a tensor, a tuple of positional arguments, or a dict of named ones, nested at will, with the samples in the first dimension. Floating-point
            tensors are differentiated; what else there is goes in as it is.

    Raises:
        ConfigError: where the model can't be copied, raises with the example, or returns no tensors, and where the example has no floating-point tensors.
    """
    inputs = tensors_in(example)
    samples = next((tensor.shape[0] for _, tensor in inputs if differentiable(tensor) and tensor.dim()), 0)
    if not samples:
        message = (
            f"example={in_short(example)}: it must hold samples in the first dimension of a floating-point tensor, for autograd to tell what depends on it"
        )
        raise ConfigError(message)
    large = sum(tensor.numel() for _, tensor in inputs if differentiable(tensor)) > LARGE * samples
    tried = FEW_SAMPLES if large else SAMPLES
    sizes = {tried, samples} if all(tensor.dim() and tensor.shape[0] == samples for _, tensor in inputs) else {samples}
    with undisturbed(model):
        failure: Exception | None = None
        usual = torch.get_default_dtype()
        for dtype in (torch.float64, None):
            torch.set_default_dtype(dtype or usual)  # for tensors that a model makes in its forward
            for size in sorted(sizes, key=lambda size: size != tried):
                try:
                    return Dependencies(
                        *Probe(copy_of(model, dtype), prepared(example, samples, size, dtype), size, dtype, FEW_OUTPUTS if large else MOST_OUTPUTS).run()
                    )
                except ConfigError:
                    raise
                except Exception as error:  # noqa: BLE001 - the model is the user's; the next try may suit it better, the last one is told
                    failure = error
    message = f"{type(unwrapped(model)).__name__} raises {type(failure).__name__} with this example: {failure}. {remedy(model)}"
    raise ConfigError(message) from failure


def calls(model: nn.Module, example: Any, names: Collection[str]) -> dict[str, Any]:
    """The arguments with which a model calls its sub-modules: an example for `dependencies` of each, from its first call.

    Runs a copy of the model in eval mode, as `dependencies` does.

    Args:
        model: as for `dependencies`.
        example: of the model.
        names: of sub-modules, as in ``model.named_modules()`` without the names of wrappers. Those that are not called are left out.

    Raises:
        ConfigError: where the model can't be copied, or raises with the example.
    """
    found: dict[str, Any] = {}
    with undisturbed(model):
        copied = copy_of(model, None)
        for name, module in named_modules(copied):
            if name in names:
                module.register_forward_pre_hook(functools.partial(_record, found, name), with_kwargs=True)
        try:
            called(copied, mapped(example, lambda tensor: tensor.detach().clone()))
        except Exception as error:
            message = f"{type(unwrapped(model)).__name__} raises {type(error).__name__} with this example: {error}. {remedy(model)}"
            raise ConfigError(message) from error
    return found


def _record(found: dict[str, Any], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name not in found:
        named = inspect.signature(module.forward).bind(*args, **kwargs).arguments if kwargs else args
        found[name] = mapped(named, lambda tensor: tensor.detach().clone())


def gained(before: Dependencies, after: Dependencies) -> Gain | None:
    """The first dependency that a change of the model added; None where it added none.

    Args:
        before: of the model as it was.
        after: of the changed model, with the same example.

    Raises:
        ConfigError: where no weights give finite outputs before and after.
    """
    assert before.outputs == after.outputs
    assert before.inputs == after.inputs
    both = [(old, new) for old, new in zip(before.draws, after.draws, strict=True) if old is not None and new is not None]
    if not both:
        message = "the changed model gives no finite outputs where the model as it was does, so that autograd cannot tell what depends on what"
        raise ConfigError(message)
    found = (_united([new for _, new in both]) & ~_united([old for old, _ in both])).nonzero()
    if not len(found):
        return None
    row, column = (int(index) for index in found[0])
    return Gain(_entry("output", before.outputs, int(before.rows[row])), _entry("input", before.inputs, column))


def _united(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    united = tables[0]
    for table in tables[1:]:
        united = united | table
    return united


def _entry(what: str, leaves: Sequence[Leaf], position: int) -> str:
    """An entry of all inputs or outputs, in words."""
    for leaf in leaves:
        if position < leaf.entries:
            index = [int(part) for part in np.unravel_index(position, leaf.shape)] if leaf.shape else []
            name = what if len(leaves) == 1 or not leaf.path else f"{what}{leaf.path}"
            if not index:
                return name
            at = str(index[0]) if len(index) == 1 else str(tuple(index))
            return f"{name} {at}" if name == what else f"entry {at} of {name}"
        position -= leaf.entries
    raise AssertionError(position)
