"""A sketch of a run's loss for a cell of a table: a few points, read from a bounded part of the event files, and drawn as a picture or in blocks.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbddp.kernel.drawing import LOG_RANGE
from nbddp.kernel.losses import Steps, attempts
from nbddp.kernel.text import count_text, value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nbddp.rundir import RunDir

POINTS = 32
WHOLE = 1 << 20
"""Bytes of an event file up to which it is read as a whole."""
PIECE = 1 << 16
"""Bytes that are read in each of `POINTS` places of a longer one: several reports, or of very wide ones the beginning of one."""
BLOCKS = "▁▂▃▄▅▆▇█"
COLOUR = "#4285f4"
WIDTH, HEIGHT = 84, 20
"""Of the picture, in px."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """At most about `POINTS` steps and the mean loss around each, in the order of steps; nan where a loss was not finite."""

    step: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()

    @classmethod
    def of(cls, run: RunDir) -> Sketch:
        """Sketch a run's own steps, live or ended, by at most `POINTS` reads of `PIECE` bytes of each attempt's file."""
        found: list[tuple[float, float]] = []
        for path in attempts(run):
            try:
                points = list(_points(path))
            except OSError:  # pruned meanwhile
                continue
            if points:
                found = [point for point in found if point[0] < points[0][0]] + points
        return cls._of_points(_few(found))

    @classmethod
    def _of_points(cls, points: Sequence[tuple[float, float]]) -> Sketch:
        return cls(tuple(step for step, _ in points), tuple(loss for _, loss in points))

    def __bool__(self) -> bool:
        return any(map(math.isfinite, self.loss))

    @property
    def text(self) -> str:
        """The curve in words, for whoever does not see it."""
        finite = [loss for loss in self.loss if math.isfinite(loss)]
        if not finite:
            return ""
        return f"loss from {value_text(finite[0])} to {value_text(finite[-1])} in {count_text(self.step[-1])} steps"

    def blocks(self, width: int = 12) -> str:
        """The curve as characters; a space where nothing is finite."""
        if not self:
            return ""
        heights = self._heights()
        first, last = self.step[0], self.step[-1]
        columns: list[list[float]] = [[] for _ in range(min(width, len(self.step)))]
        for step, height in zip(self.step, heights, strict=True):
            index = int((step - first) / (last - first) * len(columns)) if last > first else 0
            if math.isfinite(height):
                columns[min(index, len(columns) - 1)].append(height)
        return "".join(" " if not column else BLOCKS[round(sum(column) / len(column) * (len(BLOCKS) - 1))] for column in columns)

    def image(self) -> str:
        """The curve as an img element, which holds an SVG: front ends that strip svg elements from HTML that they do not trust leave images in."""
        if not self:
            return ""
        first, last = self.step[0], self.step[-1]
        lines: list[list[str]] = [[]]
        for step, height in zip(self.step, self._heights(), strict=True):
            if not math.isfinite(height):
                lines.append([])
                continue
            x = 2 + (WIDTH - 4) * ((step - first) / (last - first) if last > first else 0.5)
            lines[-1].append(f"{x:.1f},{2 + (HEIGHT - 4) * (1 - height):.1f}")
        shapes = "".join(
            f'<polyline points="{" ".join(line)}"/>' if len(line) > 1 else f'<circle cx="{line[0].split(",")[0]}" cy="{line[0].split(",")[1]}" r="1"/>'
            for line in lines
            if line
        )
        drawn = f'<g fill="none" stroke="{COLOUR}" stroke-width="1.5" stroke-linejoin="round">{shapes}</g>'
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{drawn}</svg>'
        source = base64.b64encode(svg.encode()).decode("ascii")
        style = "display:inline-block;margin:0;vertical-align:middle;max-width:none"
        return f'<img alt="{self.text}" title="{self.text}" width="{WIDTH}" height="{HEIGHT}" style="{style}" src="data:image/svg+xml;base64,{source}">'

    def _heights(self) -> list[float]:
        """0 to 1, on a log scale where the losses are many times apart."""
        finite = [loss for loss in self.loss if math.isfinite(loss)]
        low, high = min(finite), max(finite)
        values = list(self.loss)
        if low > 0 and high > LOG_RANGE * low:
            values, low, high = [math.log(value) if math.isfinite(value) else value for value in values], math.log(low), math.log(high)
        return [math.nan if not math.isfinite(value) else (value - low) / (high - low) if high > low else 0.5 for value in values]


def _points(path: Path) -> Iterator[tuple[float, float]]:
    """Step and mean loss of reports all over a file; of a short one of all of them."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= WHOLE:
            file.seek(0)
            for line in file:
                if (steps := Steps.of(line)) is not None:
                    yield from zip(steps.step, steps.loss, strict=True)
            return
        last = -math.inf
        for index in range(POINTS):
            file.seek((size - PIECE) * index // (POINTS - 1))
            lines = file.read(PIECE).split(b"\n")
            begun = lines if index == 0 else lines[1:]  # a line whose end is cut has its losses, as a rule
            # The first report of each piece, but at the end of the file the last.
            for line in begun if index < POINTS - 1 else reversed(begun):
                if (steps := Steps.of(line)) is not None and steps.step[-1] > last:
                    last = steps.step[-1]
                    yield last, _mean(steps.loss)
                    break


def _few(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, or means of neighbours where there are more than `POINTS`; the last step stays the last."""
    stride = -(-len(points) // POINTS) or 1
    if stride == 1:
        return points
    parts = [points[start : start + stride] for start in range(0, len(points), stride)]
    return [(part[-1][0], _mean([loss for _, loss in part])) for part in parts]


def _mean(losses: Sequence[float]) -> float:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan
