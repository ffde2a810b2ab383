"""Sketches of loss curves in cells of tables."""

from __future__ import annotations

import base64
import math
import re
import time
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from nbddp.events import EventWriter
from nbddp.kernel import sketch
from nbddp.kernel.sketch import PIECE, POINTS, WHOLE, Sketch
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path


def svg(made: Sketch) -> ElementTree.Element:
    found = re.search(r"base64,([^\"]+)", made.image())
    assert found is not None
    return ElementTree.fromstring(base64.b64decode(found[1]))


def heights(made: Sketch) -> list[list[float]]:
    """The y of each line, upwards."""
    lines = svg(made).iter("{http://www.w3.org/2000/svg}polyline")
    return [[sketch.HEIGHT - float(point.split(",")[1]) for point in line.attrib["points"].split()] for line in lines]


def test_of_a_short_run_all_steps_are_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, epochs=2, steps_per_epoch=4, report_steps=3)
    run.start()
    run.train(8, losses=[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    made = Sketch.of(run.run_dir)
    assert made == Sketch((1, 2, 3, 4, 5, 6, 7, 8), (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0))
    assert made.blocks() == "█▇▆▅▄▃▂▁"
    (line,) = heights(made)
    assert line == sorted(line, reverse=True)
    assert 'alt="loss from 8 to 1 in 8 steps"' in made.image()
    run.end()


def test_more_steps_than_points_become_means(tmp_path: Path) -> None:
    run = finished(tmp_path, epochs=2, steps_per_epoch=390)
    made = Sketch.of(run)
    assert len(made.step) <= POINTS
    assert made.step[-1] == 780
    assert list(made.step) == sorted(made.step)
    assert made.loss[0] > 1.5 > 0.5 > made.loss[-1]


def test_of_a_long_run_a_bounded_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path, epochs=60)
    assert run.rank_events(0, 0).stat().st_size > 4 * WHOLE
    taken: list[int] = []
    take = sketch.Steps.of
    monkeypatch.setattr(sketch.Steps, "of", lambda line: taken.append(len(line)) or take(line))  # type: ignore[func-returns-value] # the list's append
    made = Sketch.of(run)
    assert sum(taken) < POINTS * PIECE / 2
    assert POINTS - 4 <= len(made.step) <= POINTS
    assert made.step[0] < 100
    assert made.step[-1] == 60 * 390
    gaps = [later - earlier for earlier, later in zip(made.step, made.step[1:], strict=False)]
    assert max(gaps) < 2.5 * 60 * 390 / POINTS
    assert made.loss[0] > 1.5 > 0.5 > made.loss[-1]


def test_reports_wider_than_a_piece_are_read_by_their_beginning(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    columns = {"epoch": [1] * 64, "stage": [0] * 64, "lr": [0.1] * 64, "samples": [8] * 64}
    for report in range(60):
        steps = list(range(64 * report + 1, 64 * report + 65))
        wide = {f"scalar{number}": [0.123456789012345] * 64 for number in range(80)}
        run.ranks[0].emit(
            "steps",
            step=steps,
            epoch=columns["epoch"],
            stage=columns["stage"],
            loss=[60.0 - report] * 64,
            **{"lr": columns["lr"]},
            samples=columns["samples"],
            scalars=wide,
        )
    assert run.run_dir.rank_events(0, 0).stat().st_size > 60 * PIECE
    made = Sketch.of(run.run_dir)
    assert len(made.step) > POINTS / 2
    assert list(made.loss) == sorted(made.loss, reverse=True)
    run.end()


def test_a_later_attempt_replaces_what_it_repeats(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, epochs=2, steps_per_epoch=4, report_steps=2)
    run.start()
    run.train(6, losses=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    later = EventWriter(run.run_dir.rank_events(0, 1), run=run.run_dir.id, rank=0, attempt=1)
    run.step = 4
    later.emit("steps", **run._columns(1, [9.0]))
    later.close()
    assert Sketch.of(run.run_dir) == Sketch((1, 2, 3, 4, 5), (6.0, 5.0, 4.0, 3.0, 9.0))
    run.end()


@pytest.mark.parametrize("losses", [(), (math.nan, math.inf)])
def test_without_a_finite_loss_there_is_nothing(losses: tuple[float, ...]) -> None:
    made = Sketch(tuple(map(float, range(len(losses)))), losses)
    assert (bool(made), made.blocks(), made.image(), made.text) == (False, "", "", "")


def test_what_is_not_finite_leaves_a_gap() -> None:
    made = Sketch((1, 2, 3, 4, 5, 6), (4.0, 3.0, math.nan, 2.0, math.inf, 1.0))
    assert made.blocks() == "█▆ ▃ ▁"
    assert [len(line) for line in heights(made)] == [2]
    assert len(list(svg(made).iter("{http://www.w3.org/2000/svg}circle"))) == 2
    assert made.text == "loss from 4 to 1 in 6 steps"


def test_one_step_and_a_loss_that_stays() -> None:
    assert Sketch((7,), (0.3,)).blocks() == "▅"
    assert 'alt="loss from 0.3 to 0.3 in 7 steps"' in Sketch((7,), (0.3,)).image()
    assert Sketch((1, 2, 3), (2.0, 2.0, 2.0)).blocks() == "▅▅▅"


def test_losses_that_are_many_times_apart_are_on_a_log_scale() -> None:
    (line,) = heights(Sketch((1, 2, 3), (1e4, 1e2, 1.0)))
    assert line[0] - line[1] == pytest.approx(line[1] - line[2], abs=0.2)
    (line,) = heights(Sketch((1, 2, 3), (10.0, 2.0, 1.0)))
    assert line[0] - line[1] > 4 * (line[1] - line[2])


def test_a_long_log_costs_no_more_than_a_moment(tmp_path: Path) -> None:
    run = finished(tmp_path, epochs=60)
    path = run.rank_events(0, 0)
    with path.open("ab") as file:
        piece = path.read_bytes()
        for _ in range(10):
            file.write(piece)
    assert path.stat().st_size > 50_000_000
    began = time.process_time()
    assert Sketch.of(run)
    assert time.process_time() - began < 0.1
