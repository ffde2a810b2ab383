from __future__ import annotations

import math
from typing import Any

import pytest

from nbddp.shapes import LARGEST, TEXT, TRUTH, Anything, ListOf, MapOf, Maybe, Misfit, OneOf, Real, Record, Shape, Shown, Whole

COUNTS = ListOf(Whole())
PERSON = Record({"name": TEXT, "age": Maybe(Whole(most=150)), "marks": MapOf(ListOf(Real()))}, needed=("name",))


@pytest.mark.parametrize(
    "shape, value, taken",
    [
        (Whole(), 3, 3),
        (Real(), 3, 3),
        (Real(), "-inf", -math.inf),
        (Real(finite=True), 1.5, 1.5),
        (COUNTS, [], []),
        (COUNTS, [1, 2], [1, 2]),
        (ListOf(Real()), [1, 0.5, "inf"], [1, 0.5, math.inf]),
        (TRUTH, False, False),
        (Shown(), "a\x07", r"a\x07"),
        (OneOf(("a", "b")), "b", "b"),
        (Maybe(TEXT), None, None),
        (MapOf(Real()), {"x\x1b": 1.0}, {r"x\x1b": 1.0}),
        (MapOf(Real(), but=frozenset({"step"})), {"x": 1.0, "step": "nonsense"}, {"x": 1.0}),
        (PERSON, {"name": "a", "later": {}, "marks": {"x": ["inf"]}}, {"name": "a", "later": {}, "marks": {"x": [math.inf]}}),
        (Anything(), object, object),
    ],
)
def test_what_fits_is_taken(shape: Shape, value: Any, taken: Any) -> None:
    assert shape.take(value) == taken


def test_nan_is_a_number() -> None:
    assert math.isnan(Real().take("nan"))
    assert math.isnan(Real().take(math.nan))


@pytest.mark.parametrize(
    "shape, value, said",
    [
        (Whole(), True, "must be a whole number of at least 0, and is true or false"),
        (Whole(), -1, "must be a whole number of at least 0, and is -1"),
        (Whole(), 1.0, "must be a whole number of at least 0, and is 1.0"),
        (Whole(), LARGEST + 1, f"must be a whole number of at least 0, and is {LARGEST + 1}"),
        (Whole(least=1, most=9), 10, "must be a whole number from 1 to 9, and is 10"),
        (Real(), 10**400, f"must be a number, and is 1{'0' * 38}…"),
        (Real(), "much", "must be a number, and is 'much'"),
        (Real(), [], "must be a number, and is a list"),
        (Real(finite=True), "nan", "must be a finite number, and is 'nan'"),
        (ListOf(Real(finite=True)), [1.0, math.inf], "must be a finite number, and is inf"),
        (COUNTS, [1, "2"], "must be a whole number of at least 0, and is '2'"),
        (COUNTS, {}, "must be a list, and is an object"),
        (ListOf(TEXT, least=1), [], "must be a list of at least 1, and is a list"),
        (TEXT, None, "must be a text, and is null"),
        (Shown(), 3, "must be a text, and is 3"),
        (TRUTH, 1, "must be true or false, and is 1"),
        (OneOf(("a", "b")), [], "must be one of a, b, and is a list"),
        (MapOf(TEXT), [], "must be an object, and is a list"),
        (PERSON, "text\x1b", r"must be an object, and is 'text\x1b'"),
        (PERSON, {}, "name must be there, and is missing"),
        (PERSON, {"name": "a", "age": 151}, "age must be a whole number from 0 to 150, and is 151"),
        (PERSON, {"name": "a", "marks": {"x": [{}]}}, "marks.x must be a number, and is an object"),
        (ListOf(PERSON), [{"name": "a"}, {"name": {}}], "1.name must be a text, and is an object"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(shape: Shape, value: Any, said: str) -> None:
    with pytest.raises(Misfit) as caught:
        shape.take(value)
    assert str(caught.value) == said


def test_lists_of_one_length() -> None:
    shape = Record({"a": COUNTS, "b": COUNTS, "more": MapOf(COUNTS)}, needed=("a",), alike=("a", "b", "more"))
    assert shape.take({"a": [1, 2], "more": {"c": [3, 4]}}) == {"a": [1, 2], "more": {"c": [3, 4]}}
    for longer in ({"b": [1]}, {"more": {"c": [1, 2, 3]}}):
        with pytest.raises(Misfit, match=f"^{next(iter(longer))} must be 2 long, and is a list$"):
            shape.take({"a": [1, 2], **longer})


def test_a_stricter_record() -> None:
    strict = PERSON.needing("age", age=Whole(least=18))
    assert strict.take({"name": "a", "age": 18}) == {"name": "a", "age": 18}
    with pytest.raises(Misfit, match=r"^age must be there"):
        strict.take({"name": "a"})
    with pytest.raises(Misfit, match=r"^age must be a whole number of at least 18, and is 3"):
        strict.take({"name": "a", "age": 3})
