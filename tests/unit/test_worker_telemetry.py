"""The telemetry channel, the clock and the heartbeat of one rank, without others."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from nbddp.evaluation.ranks import Ranks
from nbddp.events import EventReader, EventWriter
from nbddp.worker import position, telemetry
from nbddp.worker.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, SYNC, CpuClock, CudaClock, _Ready
from nbddp.worker.position import Heartbeat, Position
from nbddp.worker.report import Reporter
from nbddp.worker.telemetry import FIRST_SCALAR, LOSS, STOP_ASKED, WEIGHT, Gathered, StepRecord, Telemetry

ALONE = Ranks(0, 1, 0, torch.device("cpu"), "gloo", None)


class Time:
    """A clock that goes only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Time()
    monkeypatch.setattr(telemetry, "time", clock)
    return clock


def record(step, sums=(1.0, 2.0)):
    times = _Ready([0.1, 0.2, 0.3, 0.4, 0.5])
    return StepRecord(step, 1, 0, 0.1, 8, 2, warmup=False, applied=True, sums=list(sums), times=times, aggregation_s=0.6)


def channel(decide=lambda: 0):
    seen = []
    return Telemetry(ALONE, decide=decide, apply=seen.append), seen


def sizes_of(clock, durations_s):
    """How many steps each report holds, for steps of these durations."""
    channel_, seen = channel()
    for number, duration_s in enumerate(durations_s, 1):
        clock.now += duration_s
        channel_.tick(record(number))
    channel_.flush()
    assert [r.step for gathered in seen for r in gathered.records] == list(range(1, len(durations_s) + 1))
    return [len(gathered.records) for gathered in seen]


def test_reports_grow_to_a_quarter_of_a_second_at_most_doubling(clock):
    assert sizes_of(clock, [0.01] * 90)[:7] == [1, 1, 2, 4, 8, 16, 25]
    assert max(sizes_of(clock, [0.001] * 400)) == telemetry.K_MAX
    assert set(sizes_of(clock, [0.0499] * 40)[5:-1]) == {5}
    assert set(sizes_of(clock, [1.0] * 5)) == {1}


def test_a_few_quick_steps_before_slow_ones_do_not_delay_a_boundary_for_long(clock):
    """As with loader workers that hold some batches ready."""
    sizes = sizes_of(clock, [0.001] * 4 + [2.0] * 20)
    assert max(sizes) <= 8
    assert set(sizes[5:]) == {1}


def tick(channel_, clock, steps, duration_s=1 / 64):
    for number in steps:
        clock.now += duration_s
        channel_.tick(record(number))


def steps_of(seen):
    return [[record.step for record in gathered.records] for gathered in seen]


def test_a_flush_applies_what_there_is_and_steps_go_on_at_their_pace(clock):
    channel_, seen = channel()
    tick(channel_, clock, range(1, 101))
    channel_.flush()
    assert [step for steps in steps_of(seen) for step in steps] == list(range(1, 101))
    before = len(seen)
    clock.now += 60  # something else, which was not the time of a step
    tick(channel_, clock, range(101, 149))
    assert steps_of(seen)[before:] == [list(range(101, 117)), list(range(117, 133))], "16 of 1/64 s, as before; the third is on its way"


def test_what_may_be_slower_begins_with_a_boundary_at_each_step(clock):
    channel_, seen = channel()
    tick(channel_, clock, range(1, 101))
    channel_.flush()
    channel_.begin()
    before = len(seen)
    tick(channel_, clock, range(101, 104), 5.0)
    assert steps_of(seen)[before:] == [[101], [102]]


def test_validations_and_steps_have_a_pace_of_their_own(clock):
    decided = []
    channel_, seen = channel(lambda: decided.append(clock.now) or 0)
    tick(channel_, clock, range(1, 101))
    for _ in range(2):
        channel_.flush()
        decided.clear()
        for _ in range(4):  # each takes a second
            clock.now += 1.0
            channel_.tick()
        assert len(decided) == 4, "after each batch"
        channel_.flush()
        before = len(seen)
        tick(channel_, clock, range(101, 133))
        assert steps_of(seen)[before:] == [list(range(101, 117))], "every 16 steps, whatever the validation took"


def test_a_slower_pace_is_found_after_a_flush_as_well(clock):
    channel_, seen = channel()
    tick(channel_, clock, range(1, 101))
    channel_.flush()
    tick(channel_, clock, range(101, 400), 0.5)
    assert max(len(steps) for steps in steps_of(seen)[-5:]) == 1


