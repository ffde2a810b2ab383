"""What keeps a file from fitting a model, entry by entry, and the short table that says so."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SHOWN = 12
_LONGEST = 120
_CANDIDATES = 2000
"""Names among which the nearest is looked for: the search takes 0.1 ms for each."""


def readable(name: object, length: int = _LONGEST) -> str:
    """A name out of a file, where anything may stand: in one line, without what a terminal would obey, and with its middle cut out where it is long."""
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in str(name))
    if len(text) > length:
        text = f"{text[: length // 2 - 1]}…{text[-(length // 2) :]}"
    return text if text.strip() else repr(text)


@dataclass(frozen=True, slots=True)
class Misfit:
    """One entry that does not fit.

    `kind` is missing (from the file), unexpected (in it), shape, dtype, tied (two values for what is one tensor in the model), or norm (another
    normalization layer with the same entries); `name` has no wrappers in it.
    """

    kind: str
    name: str
    detail: str = ""


@dataclass(slots=True)
class Misfits:
    """All entries that do not fit.

    Attributes:
        rows: in the order of the model, then of the file.
        own: shapes by name of what is in the model, for the nearest name; None for what is no tensor.
        file: the same for the file.
        hints: what fits instead, a line each.
        modules: names of the model's modules.
        explained: whether the hints say already what the names on one side begin with.
        solved: whether the hints say all there is to say.
    """

    rows: list[Misfit]
    own: Mapping[str, tuple[int, ...] | None]
    file: Mapping[str, tuple[int, ...] | None]
    hints: list[str] = field(default_factory=list)
    modules: frozenset[str] = frozenset()
    explained: bool = False
    solved: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    def of(self, *kinds: str) -> list[str]:
        """Names of the entries of these kinds."""
        return [row.name for row in self.rows if row.kind in kinds]

    def lines(self, limit: int | None = SHOWN) -> list[str]:
        """The table: hints first, then a line for each entry and, beyond the limit, one that counts the rest."""
        if self.solved:
            return [*self.hints, ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in self.rows).items())]
        prefix = None if self.explained else _prefix(self)
        covered = set() if prefix is None else prefix.covered
        rows = [row for row in self.rows if (row.kind, row.name) not in covered]
        first = [] if prefix is None else [prefix.line(self.modules)]
        kept = len(rows) if limit is None else max(0, limit - len(first) - len(self.hints))
        if len(rows) > kept:
            kept = max(0, kept - 1)
        shown = [(row.kind, readable(row.name), row.detail or self._nearest(row, covered, look=place < SHOWN)) for place, row in enumerate(rows[:kept])]
        kinds = max((len(kind) for kind, _, _ in shown), default=0)
        names = max((len(name) for _, name, _ in shown), default=0)
        table = [f"{kind.ljust(kinds)}  {name.ljust(names)}  {detail}".rstrip() for kind, name, detail in shown]
        rest = Counter(row.kind for row in rows[kept:])
        more = [f"and {len(rows) - kept} more: {', '.join(f'{count} {kind}' for kind, count in rest.items())}"] if rest else []
        return [*first, *self.hints, *table, *more]

    def _nearest(self, row: Misfit, covered: set[tuple[str, str]], *, look: bool) -> str:
        """Where an entry is, and what is nearest to it on the other side, best of the same shape, or at least a weight for a weight."""
        missing = row.kind == "missing"
        where, other = ("the model", "the file") if missing else ("the file", "the model")
        if not look:
            return f"in {where} alone"
        kind = "unexpected" if missing else "missing"
        shapes, mine = (self.file, self.own) if missing else (self.own, self.file)
        left = [name for name in self.of(kind) if (kind, name) not in covered]
        ends = [name for name in left if name.rpartition(".")[2] == row.name.rpartition(".")[2]]
        alike = [name for name in ends if shapes.get(name) == mine.get(row.name)]
        near = next((found for names in (alike, ends, left) if (found := difflib.get_close_matches(row.name, names[:_CANDIDATES], n=1))), [])
        return f"in {where} alone" + (f"; {other} has {readable(near[0])}" if near else "")


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What stands in front of the names on one side, by which alone the two differ; several where there is a choice."""

    texts: list[str]
    in_file: bool
    count: int
    covered: set[tuple[str, str]]

    def line(self, modules: frozenset[str]) -> str:
        names = f"all {self.count} names" if self.count > 2 else "both names"
        first = self.texts[0]
        if self.in_file and len(self.texts) > 1:
            pick = f"{{name.removeprefix({first!r}): value for name, value in nbddp.load_checkpoint(FILE).items() if name.startswith({first!r})}}"
            return f"the file has the model's names behind {' and behind '.join(map(repr, self.texts))}: choose one, as in model.load_state_dict({pick})"
        if self.in_file:
            state = f"{{name.removeprefix({first!r}): value for name, value in nbddp.load_checkpoint(FILE).items()}}"
            remedy = f"model.load_state_dict({state}) loads it"
            return f"{names} in the file that don't fit begin with {first!r}, which the model's lack: {remedy}"
        remedy = f": load into that part of it, nbddp.load_checkpoint(FILE, net.{first[:-1]})" if first[:-1] in modules else ""
        return f"{names} in the model that don't fit begin with {first!r}, which the file's lack{remedy}"


def _prefix(misfits: Misfits) -> _Prefix | None:
    """What has to be put in front of all the names on one side to make them names of the other."""
    missing, unexpected = misfits.of("missing"), misfits.of("unexpected")
    for short, long, in_file in ((missing, unexpected, True), (unexpected, missing, False)):
        shorts, longs = (misfits.own, misfits.file) if in_file else (misfits.file, misfits.own)
        kinds = ("missing", "unexpected") if in_file else ("unexpected", "missing")
        texts, count = [], 0
        covered: set[tuple[str, str]] = set()
        for text in _fronts(short, long):
            pairs = {name[len(text) :]: name for name in longs if name.startswith(text) and name[len(text) :] in shorts}
            known = [name for name in short if name in pairs]
            fronted = [name for name in long if name.startswith(text) and name[len(text) :] in pairs]
            alike = sum(shorts[name] == longs[other] for name, other in pairs.items())
            if len(pairs) >= 2 and 2 * alike > len(pairs) and (len(known) == len(short) or len(fronted) == len(long)):
                texts.append(text)
                count = count or len(pairs)
                covered |= {(kinds[0], name) for name in known} | {(kinds[1], name) for name in fronted}
        if texts and (in_file or len(texts) == 1):
            return _Prefix(texts, in_file, count, covered)
    return None


def _fronts(short: Sequence[str], long: Sequence[str]) -> Iterable[str]:
    """What stands before a name of one side in names of the other."""
    return dict.fromkeys(other[: -len(name)] for name in short[:20] for other in long if other.endswith(f".{name}"))
