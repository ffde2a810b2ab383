from __future__ import annotations

import io
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nbddp.kernel.drawing import tick_texts
from nbddp.kernel.figure import DPI, SIZE_IN, loss_figure, loss_png, wants_log
from nbddp.state import RunState, StageRecord
from support.curves import ODD, state_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(int)


def coloured(png: bytes, colour: tuple[int, int, int]) -> int:
    image = pixels(png)
    return int(((np.abs(image[..., :3] - colour).max(axis=-1) < 12) & (image[..., 3] > 200)).sum())


BLUE, ORANGE = (0x42, 0x85, 0xF4), (0xF2, 0x8B, 0x30)


def test_both_curves_are_drawn_on_nothing() -> None:
    png = loss_png(state_of([1 / (1 + step) for step in range(500)], [1.0, 0.5, 0.4, 0.45]))
    assert png is not None
    image = pixels(png)
    assert image.shape == (int(SIZE_IN[1] * DPI), int(SIZE_IN[0] * DPI), 4)
    assert (image[..., 3] == 0).mean() > 0.8
    assert coloured(png, BLUE) > 500
    assert coloured(png, ORANGE) > 500


def test_the_picture_fits_the_limit() -> None:
    state = state_of([math.sin(step) + step % 7 for step in range(600)])
    whole = loss_png(state)
    small = loss_png(state, limit=20_000)
    assert whole is not None
    assert small is not None
    assert len(small) <= 20_000 < len(whole)


@pytest.mark.parametrize("train", [[], [1.0], [math.nan] * 50])
def test_without_two_losses_there_is_nothing_to_draw(train: list[float]) -> None:
    assert loss_png(state_of(train)) is None


@pytest.mark.parametrize("train", [*ODD, [1e300, -1e300] * 40, [1e9] + [1.0] * 300])
def test_curves_of_all_kinds_are_drawn(train: list[float]) -> None:
    png = loss_png(state_of(train, [math.nan, 1.0]))
    assert png is not None
    assert coloured(png, BLUE) > 20


def test_the_figure_is_the_users_to_change_and_displays_itself() -> None:
    figure = loss_figure(state_of([3.0, 2.0, 1.0]))
    figure.axes[0].set_title("mine")
    png = figure._repr_png_()  # type: ignore[attr-defined] # the display hook of front ends
    assert coloured(png, BLUE) > 20
    assert loss_figure(RunState()).axes


def staged(*stages: tuple[str, int], steps: int = 100) -> RunState:
    state = state_of([1.0 + 0.1 * (step % 3) for step in range(steps)])
    state.step = steps - 1
    state.stages = [StageRecord(index, name, step) for index, (name, step) in enumerate(stages)]
    return state


def test_stages_are_named_and_every_other_one_is_shaded() -> None:
    axes = loss_figure(staged(("head", 0), ("body", 30), ("all", 60))).axes[0]
    assert [text.get_text() for text in axes.texts] == ["head", "body", "all"]
    spans = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [(round(span.x0), round(span.x1)) for span in spans] == [(30, 60)]
    assert loss_png(staged(("head", 0), ("body", 30))) != loss_png(staged(("head", 0)))


def test_a_run_of_one_stage_is_drawn_as_one_without() -> None:
    axes = loss_figure(staged(("only", 0))).axes[0]
    assert (len(axes.texts), len(axes.patches)) == (0, 0)


def test_names_of_stages_stand_where_they_have_room() -> None:
    axes = loss_figure(staged(("head", 0), ("short one", 40), ("the whole network", 45), ("empty", 99))).axes[0]
    assert [text.get_text() for text in axes.texts] == ["head", "the whole network"]
    figure = axes.figure
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts] + [axes.get_legend().get_window_extent()]
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[index + 1 :])


