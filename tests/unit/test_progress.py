"""How far a run is, which weights were the best, and when waiting for better ones ends."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.planning import Machine, make_plan
from nbddp.worker.context import RankStage
from nbddp.worker.progress import Best, Monitor, Progress


def rank_stage(index=0, name="0", **options):
    """What a rank knows of a stage that monitors as the options say."""
    config = TrainConfig(**options)
    plan = make_plan(config, n_train=64, n_val=8, machine=Machine((), 1)).stages[0]
    return RankStage(index, name, config, plan, None, None, None)


def following(values, *, monitor=None, counts=None, **options):
    """A monitor that was told values, one an epoch; and what it said of each."""
    if monitor is None:
        monitor = Monitor()
        monitor.enter(rank_stage(**options))
    said = []
    for number, value in enumerate(values, 1):
        counted = True if counts is None else counts[number - 1]
        better = monitor.judge(value, Progress(epoch=number, step=10 * number), counts=counted)
        said.append((better, monitor.exhausted))
    return monitor, said


# -- progress


def test_steps_and_epochs_are_counted_over_the_run_and_within_a_stage():
    progress = Progress()
    for stage in range(2):
        progress.enter_stage(stage)
        assert (progress.stage, progress.stage_step, progress.stage_epochs_done) == (stage, 0, 0)
        for epoch in range(3):
            progress.begin_epoch()
            assert progress.within_epoch
            assert (progress.epoch, progress.epoch_step, progress.epoch_samples) == (3 * stage + epoch + 1, 0, 0)
            for _ in range(4):
                progress.took_step(8)
            assert (progress.epoch_step, progress.epoch_samples) == (4, 32)
            progress.finish_epoch()
            assert not progress.within_epoch
    assert (progress.step, progress.stage_step, progress.epochs_done, progress.stage_epochs_done) == (24, 12, 6, 3)


def test_an_epoch_that_a_stage_ended_within_is_over_with_it():
    progress = Progress()
    progress.enter_stage(0)
    progress.begin_epoch()
    progress.took_step(8)
    assert progress.within_epoch
    progress.enter_stage(1)
    assert (progress.epochs_done, progress.within_epoch) == (1, False)
    progress.begin_epoch()
    assert (progress.epoch, progress.epoch_step, progress.step) == (2, 0, 1)


# -- the best


@pytest.mark.parametrize(
    "mode, min_delta, values, better",
    [
        ("min", 0, [3.0, 2.0, 2.0, 2.5, 1.0], [True, True, False, False, True]),
        ("max", 0, [1.0, 2.0, 2.0, 1.5, 3.0], [True, True, False, False, True]),
        ("min", 0.5, [3.0, 2.6, 2.5, 2.4], [True, False, False, True]),
        ("max", 0.5, [1.0, 1.4, 1.6], [True, False, True]),
        ("min", 0, [math.nan, math.inf, 5.0, -math.inf, 4.0], [False, False, True, False, True]),
        ("max", 0, [math.inf, -5.0, math.nan, -4.0], [False, True, False, True]),
    ],
)
def test_what_is_better(mode, min_delta, values, better):
    best = Best("x", mode, min_delta)
    assert [best.update(value, Progress(epoch=number, step=number)) for number, value in enumerate(values)] == better
    at = max(number for number, flag in enumerate(better) if flag)
    assert (best.value, best.epoch, best.step) == (values[at], at, at)


def test_the_best_is_written_down_in_plain_types():
    best = Best("val_loss", "min", 0.1)
    best.update(2.0, Progress(epoch=3, step=30))
    assert json.loads(json.dumps(best.state())) == {"name": "val_loss", "mode": "min", "min_delta": 0.1, "value": 2.0, "epoch": 3, "step": 30}


# -- patience


def test_patience_is_over_after_so_many_values_that_are_not_better():
    _, said = following([3.0, 2.0, 2.5, 2.1, 1.9, 2.0, 2.0, 2.0], patience=3)
    assert [over for _, over in said] == [False] * 7 + [True]
    assert [better for better, _ in said] == [True, True, False, False, True, False, False, False]


def test_without_patience_there_is_no_end():
    _, said = following([1.0] * 50)
    assert not any(over for _, over in said)


def test_a_gain_below_min_delta_does_not_count():
    _, said = following([3.0, 2.95, 2.91], patience=2, min_delta=0.1)
    assert said == [(True, False), (False, False), (False, True)]


def test_values_that_are_not_finite_use_patience_up():
    monitor, said = following([math.nan, math.inf], patience=2)
    assert said == [(False, False), (False, True)]
    assert monitor.why == "val_loss was not better 2 times in a row; none was finite"


def test_why_a_stage_ends():
    monitor, _ = following([2.0, 0.123456, 0.5, 0.4], patience=2)
    assert monitor.why == "val_loss was not better 2 times in a row; the best was 0.1235 in epoch 2"


def test_what_is_measured_because_the_run_ends_uses_no_patience_up_and_is_the_best_all_the_same():
    monitor, said = following([2.0, 3.0, 1.0], counts=[True, False, False], patience=1)
    assert said == [(True, False), (False, False), (True, False)]
    assert (monitor.best.value, monitor.best.epoch) == (1.0, 3)


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0, math.nan]), st.booleans()), max_size=30),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.sampled_from([0.0, 1.0]),
)
def test_where_a_run_was_interrupted_does_not_change_when_patience_is_over(values, patience, mode, min_delta):
    """Values that count alone, and those between which others were measured, end at the same one."""
    options = {"patience": patience, "mode": mode, "min_delta": min_delta}
    _, all_ = following([value for value, _ in values], counts=[counts for _, counts in values], **options)
    _, counted = following([value for value, counts in values if counts], **options)
    assert [over for (_, over), (_, counts) in zip(all_, values, strict=True) if counts] == [over for _, over in counted]


def test_the_last_value_is_known_with_its_step():
    monitor, _ = following([2.0, 3.0], counts=[True, False])
    assert (monitor.last, monitor.judged_at) == (3.0, 20)


def test_a_plateau_is_told_each_value_that_counts_once():
    monitor, _ = following([2.0])
    assert monitor.take_fresh() == 2.0
    assert monitor.take_fresh() is None
    monitor.judge(3.0, Progress(), counts=False)
    assert monitor.take_fresh() is None
    monitor.judge(4.0, Progress(), counts=True)
    monitor.judge(5.0, Progress(), counts=True)
    assert monitor.take_fresh() == 5.0


# -- stages


def test_each_stage_has_patience_of_its_own_and_the_best_of_the_run():
    monitor, _ = following([2.0, 3.0, 3.0], patience=2)
    assert monitor.exhausted
    monitor.enter(rank_stage(1, patience=1))
    assert not monitor.exhausted
    assert (monitor.best.value, monitor.best.epoch) == (2.0, 1)
    assert not monitor.judge(2.5, Progress(epoch=4, step=40), counts=True)
    assert monitor.exhausted
    monitor.enter(rank_stage(2))
    monitor.judge(9.0, Progress(), counts=True)
    assert not monitor.exhausted


@pytest.mark.parametrize("other", [{"monitor": "loss"}, {"mode": "max"}])
def test_another_value_or_its_other_end_has_a_best_of_its_own(other):
    monitor, _ = following([2.0], patience=2)
    monitor.enter(rank_stage(1, patience=1, **other))
    assert monitor.best.value is None
    assert monitor.name == other.get("monitor", "val_loss")
    assert monitor.judge(7.0, Progress(epoch=2, step=20), counts=True)
    assert not monitor.exhausted
    assert monitor.best.value == 7.0


def test_the_smallest_change_that_counts_is_the_stages():
    monitor, _ = following([2.0], min_delta=0.5)
    assert not monitor.judge(1.9, Progress(), counts=True)
    monitor.enter(rank_stage(1, min_delta=0.01))
    assert monitor.judge(1.9, Progress(), counts=True)


def test_a_value_left_from_the_stage_before_is_not_told_to_a_plateau():
    monitor, _ = following([2.0])
    monitor.enter(rank_stage(1))
    assert monitor.take_fresh() is None


# -- from a checkpoint


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan]), st.booleans()), max_size=12),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), max_size=8),
    st.integers(1, 4),
)
def test_a_monitor_goes_on_as_if_it_had_never_stopped(before, after, patience):
    values, counts = [value for value, _ in before], [flag for _, flag in before]
    straight, _ = following(values, counts=counts, patience=patience)
    state, best = straight.state(), straight.best.state()
    resumed = Monitor()
    resumed.enter(rank_stage(patience=patience))
    resumed.load(state, best)
    assert json.dumps(resumed.state()) == json.dumps(state)
    assert json.dumps(resumed.best.state()) == json.dumps(best)
    assert following(after, monitor=resumed)[1] == following(after, monitor=straight)[1]
    assert repr(resumed.take_fresh()) == repr(straight.take_fresh())  # nan is not equal to itself


@pytest.mark.parametrize("other", [{"monitor": "loss"}, {"mode": "max"}])
def test_where_something_else_is_monitored_now_it_begins_anew(other):
    before, _ = following([2.0, 3.0], patience=2)
    monitor = Monitor()
    monitor.enter(rank_stage(patience=1, **other))
    monitor.load(before.state(), before.best.state())
    assert (monitor.best.value, monitor.exhausted, monitor.last) == (None, False, None)


def test_patience_and_the_smallest_change_are_those_of_now():
    before, _ = following([2.0, 3.0, 3.0], patience=5)
    monitor = Monitor()
    monitor.enter(rank_stage(patience=2, min_delta=0.5))
    monitor.load(before.state(), before.best.state())
    assert monitor.exhausted
    assert not monitor.judge(1.8, Progress(), counts=True)
    assert monitor.judge(1.4, Progress(), counts=True)
    assert not monitor.exhausted
