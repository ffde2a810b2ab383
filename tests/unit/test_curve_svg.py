from __future__ import annotations

import itertools
import math
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest

from nbddp.kernel.curve_html import loss_html
from nbddp.kernel.curve_svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Plot, data_url, loss_plot
from nbddp.kernel.figure import TRAIN, VAL
from nbddp.state import RunState, StageRecord
from support.curves import ODD, state_of

if TYPE_CHECKING:
    pass

SVG = "{http://www.w3.org/2000/svg}"


def plotted(state: RunState, log: bool | None = None, smoothing: float = 1 / 30) -> Plot:
    plot = loss_plot(state, log=log, smoothing=smoothing)
    assert plot is not None
    return plot


def drawn(state: RunState, log: bool | None = None, smoothing: float = 1 / 30) -> ET.Element:
    return ET.fromstring(plotted(state, log, smoothing).svg)


def paths(picture: ET.Element, colour: str) -> list[str]:
    return [path.get("d", "") for path in picture.iter(f"{SVG}path") if path.get("stroke") == colour]


def lines(picture: ET.Element, colour: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a colour."""
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)] for path in paths(picture, colour)]


def numbers(plot: Plot) -> tuple[list[float], list[float]]:
    """Those at the ticks: of the vertical and of the horizontal axis."""
    units = {"k": "e3", "M": "e6", "G": "e9"}
    across = [label[:-1] + units[label[-1]] if label[-1] in units else label for _, label in plot.across]
    return [float(label) for _, label in plot.down], [float(label.replace(",", "")) for label in across]


def test_both_curves_fill_the_picture() -> None:
    plot = plotted(state_of([2.0 - step / 500 for step in range(500)], [2.0, 1.5, 1.2, 1.25]))
    picture = ET.fromstring(plot.svg)
    raw, mean = lines(picture, TRAIN)
    assert len(raw) == len(mean) == 500
    assert (raw[0][0], raw[-1][0]) == (LEFT, RIGHT)
    assert all(TOP <= y <= BOTTOM for _, y in raw)
    assert max(y for _, y in raw) - min(y for _, y in raw) > 0.8 * (BOTTOM - TOP)
    validation, dots = lines(picture, VAL)
    assert validation == dots
    assert len(validation) == 4
    assert all(length == ".01" for length in re.findall(r"h([\d.]+)", paths(picture, VAL)[1]))
    assert plot.lowest is not None
    assert plot.lowest[0] * WIDTH == pytest.approx(validation[2][0], abs=0.1)
    assert plot.lines == [("loss", TRAIN), ("val_loss", VAL)]
    assert plot.axis == "step"


def test_ticks_are_round_numbers_within_the_axes() -> None:
    down, across = numbers(plotted(state_of([2.31 - step / 300 for step in range(600)], every=7)))
    assert 3 <= len(down) <= 8
    assert 4 <= len(across) <= 9
    assert across[0] == 0
    assert len({round(b - a, 9) for a, b in itertools.pairwise(down)}) == 1
    assert len({b - a for a, b in itertools.pairwise(across)}) == 1


def test_a_logarithmic_axis() -> None:
    wide = state_of([10.0 ** -(step / 50) for step in range(200)])
    down, _ = numbers(plotted(wide))
    assert down == [1e-4, 1e-3, 1e-2, 1e-1, 1.0][-len(down) :]
    (raw, _mean) = lines(drawn(wide), TRAIN)
    assert abs(raw[100][1] - (raw[0][1] + raw[-1][1]) / 2) < 2  # a straight line
    (raw, _mean) = lines(drawn(wide, log=False), TRAIN)
    assert raw[100][1] > raw[0][1] + 0.9 * (raw[-1][1] - raw[0][1])
    narrow = numbers(plotted(state_of([1.1, 1.2, 1.3]), log=True))[0]
    assert len(narrow) > 2


def test_values_that_a_logarithmic_axis_has_no_place_for_are_left_out_and_it_says_so() -> None:
    plot = plotted(state_of([1.0, -1.0, 2.0]), log=True)
    assert plot.axis == "step (losses that are not positive are left out)"
    assert plot.axis in loss_html(plot, "")
    assert len(lines(ET.fromstring(plot.svg), TRAIN)[0]) == 2
    assert plotted(state_of([1.0, 2.0]), log=True).axis == "step"
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
    (path,) = paths(drawn(state_of([1.0, 2.0, math.nan, 3.0, math.nan, math.inf, 4.0, 5.0]), smoothing=0), TRAIN)
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
    plot = plotted(state)
    html = loss_html(plot, "")
    assert [name for name in ("head", "a name without room", "&lt;body&gt;", "empty") if f">{name}</span>" in html] == ["head", "&lt;body&gt;"]
    assert "<body>" not in html
    (shaded,) = ET.fromstring(plot.svg).iter(f"{SVG}rect")
    across = [round((float(shaded.get("x", 0)) - LEFT) / (RIGHT - LEFT) * 99), round(float(shaded.get("width", 0)) / (RIGHT - LEFT) * 99)]
    assert across == [40, 10]


@pytest.mark.parametrize("train", [[], [1.0], [math.nan] * 50])
def test_without_two_losses_there_is_nothing_to_draw(train: list[float]) -> None:
    assert loss_plot(state_of(train)) is None


@pytest.mark.parametrize("log", [None, True, False])
@pytest.mark.parametrize(
    "train",
    [
        *ODD,
        [1e308, -1e308] * 40,
        [1.7e308, 1e308] * 40,
        [5e-324, 1e-320] * 40,
        [1e-300, 2e-300, 1e300],
        [1.0, 1.0 + 2e-16] * 40,
        [0.0, 5.0] * 3,
    ],
)
def test_curves_of_all_kinds_are_drawn_within_the_picture(train: list[float], log: bool | None) -> None:
    plot = plotted(state_of(train, [math.nan, 1.0]), log)
    assert lines(ET.fromstring(plot.svg), TRAIN)[0] or log
    html = plot.svg + loss_html(plot, "")
    assert "nan" not in html
    assert "inf" not in html
    assert all(-1e-9 <= at <= 1 + 1e-9 for at, _ in plot.across + plot.down)
    down, across = numbers(plot)
    assert len(down) <= 20
    assert len(across) <= 20


def test_it_is_small_and_quick() -> None:
    state = state_of([2.0 + math.sin(step) for step in range(599)], [1.0] * 599)
    state.stages = [StageRecord(index, f"stage {index}", 60 * index) for index in range(10)]
    began = time.thread_time()
    for _ in range(10):
        html = loss_html(plotted(state), "loss over steps")
    assert (time.thread_time() - began) / 10 < 0.05
    assert len(html) < 40_000


def test_the_address_of_the_picture_holds_it_whole() -> None:
    svg = plotted(state_of([1.0, 2.0], [1.0])).svg
    url = data_url(svg)
    assert url.startswith("data:image/svg+xml,")
    assert not set('"<>#') & set(url)
    assert unquote(url.partition(",")[2]) == svg


def test_text_is_of_one_size_beside_a_picture_that_is_stretched() -> None:
    plot = plotted(state_of([2.0 - step / 500 for step in range(500)], [2.0, 1.5], every=7000))
    assert "preserveAspectRatio='none'" in plot.svg
    assert "vector-effect:non-scaling-stroke" in plot.svg
    assert "<text" not in plot.svg
    assert [label for _, label in plot.across][:3] == ["0", "1,000,000", "2M"] or plot.across[1][1].endswith(("k", "M"))
    html = loss_html(plot, 'a "quoted" <b> & more')
    assert 'alt="a &quot;quoted&quot; &lt;b&gt; &amp; more"' in html
    assert re.findall(r"font-size:(\d+)px", html)[-1] == "11"
    for _, label in [*plot.across, *plot.down]:
        assert f">{label}</span>" in html