@pytest.mark.parametrize("stages", [[("a", 5), ("b", 5)], [("a", 0), ("b", 500)], [("a", 50), ("b", 80)]])
def test_stages_at_any_place_are_drawn(stages: list[tuple[str, int]]) -> None:
    png = loss_png(staged(*stages))
    assert png is not None
    assert coloured(png, BLUE) > 20


def test_nothing_of_the_users_matplotlib_is_touched() -> None:
    code = """
import sys
import nbddp.kernel.figure as figure
assert "matplotlib" not in sys.modules
from nbddp.state import RunState
state = RunState()
for step in range(100):
    state.train_curve.add(step, 1.0 / (1 + step))
assert figure.loss_png(state)
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams["figure.figsize"] == [6.4, 4.8]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def axis_scale(figure: Figure) -> str:
    return str(figure.axes[0].get_yscale())


def test_the_axis_is_logarithmic_where_that_shows_more_and_where_it_is_asked_for() -> None:
    wide, narrow = state_of([10.0**-n for n in range(5)] * 3), state_of([1.0, 2.0, 3.0])
    assert (wants_log(wide), wants_log(narrow), wants_log(RunState())) == (True, False, False)
    assert axis_scale(loss_figure(wide)) == "log"
    assert axis_scale(loss_figure(narrow)) == "linear"
    assert axis_scale(loss_figure(wide, log=False)) == "linear"
    assert axis_scale(loss_figure(narrow, log=True)) == "log"


def test_a_logarithmic_axis_says_what_it_leaves_out() -> None:
    assert "not positive" in loss_figure(state_of([1.0, -1.0, 2.0]), log=True).axes[0].get_xlabel()
    assert loss_figure(state_of([1.0, 2.0]), log=True).axes[0].get_xlabel() == "step"
    none_positive = loss_figure(state_of([-1.0, -2.0, math.nan]), log=True)
    assert "no loss is positive" in none_positive.axes[0].get_xlabel()
    assert axis_scale(none_positive) == "linear"
    assert loss_png(state_of([-1.0, -2.0]), log=True) is not None


def test_smoothing_is_the_width_of_the_mean() -> None:
    noise = np.random.default_rng(0)
    state = state_of(noise.random(400).tolist())
    alone = loss_figure(state, smoothing=0).axes[0].lines
    assert [len(line.get_ydata()) for line in alone] == [400]
    spreads = []
    for smoothing in (1 / 60, 1 / 10):
        raw, smooth = loss_figure(state, smoothing=smoothing).axes[0].lines
        assert np.ptp(raw.get_ydata()) > 0.9
        spreads.append(np.ptp(smooth.get_ydata()[50:-50]))
    assert spreads[1] < spreads[0] < 0.5
    assert len({loss_png(state, smoothing=smoothing) for smoothing in (0, 1 / 60, 1 / 10)}) == 3


@pytest.mark.parametrize(
    "losses",
    [[3.2e-6, 3.7e-6], [2.65e7, 2.95e7], [12345.0008, 12345.0016], [-3e-9, 4e-9], [0.2, 2.4]],
    ids=["small", "large", "alike in their first digits", "around zero", "as usual"],
)
def test_numbers_at_the_axis_are_whole(losses: list[float]) -> None:
    figure = loss_figure(state_of(losses), log=False)
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    labels = {tick.get_loc(): tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high}
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert all(float(label.get_text()) == pytest.approx(at, rel=1e-9, abs=1e-3 * (high - low)) for at, label in labels.items())
    assert min(label.get_window_extent().x0 for label in labels.values()) >= 0


@given(st.floats(-1e300, 1e300), st.floats(1e-3, 1e3), st.integers(2, 8))
def test_texts_of_ticks_tell_them_apart(first: float, share: float, count: int) -> None:
    distance = max(abs(first) * 1e-9, 1e-300) * share
    ticks = [first + number * distance for number in range(count)]
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(set(ticks))
    assert all(abs(float(text) - tick) <= 0.03 * distance for text, tick in zip(texts, ticks, strict=True))
