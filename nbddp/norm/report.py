"""What a swap of normalization layers did, as a table. Runs in the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from torch import nn

from nbddp.tabular import FONT, QUIET, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_NO_MODEL = "this is the report of swap_norm, which changes the model in place: write swap_norm(net), and go on with net"


@dataclass(frozen=True, slots=True)
class Swapped:
    """One layer: its name, what it was, what it is now (the same where it was left), and what there is to say about it."""

    layer: str
    before: str
    after: str
    note: str = ""

    @property
    def replaced(self) -> bool:
        return self.before != self.after


class SwapReport(Table[Swapped]):
    """The BatchNorm layers of a model after a swap: those that were replaced, then those that were left, and why.

    Attributes:
        kinds: what each replaced layer became, by name: what `nbddp.swap_norm` takes as `to`.
        notes: what there is to say about the whole.
    """

    HEADER = ("layer", "from", "to", "note")
    LEFT = 4

    def __init__(self, rows: Iterable[Swapped], kinds: dict[str, str] | None = None, notes: Sequence[str] = ()) -> None:
        super().__init__(sorted(rows, key=lambda row: not row.replaced))
        self.kinds, self.notes = dict(kinds or {}), tuple(notes)

    @property
    def replaced(self) -> list[str]:
        """Names of the layers that were replaced."""
        return [row.layer for row in self if row.replaced]

    @property
    def left(self) -> list[str]:
        """Names of the layers that were left."""
        return [row.layer for row in self if not row.replaced]

    EMPTY = "no BatchNorm layers: nothing to swap"

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(_NO_MODEL)

    def __getattr__(self, name: str) -> Any:
        if hasattr(nn.Module, name):
            raise AttributeError(_NO_MODEL)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(message)

    def _cells(self, row: Swapped) -> tuple[str, ...]:
        return row.layer, row.before, row.after if row.replaced else "–", row.note

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f'<div style="{FONT};{QUIET}">{escape(note)}</div>' for note in self.notes)
        return super()._repr_html_() + notes