def test_columns_are_where_readers_look_for_them(clock):
    channel_, seen = channel()
    channel_.open(2)
    channel_.tick(record(1, (6.0, 2.0, 10.0, 20.0)))
    channel_.flush()
    (gathered,) = seen
    row = gathered.rows[0, 0]
    assert row[telemetry.STEP] == 1
    assert row[telemetry.LOSS] == 6.0
    assert row[telemetry.WEIGHT] == 2.0
    assert row[telemetry.TIMES : telemetry.AGGREGATION].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert row[telemetry.AGGREGATION] == 0.6
    assert row[telemetry.STARVED] == 0.0
    assert row[telemetry.SAMPLES] == 2
    assert row[telemetry.FIRST_SCALAR :].tolist() == [10.0, 20.0]
    assert gathered.memory[0] > 0
    assert gathered.rows.dtype == np.float64


def test_decisions_are_taken_once_and_none_is_lost(clock):
    asked = iter([0, STOP_ASKED, 8, 0, 0])
    channel_, _ = channel(lambda: next(asked))
    taken = []
    for number in range(1, 5):
        clock.now += 1.0
        channel_.tick(record(number))
        taken.append(channel_.take())
    assert taken == [0, 0, STOP_ASKED, 8]
    channel_.flush()
    assert channel_.take() == 0


def test_ticks_without_a_record_bring_decisions_too(clock):
    channel_, seen = channel(lambda: STOP_ASKED)
    for _ in range(3):
        clock.now += 1.0
        channel_.tick()
    assert channel_.flags == STOP_ASKED
    assert seen == []


def test_the_clock_splits_a_backward_pass_where_the_gradients_are_ready(monkeypatch):
    from nbddp.worker import clock as module

    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock = CpuClock()
    clock.start()
    clock.lap(DATA)
    clock.lap(FORWARD)
    clock.gradients_ready()
    clock.lap_backward()
    clock.lap(OPTIMIZER)
    times = clock.stop().read()
    clock.lap_backward()
    assert (times[DATA], times[FORWARD], times[BACKWARD], times[SYNC], times[OPTIMIZER]) == (1.0, 2.0, 3.0 + 6.0, 4.0, 5.0)


class StreamOfGpu:
    """A GPU that works off what it is given, on the same clock as the host; `Event` stands in for torch.cuda.Event."""

    def __init__(self):
        self.host = self.gpu = 0.0
        stream = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                self.at = stream.gpu = max(stream.gpu, stream.host)

            def query(self):
                return self.at <= stream.host

            def synchronize(self):
                stream.host = max(stream.host, self.at)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        self.Event = Event

    def ask(self, host_s, gpu_s, kernels=100):
        """Launch kernels, which takes the host a time, for the GPU to work another."""
        for _ in range(kernels):
            self.host += host_s / kernels
            self.gpu = max(self.gpu, self.host) + gpu_s / kernels


@pytest.fixture
def gpu(monkeypatch):
    from nbddp.worker import clock as module

    stream = StreamOfGpu()
    monkeypatch.setattr(module.torch.cuda, "Event", stream.Event)
    monkeypatch.setattr(module.time, "perf_counter", lambda: stream.host)
    return stream


def starved_on(gpu, *, gpu_s, host_s=0.010, sync=lambda: None, held_up=False, step=5):
    """Whether the GPU starves in the last of some steps; `sync` is what the guard does before the update."""
    clock = CudaClock()
    for _ in range(step):
        clock.start()
        clock.lap(DATA)
        for phase in (FORWARD, BACKWARD):
            gpu.ask(host_s, gpu_s)
            if held_up:  # the queue of launches is full: the host goes on when the GPU does
                gpu.host = max(gpu.host, gpu.gpu - 0.020)
            if phase == FORWARD:
                clock.lap(FORWARD)
        clock.gradients_ready()
        clock.lap_backward()
        sync()
        gpu.ask(host_s / 5, gpu_s / 5)
        clock.lap(OPTIMIZER)
        times = clock.stop()
    gpu.host = max(gpu.host, gpu.gpu)
    assert sum(times.read()) > 0
    return times.starved()


def test_a_gpu_that_is_done_as_soon_as_it_is_asked_starves(gpu):
    assert starved_on(gpu, gpu_s=0.004)


def test_a_gpu_that_has_work_in_store_does_not(gpu):
    assert not starved_on(gpu, gpu_s=0.015)
    assert not starved_on(gpu, gpu_s=0.015, held_up=True, step=40)


@pytest.mark.parametrize("gpu_s, starved", [(0.004, True), (0.015, False)])
def test_waiting_for_the_gpu_in_each_step_does_not_hide_which_of_the_two_is_slow(gpu, gpu_s, starved):
    def wait():
        gpu.host = max(gpu.host, gpu.gpu)

    assert starved_on(gpu, gpu_s=gpu_s, sync=wait) is starved


