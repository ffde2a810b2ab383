"""How the weights of a run differ from others, entry by entry, and what differs in the options behind them.

Runs in the kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.checkpoint.misfit import readable
from nbddp.config import TrainConfig
from nbddp.errors import CheckpointError, ConfigError
from nbddp.kernel import weights
from nbddp.kernel.entry import NOT_TOLD, plain_text
from nbddp.kernel.table import CheckpointEntry
from nbddp.kernel.text import short_id, value_text
from nbddp.tabular import FONT, QUIET, Table, html_table, text_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbddp.kernel.trained import Trained

KINDS = ("values", "shape", "dtype", "only here", "only there", "same")
_SHOWN, _NAMED = 40, 4


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One entry of two state dicts.

    Attributes:
        name: without wrappers.
        kind: same, values, shape, dtype, only here or only there.
        max_abs: the largest absolute difference; nan where one has a nan that the other has not, None where there is nothing to subtract.
        relative: the norm of the difference over that of this run's entry; inf where that is zero.
        detail: both shapes or dtypes, and how many nan both have at the same places.
    """

    name: str
    kind: str
    max_abs: float | None = None
    relative: float | None = None
    detail: str = ""


class StateDiff(Table[DiffEntry]):
    """The entries of two state dicts: a sequence, those that differ most first, that displays as a table.

    Attributes:
        this: what the run's weights are called.
        other: what they were compared with.
        config: the options that differ, each with the values of both; empty where one of the two is no run.
        equal: whether all entries are the same bits; nan is the same as nan.
        max_abs: the largest absolute difference over all entries that are in both with one shape; nan as in `DiffEntry`.
    """

    HEADER = ("name", "kind", "detail", "max |difference|", "relative")
    LEFT = 3

    def __init__(self, rows: Iterable[DiffEntry], this: str = "this", other: str = "the other", config: Mapping[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(rows)
        self.this, self.other, self.config = this, other, dict(config or {})

    def __getitem__(self, key: Any) -> Any:
        """An entry by its place, or by its name: ``run.diff(other)["head.weight"]``; a slice is a table of its entries."""
        if isinstance(key, slice):
            return StateDiff(self._rows[key], self.this, self.other, self.config)
        if not isinstance(key, str):
            return self._rows[key]
        for row in self._rows:
            if row.name == key:
                return row
        raise KeyError(key)

    @property
    def equal(self) -> bool:
        return all(row.kind == "same" for row in self._rows)

    @property
    def max_abs(self) -> float:
        found = [row.max_abs for row in self._rows if row.max_abs is not None]
        return math.nan if any(math.isnan(value) for value in found) else max(found, default=0.0)

    def summary(self) -> str:
        """How many entries are equal, and how the others differ, in one line."""
        counts = Counter(row.kind for row in self._rows)
        same, count = counts.pop("same", 0), len(self._rows)
        nans = sum(row.kind == "same" and bool(row.detail) for row in self._rows)
        whole = "the one entry is" if count == 1 else f"all {count} entries are"
        part = f"{same} of {count} entries {'is' if same == 1 else 'are'}"
        said = f"{whole if same == count else part} equal bitwise"
        if nans:
            said += f", {nans} with nan at the same places"
        differ = [
            f"{number} {'differ' if number > 1 else 'differs'} in values" if kind == "values" else f"{number} {_IN[kind]}" for kind, number in counts.items()
        ]
        return "; ".join([said, *differ])

    def _cells(self, row: DiffEntry) -> tuple[str, ...]:
        largest = "" if row.max_abs is None else value_text(row.max_abs)
        return (readable(row.name), row.kind, row.detail, largest, "" if row.relative is None else value_text(row.relative))

    def _above(self) -> list[str]:
        options = [f"{name} {plain_text(mine)} → {plain_text(theirs)}" for name, (mine, theirs) in self.config.items()]
        return [f"{self.this} → {self.other}", *([f"options: {', '.join(options)}"] if options else []), self.summary()]

    def _shown(self) -> tuple[list[DiffEntry], list[str]]:
        """The rows of the table, and what stands below it."""
        differ = [row for row in self._rows if row.kind != "same"]
        same = [readable(row.name) for row in self._rows if row.kind == "same"]
        less = " that differ less" if len(differ) > _SHOWN and differ[_SHOWN].relative is not None else ""
        more = [f"and {len(differ) - _SHOWN} more{less}"] if len(differ) > _SHOWN else []
        rest = f" and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
        return differ[:_SHOWN], [*more, *([f"equal: {', '.join(same[:_NAMED])}{rest}"] if same and differ else [])]

    def __repr__(self) -> str:
        rows, more = self._shown()
        table = [text_table(self.HEADER, [self._cells(row) for row in rows], left=self.LEFT)] if rows else []
        return "\n".join([*self._above(), *table, *more])

    def _repr_html_(self) -> str:
        rows, more = self._shown()
        title, *rest = self._above()
        said = "".join(f"<div>{escape(line)}</div>" for line in rest)
        table = html_table(self.HEADER, [self._html_cells(row) for row in rows], left=self.LEFT) if rows else ""
        end = "".join(f'<div style="{QUIET}">{escape(line)}</div>' for line in more)
        return f'<div style="{FONT}"><div><b>{escape(title)}</b></div>{said}{table}{end}</div>'


_IN = {"shape": "of another shape", "dtype": "of another dtype", "only here": "only here", "only there": "only there"}


def diff(run: Trained, other: object, which: str | int) -> StateDiff:
    """Compare a run's checkpoint with whatever holds weights.

    Raises:
        ConfigError: for what holds none.
        CheckpointError: for checkpoints that are missing or can't be read.
    """
    mine = checkpoint.read(path := weights.file_of(run.files, which))
    this, config = f"{short_id(run.id)}, {path.stem}", mine.get("config") or run.config.to_json()
    state, called, their_config = _weights_of(other, which)
    ours = checkpoint.state_of(mine, path)
    _check_values(ours, this)
    _check_values(state, called)
    return StateDiff(compare(ours, state), this, called, {} if their_config is None else _options(config, their_config))


def _check_values(state: Mapping[str, Any], called: str) -> None:
    if (name := next((name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta), None)) is not None:
        message = f"run.diff: {readable(name)} of {called} is on the meta device and has no values to compare"
        raise ConfigError(message)


def _weights_of(other: object, which: str | int) -> tuple[Mapping[str, Any], str, Mapping[str, Any] | None]:
    """The state dict of what a run is compared with, what it is called, and the options behind it where there are any."""
    from nbddp.kernel.run import Run
    from nbddp.kernel.runs import attach

    if isinstance(other, nn.Module):
        return other.state_dict(), type(other).__name__, None
    if isinstance(other, Mapping):
        if not all(isinstance(name, str) for name in other) or not any(isinstance(value, torch.Tensor) for value in other.values()):
            message = "run.diff was given a dict that is no state dict: it has tensors by name"
            raise ConfigError(message)
        return other, "a state dict", None
    if isinstance(other, CheckpointEntry):
        other = other.path
    if isinstance(other, str | Path):
        place = checkpoint.Place.of(other)
        is_file = place.is_there and not place.is_folder
        other = place.path if is_file or place.path.suffix in checkpoint.SUFFIXES else attach(other)  # of one that is not there `read` says what is
    if isinstance(other, Run):
        content = checkpoint.read(path := weights.file_of(other.files, which))
        return checkpoint.state_of(content, path), f"{short_id(other.id)}, {path.stem}", content.get("config") or other.config.to_json()
    if not isinstance(other, Path):
        message = f"run.diff takes a run, its id or directory, a checkpoint file, a state dict or a module, not a {type(other).__name__}"
        raise ConfigError(message)
    content = checkpoint.read(path := other)
    ours = isinstance(content.get("config"), dict) and content.get("format") == checkpoint.FORMAT
    return checkpoint.state_of(content, path), str(other), content["config"] if ours else None


def _options(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The options that differ; one that was not given has its default."""
    names = [name for name in dict.fromkeys([*mine, *theirs]) if name not in NOT_TOLD]
    pairs = {name: (mine.get(name, _default(name)), theirs.get(name, _default(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _default(name: str) -> Any:
    """What an option is that was not given; `default` where that depends on others."""
    field = TrainConfig.model_fields.get(name)
    return "default" if field is None or field.default is None else field.default


def compare(state: Mapping[str, Any], other: Mapping[str, Any]) -> list[DiffEntry]:
    """One row per entry of two state dicts, those that differ most first; names of the other may have wrappers in them."""
    own = checkpoint.without_wrappers(state) if not set(state) & set(other) else state
    pairs = {mine: name for name, mine in checkpoint.match({name: name for name in own}, list(other)).items()}
    rows = [_entry(name, value, other[pairs[name]]) if name in pairs else DiffEntry(name, "only here", detail=_described(value)) for name, value in own.items()]
    there = set(pairs.values())
    rows += [DiffEntry(name, "only there", detail=_described(value)) for name, value in other.items() if name not in there]
    return sorted(rows, key=_order)


def _order(row: DiffEntry) -> tuple[int, float]:
    """Entries that can't be compared first, then by relative difference, nan before all numbers; those that are the same last."""
    amount = 0.0 if row.relative is None else math.inf if math.isnan(row.relative) else row.relative
    return (2 if row.kind == "same" else 1 if row.relative is not None else 0), -amount


def _entry(name: str, mine: object, theirs: object) -> DiffEntry:
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        same = _equal(_as_written(mine), _as_written(theirs))
        return DiffEntry(name, "same" if same else "values", detail="" if same else f"{_described(mine)} → {_described(theirs)}")
    if mine.shape != theirs.shape:
        return DiffEntry(name, "shape", detail=f"{tuple(mine.shape)} → {tuple(theirs.shape)}")
    one, other = _dense(mine), _dense(theirs)
    if mine.dtype != theirs.dtype:
        return DiffEntry(name, "dtype", *_distance(one, other), detail=f"{_dtype(mine)} → {_dtype(theirs)}")
    nan = int((one.isnan() & other.isnan()).sum())
    apart = int((one.isnan() ^ other.isnan()).sum())
    detail = ", ".join(f"nan at {_places(count)} of {whose}" for count, whose in ((nan, "both"), (apart, "one alone")) if count)
    if _same_bits(one, other):
        return DiffEntry(name, "same", 0.0, 0.0, detail)
    return DiffEntry(name, "values", *_distance(one, other), detail=detail)


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().to(torch.complex128) if tensor.is_complex() else tensor.double()


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_complex() or tensor.is_floating_point())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are the same bits; nan is the same as nan, and 0 is not the same as -0."""
    if _is_integer(one):
        return torch.equal(one, other)
    one, other = (torch.view_as_real(wide) if wide.is_complex() else wide for wide in (_wide(one), _wide(other)))
    return bool((((one == other) & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())).all())


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest absolute difference, and the norm of the difference over the norm of the first; nan where a nan is in one alone."""
    if not one.numel():
        return 0.0, 0.0
    first, second = _wide(one), _wide(other)
    if one.dtype == other.dtype and _is_integer(one):
        size = _apart(one, other)
    else:
        unlike = ~((first == second) | (first.isnan() & second.isnan()))  # of equal infinities the difference would be nan
        size = torch.where(unlike, first - second, 0.0).abs()
    norm, whole = float(size.norm()), float(torch.where(first.isfinite(), first, 0.0).norm())
    return float(size.max()), 0.0 if norm == 0 else norm / whole if whole else norm if math.isnan(norm) else math.inf


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The distances between integers, which are exact in 64 bits without a sign."""
    first, second = one.numpy(), other.numpy()
    unsigned = [array.astype(np.uint64) for array in (first, second)]
    return torch.from_numpy(np.asarray(np.where(first > second, unsigned[0] - unsigned[1], unsigned[1] - unsigned[0]), dtype=np.float64))


def _as_written(value: object) -> object:
    """An extra state as a checkpoint would hold it, where one can."""
    try:
        return checkpoint.plain(value, "an extra state")
    except CheckpointError:
        return value


def _equal(one: object, other: object) -> bool:
    """Whether two extra states are the same, tensors in them included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and checkpoint.same(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float | complex) and isinstance(other, float | complex) and one != one and other != other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # noqa: BLE001 - objects of the user's, which compare as they like
        return False


def _described(value: object) -> str:
    return f"{_dtype(value)} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
