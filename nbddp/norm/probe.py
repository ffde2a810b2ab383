"""Running a copy of a model on an example, with its own weights and with random ones, for what its outputs depend on. Runs in the kernel."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbddp.errors import ConfigError
from nbddp.norm.masks import zeroed
from nbddp.norm.nested import mapped, tensors_in
from nbddp.wrappers import named_modules, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SAMPLES, FEW_SAMPLES = 8, 2
"""Samples of the example that are run at once, fewer being repeated: usually, and for large inputs."""

MOST_OUTPUTS, FEW_OUTPUTS = 256, 64
"""Output entries of a sample that are differentiated, a seeded choice of more: usually, and for large inputs."""

LARGE = 1024
"""Input entries of a sample above which an input is large: an image, whose positions are alike, and whose networks are slow."""

_DRAWS = 7  # the model's own weights, then random ones, signed and positive in turn
_BATCHED_ELEMENTS = 2**23  # input gradients held at once, over samples and output entries
_ENTRIES_AT_ONCE = 64
_NOISE = 1e-14  # of the largest gradient of an output, in float64: what is below is rounding


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the inputs or outputs: where it is found, and the shape of what belongs to a sample, or of all of it where it has no samples."""

    path: str
    shape: tuple[int, ...]
    by_sample: bool

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Probe:
    """A copy of a model and an example for it, as they are run."""

    model: nn.Module
    example: Any
    samples: int
    dtype: torch.dtype | None
    most_outputs: int

    def run(self) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...], torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """The outputs, the inputs, which output entries were differentiated, and what they depend on for each draw of the weights."""
        generator = torch.Generator().manual_seed(0)
        masks = {id(parameter) for parameter in self.model.parameters() if not parameter.requires_grad and _is_mask(parameter)}
        kept = [pair for module in self.model.modules() for pair in zeroed(module)]
        self.model.requires_grad_(False)
        inputs, outputs = self._forward(self.example, seed=0)
        leaves = self._leaves(inputs), self._leaves(outputs)
        rows = _chosen(sum(leaf.entries for leaf in leaves[1]), self.most_outputs)
        full = torch.zeros(len(rows), dtype=torch.bool)
        draws = [self._table(inputs, outputs, rows, full)]
        del inputs, outputs
        for draw in range(1, _DRAWS):
            _randomize([parameter for parameter in self.model.parameters() if id(parameter) not in masks], generator, positive=draw % 2 == 0)
            for weight, mask in kept:
                weight.mul_(mask)
            if draw % 2 == 0:
                _center(self.model)
            moved = mapped(self.example, lambda tensor: _moved(tensor, generator) if differentiable(tensor) else tensor)
            if draws[-1] is not None:
                full = draws[-1].all(1)
            try:
                inputs, outputs = self._forward(moved, seed=draw)
                draws.append(self._table(inputs, outputs, rows, full) if self._leaves(outputs) == leaves[1] else None)
            except Exception:  # noqa: BLE001 - random weights may be none that the user's model can work with; its own ones are
                draws.append(None)
        if all(draw is None for draw in draws):
            message = f"{type(self.model).__name__} gives no finite outputs with this example, so that autograd cannot tell what depends on what"
            raise ConfigError(message)
        return leaves[1], leaves[0], rows, tuple(draws)

    def _forward(self, example: Any, seed: int) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
        """The tensors that are differentiated, inputs and outputs, by path."""
        torch.default_generator.manual_seed(seed)  # a model that draws in its forward draws the same before and after a change
        leaves = mapped(example, lambda tensor: tensor.detach().clone().requires_grad_(differentiable(tensor)))
        # A model may write into what it is given, which autograd refuses for leaves.
        args = mapped(leaves, lambda tensor: tensor.clone())
        output = called(self.model, args)
        outputs = [(path, tensor) for path, tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex()]
        if not outputs:
            message = f"{type(self.model).__name__} returns no floating-point tensors but {in_short(output)}. {remedy(self.model)}"
            raise ConfigError(message)
        return [(path, tensor) for path, tensor in tensors_in(leaves) if differentiable(tensor)], outputs

    def _leaves(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Leaf, ...]:
        found = []
        for path, tensor in tensors:
            by_sample = tensor.dim() > 0 and tensor.shape[0] == self.samples
            found.append(Leaf(path, tuple(tensor.shape[1:] if by_sample else tensor.shape), by_sample))
        return tuple(found)

    def _table(
        self, inputs: list[tuple[str, torch.Tensor]], outputs: list[tuple[str, torch.Tensor]], rows: torch.Tensor, full: torch.Tensor
    ) -> torch.Tensor | None:
        """What the outputs in some rows depend on; those that are known to depend on everything, as in dense networks, cost nothing."""
        if not all(bool(tensor.isfinite().all()) for _, tensor in outputs):
            return None
        leaves = [tensor for _, tensor in inputs]
        by_sample = [leaf.by_sample for leaf in self._leaves(inputs)]
        width = sum(leaf.entries for leaf in self._leaves(inputs))
        at_once = max(1, min(_ENTRIES_AT_ONCE, _BATCHED_ELEMENTS // max(1, width * self.samples)))
        table = full[:, None].repeat(1, width)
        start = 0
        for (_, tensor), leaf in zip(outputs, self._leaves(outputs), strict=True):
            real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
            # In eval mode samples are apart: the gradient of the sum over samples has each sample's own gradient in its place.
            flat = real.reshape(self.samples if leaf.by_sample else 1, -1).sum(0)
            inside = ((rows >= start) & (rows < start + leaf.entries) & ~full).nonzero().flatten()
            for block in inside.split(at_once) if flat.requires_grad else ():
                picked = flat[(rows[block] - start).to(flat.device)]
                table[block] = self._depends(picked, leaves, by_sample)
            start += leaf.entries
        return table

    def _depends(self, picked: torch.Tensor, leaves: list[torch.Tensor], by_sample: list[bool]) -> torch.Tensor:
        """Booleans (picked outputs, input entries)."""
        count = len(picked)
        parts = []
        for grad, leaf, apart in zip(_gradients(picked, leaves), leaves, by_sample, strict=True):
            found = torch.zeros_like(leaf).expand(count, *leaf.shape) if grad is None else grad
            parts.append(found.reshape(count, self.samples if apart else 1, -1).abs().cpu())
        largest = torch.stack([part.nan_to_num(0, 0, 0).flatten(1).amax(1) for part in parts if part.numel()]).amax(0)
        noise = (largest * (_NOISE if self.dtype is torch.float64 else 0))[:, None, None]
        return torch.cat([(~(part <= noise)).any(1) for part in parts], 1)  # nan is not below


def _gradients(picked: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of each of some outputs, stacked; at once where every operation of the model can be batched, else one by one."""
    unit = torch.eye(len(picked), dtype=picked.dtype, device=picked.device)
    try:
        return torch.autograd.grad(picked, leaves, unit, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except (RuntimeError, NotImplementedError):
        each = [torch.autograd.grad(picked, leaves, one, retain_graph=True, allow_unused=True) for one in unit]
    return [torch.stack([found for found in column if found is not None]) if column[0] is not None else None for column in zip(*each, strict=True)]


def copy_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy to work on, in eval mode."""
    plain = unwrapped(model)
    # What a hook makes of parameters, as weight norm and pruning do, has a history and can't be copied with it; it is made anew in each forward.
    made = [tensor for module in plain.modules() for tensor in vars(module).values() if isinstance(tensor, torch.Tensor) and not tensor.is_leaf]
    try:
        with torch.no_grad():
            copied = copy.deepcopy(plain, {id(tensor): tensor.detach().clone() for tensor in made})
    except Exception as error:
        message = f"{type(unwrapped(model)).__name__} cannot be copied, and example= works on a copy: {type(error).__name__}: {error}"
        raise ConfigError(message) from error
    copied.eval()
    return copied.double() if dtype is torch.float64 else copied


def prepared(example: Any, samples: int, size: int, dtype: torch.dtype | None) -> Any:
    """The example with a number of samples, the first ones, in a dtype."""
    rows = torch.arange(size) % samples

    def prepare(tensor: torch.Tensor) -> torch.Tensor:
        taken = tensor.detach() if size == samples else tensor.detach()[rows.to(tensor.device)]
        return taken.to(dtype) if dtype is not None and differentiable(tensor) else taken

    return mapped(example, prepare)


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a parameter that is not trained consists of zeros and ones."""
    return tensor.dim() > 1 and not tensor.is_meta and bool(((tensor == 0) | (tensor == 1)).all() and tensor.any() and not tensor.all())


def _randomize(parameters: Sequence[nn.Parameter], generator: torch.Generator, *, positive: bool) -> None:
    """Random values of moderate size in place of parameters.

    Positive ones keep units alive that signed ones may leave dead for all samples.
    """
    for parameter in parameters:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        size = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        if not positive:
            size = size * (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1) * math.sqrt(fan_in)
        parameter.copy_(size / max(1, fan_in))


def _center(model: nn.Module) -> None:
    """Let running means be zero, for weights that are positive."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.running_mean.zero_()


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Inputs near those of the example, of the same sign where they have one in common."""
    spread = 0.1 * tensor.std() if tensor.numel() > 1 else 0.1
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor) * spread
    return tensor + noise.abs() if bool((tensor >= 0).all()) else tensor + noise


def _chosen(entries: int, most: int) -> torch.Tensor:
    """The output entries that are looked at, in order: the first, the last, and a seeded choice of the others."""
    if entries <= most:
        return torch.arange(entries)
    order = torch.randperm(entries - 2, generator=torch.Generator().manual_seed(0)) + 1
    return torch.cat([torch.tensor([0, entries - 1]), order[: most - 2]]).sort().values


def called(model: nn.Module, args: Any) -> Any:
    """Call a model with a tensor, a tuple of positional arguments or a dict of named ones."""
    return model(**args) if isinstance(args, Mapping) else model(*(args if isinstance(args, list | tuple) else [args]))


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether autograd can tell what depends on an input."""
    return tensor.is_floating_point()


def in_short(value: Any) -> str:
    """What something is, in words."""
    return f"a {type(value).__name__}"


def remedy(model: nn.Module) -> str:
    """Which call would do where a model is no function of tensors: that of the network around its first BatchNorm layer."""
    start = "example= needs a function from tensors to tensors"
    model = unwrapped(model)
    name = next((name for name, module in named_modules(model) if isinstance(module, _BatchNorm)), "")
    parts = name.split(".")[:-1]
    while parts and not _is_network(model, parts):
        parts.pop()
    if not parts:
        return f"{start}: pass the sub-module that is one"
    way = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
    return f"{start}: pass the sub-module that is one, e.g. swap_norm(model{way}, ..., example=...)"


def _is_network(model: nn.Module, parts: Sequence[str]) -> bool:
    """Whether a module has layers other than those around an activation, and is not one block of a list."""
    owner = model.get_submodule(".".join(parts[:-1]))
    module = model.get_submodule(".".join(parts))
    layers = [layer for layer in module.modules() if layer._parameters and not isinstance(layer, _BatchNorm)]
    return bool(layers) and not isinstance(module, nn.ModuleList) and not isinstance(owner, nn.ModuleList)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model without a trace: random number streams, default dtype, gradient mode and warnings are as before afterwards."""
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    compiled = any("_orig_mod" in module._modules for module in model.modules())
    python, array, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(sorted(device.index for device in devices)),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext(),  # parts that are compiled
        torch.backends.cudnn.flags(enabled=False),  # its recurrent layers have no backward in eval mode
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
            torch.set_default_dtype(dtype)
