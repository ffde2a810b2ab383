from __future__ import annotations

import itertools
import math
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest

from nbddp.kernel.curve_svg import BOTTOM, LEFT, RIGHT, TOP, data_url, loss_svg
from nbddp.kernel.figure import TRAIN, VAL
from nbddp.state import RunState, StageRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

SVG = "{http://www.w3.org/2000/svg}"


def state_of(train: Sequence[float], val: Sequence[float] = (), *, every: int = 1) -> RunState:
    state = RunState()
    for step, loss in enumerate(train):
        state.train_curve.add(float(step * every), loss)
    for index, loss in enumerate(val):
        state.val_curve.add(100.0 * index, loss)
    return state


def drawn(state: RunState, log: bool | None = None, smoothing: float = 1 / 30) -> ET.Element:
    svg = loss_svg(state, log=log, smoothing=smoothing)
    assert svg is not None
    return ET.fromstring(svg)


def lines(picture: ET.Element, colour: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a colour, the legend's apart."""
    paths = [path.get("d", "") for path in picture.find(f"{SVG}g").iter(f"{SVG}path") if path.get("stroke") == colour]  # type: ignore[union-attr] # there is one
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)] for path in paths]


def words(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def numbers(picture: ET.Element) -> tuple[list[float], list[float]]:
    """Those at the ticks: of the vertical and of the horizontal axis."""
    texts = list(picture.iter(f"{SVG}text"))
    down = [float(text.text or "") for text in texts if text.get("text-anchor") == "end"]
    across = [text.text or "" for text in texts if text.get("y") == str(BOTTOM + 14)]
    return down, [float(text.replace(",", "")) for text in across]


def test_both_curves_fill_the_picture() -> None:
    picture = drawn(state_of([2.0 - step / 500 for step in range(500)], [2.0, 1.5, 1.2, 1.25]))
    raw, mean = lines(picture, TRAIN)
    assert len(raw) == len(mean) == 500
    assert (raw[0][0], raw[-1][0]) == (LEFT, RIGHT)
    assert all(TOP <= y <= BOTTOM for _, y in raw)
    assert max(y for _, y in raw) - min(y for _, y in raw) > 0.8 * (BOTTOM - TOP)
    (validation,) = lines(picture, VAL)
    assert len(validation) == 4
    assert len(list(picture.iter(f"{SVG}circle"))) == 5  # each value, and the lowest
    assert max(picture.iter(f"{SVG}circle"), key=lambda circle: float(circle.get("r", 0))).get("cx") == str(validation[2][0])
    assert {"loss", "val_loss", "step"} <= set(words(picture))


def test_ticks_are_round_numbers_within_the_axes() -> None:
    down, across = numbers(drawn(state_of([2.31 - step / 300 for step in range(600)], every=7)))
    assert 3 <= len(down) <= 8
    assert 4 <= len(across) <= 9
    assert across[0] == 0
    assert len({round(b - a, 9) for a, b in itertools.pairwise(down)}) == 1
    assert len({b - a for a, b in itertools.pairwise(across)}) == 1


def test_a_logarithmic_axis() -> None:
    wide = state_of([10.0 ** -(step / 50) for step in range(200)])
    down, _ = numbers(drawn(wide))
    assert down == [1e-4, 1e-3, 1e-2, 1e-1, 1.0][-len(down) :]
    (raw, _mean) = lines(drawn(wide), TRAIN)
    assert abs(raw[100][1] - (raw[0][1] + raw[-1][1]) / 2) < 2  # a straight line
    (raw, _mean) = lines(drawn(wide, log=False), TRAIN)
    assert raw[100][1] > raw[0][1] + 0.9 * (raw[-1][1] - raw[0][1])
    narrow = numbers(drawn(state_of([1.1, 1.2, 1.3]), log=True))[0]
    assert len(narrow) > 2


def test_values_that_a_logarithmic_axis_has_no_place_for_are_left_out_and_it_says_so() -> None:
    picture = drawn(state_of([1.0, -1.0, 2.0]), log=True)
    assert "step (losses that are not positive are left out)" in words(picture)
    assert len(lines(picture, TRAIN)[0]) == 2
    assert "step" in words(drawn(state_of([1.0, 2.0]), log=True))
    assert lines(drawn(state_of([-1.0, -2.0]), log=True), TRAIN) == lines(drawn(state_of([-1.0, -2.0])), TRAIN)


def test_smoothing_is_the_width_of_the_mean() -> None:
    state = state_of([float(step % 7) for step in range(400)])
    assert len(lines(drawn(state, smoothing=0), TRAIN)) == 1
    spreads = []
    for smoothing in (1 / 100, 1 / 20):
        _, mean = lines(drawn(state, smoothing=smoothing), TRAIN)
        middle = [y for _, y in mean[100:300]]
        spreads.append(max(middle) - min(middle))
    assert spreads[1] < spreads[0] / 2


def test_a_gap_stays_a_gap_and_a_point_alone_is_seen() -> None:
    svg = loss_svg(state_of([1.0, 2.0, math.nan, 3.0, math.nan, math.inf, 4.0, 5.0]), smoothing=0)
    assert svg is not None
    (path,) = re.findall(rf"<path d='([^']*)' stroke='{TRAIN}' fill", svg)
    assert [len(re.findall("L", part)) for part in path.split("M")[1:]] == [1, 0, 1]
    assert path.count("h.1") == 1


def test_first_spikes_are_left_out() -> None:
    (raw, _mean) = lines(drawn(state_of([1e9] + [1.0 + 0.01 * (step % 5) for step in range(300)]), log=False), TRAIN)
    assert raw[0][1] < -1000  # clipped
    assert max(y for _, y in raw[1:]) - min(y for _, y in raw[1:]) > 0.5 * (BOTTOM - TOP)


def test_stages_are_named_and_every_other_one_is_shaded() -> None:
    state = state_of([1.0 + 0.1 * (step % 3) for step in range(100)])
    state.step = 99
    state.stages = [
        StageRecord(index, name, step) for index, (name, step) in enumerate([("head", 0), ("a name without room", 40), ("<body>", 50), ("empty", 99)])
    ]
    picture = drawn(state)
    assert [name for name in words(picture) if name in {"head", "a name without room", "<body>", "empty"}] == ["head", "<body>"]
    (shaded,) = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("fill-opacity")]
    across = [round((float(shaded.get("x", 0)) - LEFT) / (RIGHT - LEFT) * 99), round(float(shaded.get("width", 0)) / (RIGHT - LEFT) * 99)]
    assert across == [40, 10]