def gpu_times(gpu, *, data_s, steps=20, passes_s=0.020, host_s=0.002, copy_s=0.0):
    """The mean times of steps whose batches take the host a time to make, and the GPU one to copy; and how long a step took."""
    clock, found = CudaClock(), []
    for _ in range(steps):
        began = gpu.gpu
        clock.start()
        gpu.host += data_s
        gpu.ask(0.0, copy_s)
        clock.lap(DATA)
        for phase in (FORWARD, BACKWARD):
            gpu.ask(host_s / 2, passes_s / 2)
            clock.lap(phase)
        gpu.ask(host_s / 5, passes_s / 5)
        clock.lap(OPTIMIZER)
        found.append((clock.stop(), gpu.gpu - began))
        gpu.host = max(gpu.host, gpu.gpu - 0.060)  # as far as a host runs ahead
    return np.mean([times.read() for times, _ in found[steps // 2 :]], axis=0), np.mean([taken for _, taken in found[steps // 2 :]])


@pytest.mark.parametrize(
    "data_s, copy_s, told_s",
    [(0.010, 0.0, 0.0), (0.010, 0.004, 0.004), (0.040, 0.0, 0.0184), (0.040, 0.004, 0.0184)],
)
def test_data_that_the_host_makes_while_the_gpu_computes_takes_none_of_its_time(gpu, data_s, copy_s, told_s):
    """Of 24 ms that the GPU computes; data that takes longer is waited for, and so is the copy."""
    times, taken_s = gpu_times(gpu, data_s=data_s, copy_s=copy_s)
    assert times[DATA] == pytest.approx(told_s, abs=1.5e-3)
    assert times.sum() == pytest.approx(taken_s, rel=0.02), "the phases add up to the step"
    assert times[OPTIMIZER] == pytest.approx(0.004, rel=0.2)


def test_data_made_ahead_on_the_gpu_is_told_from_the_exchange(gpu):
    clock = CudaClock()
    clock.start()
    clock.lap(DATA)
    gpu.ask(0.001, 0.002)
    clock.lap(FORWARD)
    gpu.ask(0.001, 0.003)
    clock.gradients_ready()
    gpu.host = gpu.gpu + 0.005  # the host makes the next batch, and the GPU is done meanwhile
    clock.lap_ahead()
    gpu.ask(0.0, 0.004)
    clock.lap_backward()
    clock.lap(OPTIMIZER)
    times = clock.stop().read()
    assert (times[DATA], times[SYNC]) == (pytest.approx(0.005), pytest.approx(0.004))
    assert times[BACKWARD] == pytest.approx(0.003, rel=0.05)


def test_a_heartbeat_tells_where_the_rank_is_until_it_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(position, "PERIOD_S", 0.02)
    events, at = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0), Position()
    beat = Heartbeat(events, at, torch.device("cpu"))
    at.phase, at.epoch, at.step, at.ticks = "forward", 2, 7, 9
    reader, found = EventReader(tmp_path), []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not any(event.data["position"] == [2, 7, 9] for event in found):
        found += reader.poll()
        time.sleep(0.01)
    beat.stop()
    found += reader.poll()
    last = found[-1]
    assert (last.kind, last.data["step"], last.data["phase"], last.data["position"]) == ("heartbeat", 7, "forward", [2, 7, 9])
    assert last.data["memory"] > 1 << 20
    assert not any(thread.name == "nbddp-heartbeat" for thread in threading.enumerate())
    events.close()


def test_losses_that_are_infinite_both_ways_are_said_by_a_message_alone(tmp_path):
    events = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    reporter = Reporter(events, rank=0, world_size=2)
    reporter.begin_stage(samples_per_epoch=8, on_nan="warn", scaled=False)
    reporter.names = ("scalar",)
    rows = np.zeros((2, 2, FIRST_SCALAR + 1))
    rows[:, :, WEIGHT] = 4
    rows[:, :, LOSS] = rows[:, :, FIRST_SCALAR] = [[np.inf, 1e308], [-np.inf, 1e308]]
    records = [StepRecord(step, 1, 0, 0.1, 8, 4, warmup=False, applied=True, sums=(), times=None, aggregation_s=0.0) for step in (1, 2)]
    reporter(Gathered(records, rows, [0, 0]))  # a warning of numpy's would be an error here, and a line of the user's log there
    events.close()
    message, steps = EventReader(tmp_path).poll()
    assert message.data["text"].startswith("step 1: the loss of rank 0 is not finite")
    assert np.isnan(steps.data["loss"][0])
