"""Shapes of values as JSON holds them: what is read from a run's files is checked against one, and is exact from there on.

A shape takes a value and returns it, with the words for numbers that JSON lacks as numbers, and with text that is only shown fit for that. What it does
not take is a `Misfit`. Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbddp.visible import excerpt, one_line, visible

WORDS = ("nan", "inf", "-inf")
LARGEST = 1 << 53
"""Of whole numbers: as far as every reader of JSON has them exactly."""
LATEST_S = 253402300799.0
"""The last second of the year 9999, after which no calendar goes."""
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}


class Misfit(ValueError):
    """A value that a shape does not take; `where` leads to it."""

    def __init__(self, rule: str, value: object, where: str = "") -> None:
        super().__init__()
        self.rule, self.where = rule, where
        self.found = _KINDS.get(type(value), "something else")
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            self.found = one_line(repr(value), 40)

    def within(self, name: str) -> Misfit:
        """The same, seen from what holds it."""
        self.where = name if not self.where else f"{name}.{self.where}"
        return self

    def __str__(self) -> str:
        return f"{self.where + ' ' if self.where else ''}must be {self.rule}, and is {self.found}"


class Shape(Protocol):
    """What a value must be like."""

    def take(self, value: Any) -> Any:
        """Return the value, exact.

        Raises:
            Misfit: says where it is otherwise.
        """


@dataclass(frozen=True, slots=True)
class Anything:
    """Not looked into."""

    def take(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number."""

    least: int = 0
    most: int = LARGEST

    @property
    def rule(self) -> str:
        return f"a whole number from {self.least} to {self.most}" if self.most < LARGEST else f"a whole number of at least {self.least}"

    def take(self, value: Any) -> int:
        if type(value) is not int or not self.least <= value <= self.most:
            raise Misfit(self.rule, value)
        return value

    def take_all(self, values: list[Any]) -> list[int]:
        """A column at once."""
        if not set(map(type, values)) <= {int} or (values and not (self.least <= min(values) and max(values) <= self.most)):
            return [self.take(value) for value in values]
        return values


@dataclass(frozen=True, slots=True)
class Real:
    """A number; `finite` ones are neither nan nor infinite."""

    finite: bool = False
    least: float = -math.inf
    most: float = math.inf

    @property
    def rule(self) -> str:
        return f"a number from {self.least:.12g} to {self.most:.12g}" if self.most < math.inf else "a finite number" if self.finite else "a number"

    def take(self, value: Any) -> float:
        try:
            number = float(value) if type(value) in (int, float) or value in WORDS else None
        except (OverflowError, TypeError):
            number = None
        if number is None or (self.finite and not math.isfinite(number)) or number < self.least or number > self.most:
            raise Misfit(self.rule, value)
        return value if type(value) is int else number

    def take_all(self, values: list[Any]) -> list[float]:
        """A column at once."""
        if not set(map(type, values)) <= {float} or (self.finite and not math.isfinite(sum(values))):
            return [self.take(value) for value in values]
        return values


@dataclass(frozen=True, slots=True)
class Exactly:
    """A value of one type, as it is."""

    kind: type
    rule: str

    def take(self, value: Any) -> Any:
        if not isinstance(value, self.kind):
            raise Misfit(self.rule, value)
        return value


TRUTH, TEXT = Exactly(bool, "true or false"), Exactly(str, "a text")


@dataclass(frozen=True, slots=True)
class Shown:
    """A text that is only shown: control characters are visible, and of a long one there are head and tail."""

    letters: int = 2_000
    lines: int = 40

    def take(self, value: Any) -> str:
        return visible(excerpt(TEXT.take(value), letters=self.letters, lines=self.lines))


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    words: tuple[str, ...]

    def take(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            rule = f"one of {', '.join(self.words)}"
            raise Misfit(rule, value)
        return value


@dataclass(frozen=True, slots=True)
class Maybe:
    """null, or of a shape."""

    shape: Shape

    def take(self, value: Any) -> Any:
        return None if value is None else self.shape.take(value)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose items have one shape."""

    shape: Shape
    least: int = 0

    def take(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) < self.least:
            rule = "a list" if not self.least else f"a list of at least {self.least}"
            raise Misfit(rule, value)
        if isinstance(self.shape, Whole | Real):
            return self.shape.take_all(value)
        taken = []
        for index, item in enumerate(value):
            try:
                taken.append(self.shape.take(item))
            except Misfit as misfit:
                raise misfit.within(str(index)) from None
        return taken


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object whose values have one shape, under names that are only shown."""

    shape: Shape
    but: frozenset[str] = frozenset()
    """Names that mean something else; what stands under them is left out."""

    def take(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            rule = "an object"
            raise Misfit(rule, value)
        taken = {}
        for name, item in value.items():
            if name not in self.but:
                try:
                    taken[one_line(name)] = self.shape.take(item)
                except Misfit as misfit:
                    raise misfit.within(one_line(name, 40)) from None
        return taken


@dataclass(frozen=True, slots=True)
class Record:
    """An object with fields of their own shapes; those that are not `needed` may be missing, those that are not known are left as they are.

    `alike` are the names of lists, and of objects of lists, of which each has as many items as the first.
    """

    fields: Mapping[str, Shape]
    needed: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    def needing(self, *names: str, **fields: Shape) -> Record:
        """The same with more fields that must be there, some of them in a stricter shape."""
        return replace(self, fields={**self.fields, **fields}, needed=(*self.needed, *names))

    def take(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            rule = "an object"
            raise Misfit(rule, value)
        for name in self.needed:
            if name not in value:
                rule = "there"
                misfit = Misfit(rule, None, name)
                misfit.found = "missing"
                raise misfit
        taken = dict(value)
        for name, shape in self.fields.items():
            if name in value:
                try:
                    taken[name] = shape.take(value[name])
                except Misfit as misfit:
                    raise misfit.within(name) from None
        if self.alike:
            self._compare(taken)
        return taken

    def _compare(self, taken: Mapping[str, Any]) -> None:
        count = len(taken[self.alike[0]])
        for name in self.alike:
            lists = taken.get(name, [])
            for column in lists.values() if isinstance(lists, dict) else [lists] if name in taken else []:
                if len(column) != count:
                    rule = f"{count} long"
                    raise Misfit(rule, column, name)
