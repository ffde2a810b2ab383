"""Writing a state dict into a model in place, all of it or nothing, and the words for what was done."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.checkpoint.contents import Found
from nbddp.checkpoint.fitting import Target, fit
from nbddp.checkpoint.misfit import SHOWN, Misfit, Misfits, readable
from nbddp.checkpoint.names import bare
from nbddp.checkpoint.undo import Undo
from nbddp.checkpoint.writing import first_line
from nbddp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

LOAD_HINT = "the model is unchanged"
_NAMES = ("missing", "unexpected")
_LINE = 300
_NAMED = 4


@dataclass(slots=True)
class Loaded:
    """What was written into a model.

    Attributes:
        found: the state dict and what its file says.
        entries: how many entries of the file went into the model.
        left: what did not fit and was left out, which `strict=False` allows.
        casts: how many tensors were cast, by the dtypes of file and model.
        infinite: names of those in which finite values became inf by that.
        wrappers: parts that were left out of the file's names.
        below: the attribute that was left out of them.
    """

    found: Found
    entries: int
    left: Misfits = field(default_factory=lambda: Misfits([], {}, {}))
    casts: Counter[tuple[torch.dtype, torch.dtype]] = field(default_factory=Counter)
    infinite: list[str] = field(default_factory=list)
    wrappers: set[str] = field(default_factory=set)
    below: str = ""

    def facts(self) -> list[str]:
        """Where in training the file is from, and what became other than in the file."""
        at = [f"{name} {value}" for name, value in (("epoch", self.found.epoch), ("step", self.found.step)) if value is not None]
        names = [f"names without {' and '.join(f'{part}.' for part in sorted(self.wrappers))}"] if self.wrappers else []
        casts = [f"{count} from {_short(source)} to {_short(target)}" for (source, target), count in self.casts.items()]
        return [*([", ".join(at)] if at else []), *names, *casts, *self.remarks()]

    def remarks(self) -> list[str]:
        """What a caller could not have expected."""
        said = []
        if self.below:
            said.append(f"from what is below {self.below}. in it")
        if self.found.others:
            there = ".".join(self.found.where)
            said.append(f"from its entry {there}, not {' or '.join(self.found.others)}")
        if self.infinite:
            more = f" and {len(self.infinite) - _NAMED} more" if len(self.infinite) > _NAMED else ""
            said.append(f"values became inf, which the model's dtype can't hold: {', '.join(map(readable, self.infinite[:_NAMED]))}{more}")
        if self.left:
            said.append(f"{self.entries} {'entry' if self.entries == 1 else 'entries'} loaded, left out:\n  " + "\n  ".join(self.left.lines()))
        return said


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool, what: str, undo: bool = True) -> Loaded:
    """Write a state dict into a model in place: device, dtype, mode and ties of the model stay.

    Args:
        model: what to write to.
        state: its entries, under names with any wrappers.
        strict: whether every name must be in both, and fit; otherwise what does not is left out.
        what: what the state dict is called where it does not fit.
        undo: keep a copy of the model on the CPU until it is done, so that whatever interrupts it leaves the model as it was.

    Raises:
        CheckpointError: where it does not fit; the model is unchanged then.
    """
    return load_found(model, Found(state), strict=strict, what=what, undo=undo)


def load_found(model: nn.Module, found: Found, *, strict: bool, what: str, undo: bool = True) -> Loaded:
    """`load_state` for what was found in a file."""
    target = Target(model)
    fitted = fit(target, found, strict=strict)
    unfit, asks = fitted.misfits, target.decides_itself()
    fits = set(fitted.state) & set(target.state) - fitted.unfit
    if not strict:
        refused = bool(unfit.of("tied")) or bool(target.state and not fits and not asks)
        for name in fitted.unfit:
            del fitted.state[name]
    else:
        refused = bool(unfit.of("tied", "dtype") if asks else unfit)
    if refused:
        raise CheckpointError(_refusal(model, what, unfit))
    kept = Undo(model) if undo else None
    try:
        answer = model.load_state_dict(copy.copy(fitted.state), strict=False)  # a method of the model's own may take entries out
        tells = hasattr(answer, "missing_keys")
        if strict and not tells:
            model.load_state_dict(fitted.state, strict=True)  # which raises where it would have told
    except BaseException as error:
        if kept is not None:
            kept.restore()
        if not isinstance(error, Exception):
            raise
        unfit.rows = [row for row in unfit.rows if row.kind not in _NAMES]
        raise CheckpointError(_refusal(model, what, unfit, error)) from error  # what torch, and the user's hooks and extra states, make of a file
    if not tells:
        unfit.rows = [row for row in unfit.rows if not strict or row.kind not in _NAMES]
    elif asks:  # code of the model's own knows names that are in no state dict
        left = [] if strict else [row for row in unfit.rows if row.kind not in _NAMES]
        left += [Misfit("missing", target.names.get(name, name)) for name in answer.missing_keys if name not in fitted.unfit]
        unfit.rows = left + [Misfit("unexpected", bare(name)) for name in answer.unexpected_keys]
    over = [] if asks else target.overwritten({name: fitted.state[name] for name in fits})
    unfit.rows += [Misfit("tied", target.names[name], "shares memory with another entry, and the file has different values for them") for name in over]
    if over or (strict and unfit):
        if kept is not None:
            kept.restore()
        raise CheckpointError(_refusal(model, what, unfit))
    return Loaded(found, len(fits), unfit, fitted.casts, fitted.infinite, fitted.wrappers, fitted.below)


def _refusal(model: nn.Module, what: str, unfit: Misfits, error: Exception | None = None) -> str:
    of_torch = isinstance(error, RuntimeError) and str(error).startswith("Error(s) in loading state_dict")
    if error is None or (of_torch and unfit):
        shown = "\n  ".join(unfit.lines())
        return f"{what} does not fit {type(model).__name__}; {LOAD_HINT}:\n  {shown}"
    said = _cut(str(error)) if of_torch else f"{type(error).__name__}: {first_line(error)}"
    return f"{what} could not be loaded into {type(model).__name__}; {LOAD_HINT}: {said}"


def _cut(text: str) -> str:
    """The lines of torch, of which there may be one for each entry of a model, as a short table."""
    first, *rest = (line.strip() for line in text.strip().splitlines())
    more = [f"and {len(rest) - SHOWN} more"] if len(rest) > SHOWN else []
    return "\n  ".join([first, *(readable(line, _LINE) for line in rest[:SHOWN]), *more])


def misfits(model: nn.Module, state: Mapping[str, Any] | Found) -> list[str]:
    """What keeps a state dict from fitting a model, a line each; empty where nothing does. The model is not touched.

    Args:
        model: what it is to fit.
        state: entries under names with any wrappers, or what was found in a file.
    """
    found = state if isinstance(state, Found) else Found(state)
    try:
        target = Target(model)
        fitted = fit(target, found)
        if fitted.misfits and target.decides_itself() and (trial := _copied(model)) is not None:
            load_found(trial, found, strict=True, what="it", undo=False)
            return []
    except CheckpointError as error:
        said = str(error).splitlines()
        return [line.strip() for line in said[1:]] or said
    return fitted.misfits.lines(limit=None)


def _copied(model: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(model)
    except Exception:  # noqa: BLE001 - a model of the user's may refuse to be copied for any reason
        return None
