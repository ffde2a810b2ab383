"""How the entries of a file fit a model: which stands for which, what is cast, what is tied, and what does not fit. Nothing is written here."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nbddp.checkpoint.memory import expanded, memory_of, place_of
from nbddp.checkpoint.misfit import Misfit, Misfits
from nbddp.checkpoint.names import bare, match, module_names, own_names, translated, versions_for, wrappers_in
from nbddp.checkpoint.normalization import swap_hint
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nbddp.checkpoint.contents import Found

_NormBase = nn.modules.batchnorm._NormBase


@dataclass(slots=True)
class Fit:
    """What a file is to a model.

    Attributes:
        state: what to give to torch, under the model's own names.
        misfits: what does not fit, by names without wrappers.
        unfit: the model's own names of the entries in `state` that don't fit it.
        casts: how many tensors change their dtype, by both.
        infinite: those in which finite values become inf by that.
        wrappers: parts that were left out of the file's names.
        below: the leading attribute that was left out of them.
    """

    state: OrderedDict[str, Any]
    misfits: Misfits
    unfit: set[str] = field(default_factory=set)
    casts: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)
    infinite: list[str] = field(default_factory=list)
    wrappers: set[str] = field(default_factory=set)
    below: str = ""


class Target:
    """A model that something is to be loaded into: its entries, their names without wrappers, and which of them are one tensor.

    Raises:
        CheckpointError: for a model whose tensors have no memory yet, or can't be written to.
    """

    def __init__(self, model: nn.Module) -> None:
        _check_ready(model)
        self.model = model
        self.state: dict[str, Any] = model.state_dict()  # without arguments: a method of the model's own may take none
        _check_writable(model, self.state)
        self.names = own_names(model, self.state)
        self.paths = module_names(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        self.modules = {plain: modules[raw] for raw, plain in self.paths.items()}  # wrappers come first, and what they hold wins
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.fleeting = {bare(name) for name in buffers if name not in self.state}

    def ties(self) -> list[list[str]]:
        """Groups of names, as torch knows them, that are one tensor."""
        groups = defaultdict(list)
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor) and (place := place_of(value)) is not None:
                groups[place].append(name)
        return [names for names in groups.values() if len(names) > 1]

    def overwritten(self, given: Mapping[str, Any]) -> list[str]:
        """Names of those that are parts or other views of one memory, and that do not hold what they were given: another was written over them."""
        views = defaultdict(list)
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor) and (memory := memory_of(value)) is not None:
                views[memory].append(name)
        shared = [name for names in views.values() if len(names) > 1 for name in names if name in given]
        return [name for name in shared if not same(self.state[name], given[name].to(self.state[name].device, self.state[name].dtype))]

    def decides_itself(self) -> bool:
        """Whether code other than torch's own takes part in loading, so that only loading tells what fits."""
        plain = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
        return type(self.model).load_state_dict is not nn.Module.load_state_dict or any(
            module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or type(module)._load_from_state_dict not in plain
            for module in self.model.modules()
        )


def _check_ready(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            message = f"{type(model).__name__} can't be loaded into yet: {name} is uninitialised; let the model see one batch first"
            raise CheckpointError(message)
        if tensor.is_meta:
            message = (
                f"{type(model).__name__} can't be loaded into yet: {name} is on the meta device, without memory; model.to_empty(device='cpu') gives it some"
            )
            raise CheckpointError(message)


def _check_writable(model: nn.Module, state: Mapping[str, Any]) -> None:
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            message = f"{type(model).__name__} can't be loaded into: {name} was made in torch.inference_mode(), and can be written to only within it"
            raise CheckpointError(message)
        if expanded(tensor):
            message = f"{type(model).__name__} can't be loaded into: elements of {name} are one in memory, as expand() makes them; .clone() separates them"
            raise CheckpointError(message)


def fit(target: Target, found: Found, *, strict: bool = True) -> Fit:
    """Compare a model with what was found in a file.

    Raises:
        CheckpointError: where names can be assigned in more than one way.
    """
    result = _fit(target, found.state)
    misfits = result.misfits
    if found.lightning and misfits.of("missing", "unexpected"):
        below = {lead: _fit(target, found.state, lead) for lead in _leads(found.state)}
        fits = {lead: inner for lead, inner in below.items() if not inner.misfits.of("missing", "shape", "dtype", "tied")}
        whole = any(not inner.misfits for inner in fits.values())
        if len(fits) == 1 and (whole or not strict):
            return next(iter(fits.values()))
        misfits.hints += _lead_hints(list(fits))
        misfits.explained = bool(fits)
    names = {"missing": set(misfits.of("missing")), "unexpected": set(misfits.of("unexpected")), "other": set(misfits.of("shape", "dtype", "tied"))}
    if (hint := swap_hint(target.modules, target.names.values(), names, found.norm)) is not None:
        misfits.hints.append(hint)
        misfits.solved = True
    for name, kind in found.norm.items():
        became = getattr(target.modules.get(name), "batch_norm_became", None)  # where a swap notes it
        if {kind, became} == {"layer", "group"}:
            misfits.rows.append(Misfit("norm", name, f"became {became} in the model, and {kind} in that of the file: other numbers from the same weights"))
    return result


def _leads(state: Collection[str]) -> list[str]:
    """The attributes that names begin with."""
    return list(dict.fromkeys(short.split(".", 1)[0] for name in state if "." in (short := bare(name))))


def _lead_hints(leads: list[str]) -> list[str]:
    """What is said where the model may be an attribute of what the file is of, and it is not clear that it is."""
    if len(leads) > 1:
        first = f"{leads[0]}."
        pick = f"{{name.removeprefix({first!r}): value for name, value in nbddp.load_checkpoint(FILE).items() if name.startswith({first!r})}}"
        return [f"what is below {'. and below '.join(leads)}. in the file would each fit: choose one, as in model.load_state_dict({pick})"]
    return [f"what is below {lead}. in the file fits, and there is more beside it: strict=False loads that part alone" for lead in leads]


def _fit(target: Target, state: Mapping[str, Any], below: str = "") -> Fit:
    rest = {name: _below(name, below) for name in state}
    names = {other: name for name, other in rest.items() if other is not None}
    pairs = {names[other]: raw for other, raw in match(target.names, names).items()}
    given: OrderedDict[str, Any] = OrderedDict((raw, state[name]) for name, raw in pairs.items())
    rows: list[Misfit] = []
    result = Fit(given, Misfits(rows, {}, {}, modules=frozenset(target.modules)), below=below)
    versions = None
    if (said := getattr(state, "_metadata", None)) is not None:
        versions = versions_for(target.paths, pairs, said, below=below)
        given._metadata = versions  # type: ignore[attr-defined]  # where load_state_dict looks for it
    filled = _fill_ties(target, given, rows)
    for raw, own in target.state.items():
        plain = target.names[raw]
        if raw not in given:
            if not _may_be_missing(target, raw, versions):
                rows.append(Misfit("missing", plain))
        elif (row := _misfit(plain, own, given[raw])) is not None:
            rows += [] if raw in filled else [row]
            result.unfit.add(raw)
        elif raw not in filled and isinstance(own, torch.Tensor) and own.dtype != given[raw].dtype:
            result.casts[given[raw].dtype, own.dtype] += 1
            result.infinite += [plain] if _becomes_infinite(given[raw], own.dtype) else []
    raw_of = {plain: raw for raw, plain in target.paths.items()}
    for name, other in rest.items():
        if name not in pairs and bare(other or name) not in target.fleeting:
            rows.append(Misfit("unexpected", bare(other or name)))
            if other is not None:
                given.setdefault(translated(other, raw_of), state[name])
    result.wrappers = {part for name in pairs for part in wrappers_in(name)} - {part for name in target.names.values() for part in wrappers_in(name)}
    result.misfits.own = {target.names[raw]: _shape(value) for raw, value in target.state.items()}
    result.misfits.file = {bare(other or name): _shape(state[name]) for name, other in rest.items()}
    return result


def _below(name: str, lead: str) -> str | None:
    """A name of the file without the attribute that it begins with; None where it begins with another."""
    if not lead:
        return name
    parts = name.split(".")
    if not bare(name).startswith(f"{lead}."):
        return None
    parts.remove(lead)
    return ".".join(parts)


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else None


def _may_be_missing(target: Target, raw: str, versions: Mapping[str, Any] | None) -> bool:
    """Whether torch itself does without an entry: files of old versions have no counter of batches."""
    path, _, last = raw.rpartition(".")
    module = target.modules.get(target.paths.get(path, path))
    if last != "num_batches_tracked" or not isinstance(module, _NormBase):
        return False
    version = ((versions or {}).get(path) or {}).get("version")
    return version is None or version < 2


def _fill_ties(target: Target, given: OrderedDict[str, Any], rows: list[Misfit]) -> set[str]:
    """Give a tensor that the model has under several names all of them, where the file has one; say where it has different values for them.

    Returns the names that the file lacks.
    """
    filled = set()
    for names in target.ties():
        there = [name for name in names if name in given]
        for name in there[1:]:
            if _shape(given[name]) == _shape(given[there[0]]) and not same(given[name], given[there[0]]):
                other = target.names[there[0]]
                rows.append(Misfit("tied", target.names[name], f"is one tensor with {other} in the model, and the file has different values for them"))
        for name in names if there else ():
            if name not in given:
                given[name] = given[there[0]]
                filled.add(name)
    return filled


def same(one: object, other: object) -> bool:
    """Whether two tensors have the same values; nan is the same as nan."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    if one is other or ((place := place_of(one)) is not None and place == place_of(other)):
        return True
    if one.dtype != other.dtype:
        one, other = (value.detach().to(torch.complex128 if value.is_complex() else torch.float64) for value in (one, other))
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _misfit(name: str, own: object, value: object) -> Misfit | None:
    if not isinstance(own, torch.Tensor):
        return None
    if not isinstance(value, torch.Tensor):
        return Misfit("dtype", name, f"the model has a tensor, the file a {type(value).__name__}")
    if value.is_meta:
        return Misfit("dtype", name, "the file has no values for it: it was on the meta device")
    if (mine := _storage(own)) != (theirs := _storage(value)):
        return Misfit("dtype", name, f"the model has a {mine} tensor, the file a {theirs} one")
    if own.shape != value.shape and not (own.dim() == 0 and value.shape == (1,)):  # as torch before 0.4 wrote scalars
        return Misfit("shape", name, f"the model has {tuple(own.shape)}, the file {tuple(value.shape)}")
    if not _can_cast(value, own.dtype):
        return Misfit("dtype", name, f"the model has {_dtype(own)}, which can't hold the {_dtype(value)} of the file")
    return None


def _storage(tensor: torch.Tensor) -> str:
    """How a tensor keeps its values; torch copies none into one that keeps them otherwise."""
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else "dense" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _becomes_infinite(value: torch.Tensor, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or value.layout is not torch.strided:
        return False
    return bool((value.detach().to(dtype).double().isinf() & value.detach().double().isfinite()).any())


def _can_cast(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether values survive a cast: never from complex to real; to integers and bool where they stay what they are; between floats always."""
    if value.dtype == dtype or dtype.is_complex:
        return True
    if value.is_complex():
        return False
    if dtype.is_floating_point or value.is_quantized or value.layout is not torch.strided:
        return True
    cast = value.detach().to(dtype)
    return same(cast.to(value.dtype), value.detach()) and same(cast.double(), value.detach().double())  # integers wrap around, and back
