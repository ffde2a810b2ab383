"""Samples per second, wherever they are shown: the samples that count, by the time of the steps that they took."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbddp.events import EventReader
from nbddp.kernel.sections import figures
from nbddp.kernel.terminal import progress_line
from nbddp.kernel.text import rate_text
from nbddp.worker.tracker import values_of
from support.timed_run import WARMUP, Step, TimedRun

if TYPE_CHECKING:
    from nbddp.events import Event

NAME = "throughput/samples_per_s"


def events(run: TimedRun) -> list[Event]:
    return [event for event in EventReader(run.folder).poll() if event.kind == "steps"]


def tracked(run: TimedRun) -> list[float]:
    """What a tracker is told of the reports."""
    return [values[NAME] for event in events(run) for _, values in values_of(event) if NAME in values]


@st.composite
def ranks(draw: st.DrawFn, nproc: int, taken_s: float) -> list[Step]:
    """The same step on each rank: they begin and end it together, and who works less waits longer."""
    shares = [draw(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)) for _ in range(nproc)]
    own = [[0.9 * taken_s * part / max(map(sum, shares)) for part in parts] for parts in shares]
    return [Step(data, forward, backward, taken_s - data - forward - backward - optimizer, optimizer) for data, forward, backward, optimizer in own]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), nproc=st.integers(1, 5), accumulate=st.integers(1, 3), per_rank=st.integers(1, 40))
def test_the_samples_of_warm_steps_by_their_time_whatever_lies_between(data: st.DataObject, nproc: int, accumulate: int, per_rank: int) -> None:
    """Epochs of few steps with reports of any length, a tail that is not a whole batch, and pauses as of a validation."""
    batch = nproc * accumulate * per_rank
    with tempfile.TemporaryDirectory() as folder, closing(TimedRun(Path(folder), nproc=nproc, batch_size=batch, accumulate=accumulate)) as run:
        run.begin().train(WARMUP, Step())
        samples, seconds, expected = 0, 0.0, []
        for _ in range(data.draw(st.integers(1, 5), "epochs")):
            taken_s = data.draw(st.floats(1e-3, 10.0), "seconds of a step")
            tail = data.draw(st.integers(1, batch), "samples of the last step")
            each = data.draw(ranks(nproc, taken_s))
            for steps, of_step in ((data.draw(st.integers(1, 6), "whole steps"), batch), (1, tail)):
                run.train(steps, *each, report=data.draw(st.integers(1, 6), "steps of a report"), samples=of_step)
                samples, seconds, expected = samples + steps * of_step, seconds + steps * taken_s, [*expected, of_step / taken_s]
            run.now += data.draw(st.floats(0.0, 1e4), "seconds until the next epoch")
        told = tracked(run)
        assert all(any(rate == pytest.approx(other, rel=2e-3) for other in expected) for rate in told), "no report is far off, however short"
        assert run.state.samples_per_s == pytest.approx(samples / seconds, rel=1e-3)
        rows = [run.state.ranks[rank].samples_per_s for rank in range(nproc)]
        assert sum(rows) == pytest.approx(expected[-1], rel=2e-3)
        assert rows == pytest.approx([len(range(rank, tail, nproc)) / taken_s for rank in range(nproc)], rel=2e-3)
        assert max(rows) - min(rows) <= 1.01 / taken_s, "the last step is dealt as evenly as it goes"
        assert rate_text(run.state.samples_per_s) in figures(run.state)
        assert f"{rate_text(run.state.samples_per_s)} samples/s" in progress_line(run.state)


def test_steps_of_the_warm_up_have_no_throughput(tmp_path: Path) -> None:
    with closing(TimedRun(tmp_path, nproc=2, batch_size=8)) as run:
        run.begin().train(WARMUP, Step())
        assert tracked(run) == []
        assert [row.samples_per_s for row in run.state.ranks.values()] == [0.0, 0.0]
        assert "samples/s" not in figures(run.state) + progress_line(run.state)
        run.train(1, Step())
        assert tracked(run) == pytest.approx([80])


def test_another_stage_has_a_throughput_of_its_own(tmp_path: Path) -> None:
    from nbddp.stage import Stage

    stages = [Stage("head", epochs=1), Stage("all", epochs=1, batch_size=64)]
    with closing(TimedRun(tmp_path, stages=stages, batch_size=8)) as run:
        run.begin().train(50, Step())
        assert run.state.samples_per_s == pytest.approx(80)
        run.begin(1).train(WARMUP + 5, Step(), scale=10.0)
        assert run.state.samples_per_s == pytest.approx(64)