@pytest.mark.parametrize("train", [[], [1.0], [math.nan] * 50])
def test_without_two_losses_there_is_nothing_to_draw(train: list[float]) -> None:
    assert loss_svg(state_of(train)) is None


@pytest.mark.parametrize("log", [None, True, False])
@pytest.mark.parametrize(
    "train",
    [
        [1.0] * 100,
        [0.0] * 100,
        [-1.0, -2.0, -3.0] * 30,
        [1e30, 1e-30] * 50,
        [1e308, -1e308] * 40,
        [1.7e308, 1e308] * 40,
        [5e-324, 1e-320] * 40,
        [1e-300, 2e-300, 1e300],
        [1.0, 1.0 + 2e-16] * 40,
        [math.nan, 1.0] * 100,
        [1.0] * 40 + [math.nan] * 200,
        [0.0, 5.0] * 3,
    ],
)
def test_curves_of_all_kinds_are_drawn_within_the_picture(train: list[float], log: bool | None) -> None:
    picture = drawn(state_of(train, [math.nan, 1.0]), log)
    assert lines(picture, TRAIN)[0] or log
    assert "nan" not in ET.tostring(picture, encoding="unicode").replace("dominan", "")
    assert "inf" not in ET.tostring(picture, encoding="unicode")
    down, across = numbers(picture)
    assert len(down) <= 20
    assert len(across) <= 20


def test_it_is_small_and_quick() -> None:
    state = state_of([2.0 + math.sin(step) for step in range(599)], [1.0] * 599)
    state.stages = [StageRecord(index, f"stage {index}", 60 * index) for index in range(10)]
    began = time.thread_time()
    for _ in range(10):
        svg = loss_svg(state)
    assert (time.thread_time() - began) / 10 < 0.05
    assert svg is not None
    assert len(data_url(svg)) < 36_000


def test_the_address_of_the_picture_holds_it_whole() -> None:
    svg = loss_svg(state_of([1.0, 2.0], [1.0]))
    assert svg is not None
    url = data_url(svg)
    assert url.startswith("data:image/svg+xml,")
    assert not set('"<>#') & set(url)
    assert unquote(url.partition(",")[2]) == svg
