"""Each rule of the advice with a run that provokes it, and one that stays just below: through the reporter's events and the fold of the state."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.advice import CONFIRMED, RULES, Advice, advise
from nbddp.kernel.line import parse
from nbddp.planning import Machine, make_plan
from nbddp.stage import Stage
from nbddp.state import RunState
from nbddp.window import BLOCK_S, BLOCK_STEPS
from support.fake_run import FakeRun
from support.timed_run import WARMUP, Step, TimedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS = 100
BALANCED = Step()  # of 0.1 s, of which nothing stands out


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Callable[..., TimedRun]]:
    runs: list[TimedRun] = []

    def make(**options: Any) -> TimedRun:
        runs.append(TimedRun(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def given(run: TimedRun) -> dict[str, Advice]:
    said = advise(run.state, run.config)
    assert len({part.rule for part in said}) == len(said)
    return {part.rule: part for part in said}


def option(run: TimedRun, rule: str) -> str | None:
    return given(run)[rule].option


# -- when anything is said


def test_a_run_whose_steps_are_balanced_gets_no_advice(timed):
    assert given(timed(nproc=4, batch_size=512).begin().train(STEPS, BALANCED)) == {}


def test_states_that_know_little_get_no_advice(timed, tmp_path):
    run = timed()
    assert advise(RunState(), run.config) == []
    assert given(run) == {}
    fake = FakeRun(tmp_path, name="fake")  # whose plan has no stages, as those of early versions
    fake.start()
    fake.train(fake.total_steps)
    from nbddp.kernel.follow import fold_all

    assert [part.rule for part in advise(fold_all(fake.run_dir), run.config)] == ["straggler"]


def test_nothing_is_said_of_the_warm_up_nor_before_enough_steps_and_seconds_were_seen(timed):
    slow = Step(data=0.3)
    run = timed().begin().train(WARMUP, slow)
    assert run.state.window.total.steps == 0
    for _ in range(CONFIRMED * BLOCK_STEPS - 1):
        assert given(run.train(1, slow, report=1)) == {}
    assert set(given(run.train(1, slow, report=1))) == {"loader-bound"}
    quick = timed().begin().train(WARMUP, slow)
    while quick.state.window.total.seconds < CONFIRMED * BLOCK_S - 0.1:
        assert given(quick.train(5, slow, scale=0.1)) == {}
    assert quick.state.window.total.steps > CONFIRMED * BLOCK_STEPS
    assert set(given(quick.train(10, slow, scale=0.1))) == {"loader-bound"}


def test_one_block_that_differs_changes_nothing(timed):
    slow = Step(data=0.3)
    run = timed().begin().train(WARMUP, BALANCED).train(5, slow).train(40, BALANCED)
    assert given(run) == {}
    run.train(20, slow)
    assert set(given(run)) == {"loader-bound"}
    run.train(10, BALANCED)  # of 1 s: one block
    assert set(given(run)) == {"loader-bound"}
    run.train(30, BALANCED)
    assert given(run) == {}


def test_values_between_the_thresholds_keep_what_was_said(timed):
    between = Step(data=0.025)  # 22 % of a step: less than what brings the advice, more than what takes it away
    assert given(timed().begin().train(STEPS, between)) == {}
    run = timed().begin().train(20, Step(data=0.3))
    for _ in range(40):
        assert set(given(run.train(5, between))) == {"loader-bound"}


def test_noise_around_a_threshold_makes_no_flicker(timed):
    chance = random.Random(0)
    run, said = timed().begin().train(WARMUP, BALANCED), []
    for _ in range(300):
        run.train(5, Step(data=0.03 * chance.uniform(0.7, 1.3)))
        said.append("loader-bound" in given(run))
    assert sum(one != other for one, other in itertools.pairwise(said)) <= 1


def test_another_stage_is_looked_at_anew(timed):
    stages = [Stage("head", epochs=1), Stage("all", epochs=1, batch_size=64)]
    run = timed(nproc=2, stages=stages, batch_size=256).begin().train(50, Step(data=0.3))
    assert set(given(run)) == {"loader-bound"}
    run.begin(1)
    assert set(given(run)) == {"loader-bound"}  # until the stage has steps of its own
    run.train(WARMUP + 5, BALANCED)
    assert given(run) == {}


def test_a_run_that_failed_gets_none_and_one_that_ended_keeps_it(timed):
    run = timed().begin().train(STEPS, Step(data=0.3))
    run.state.state = "finished"
    assert set(given(run)) == {"loader-bound"}
    run.state.state = "failed"
    assert given(run) == {}


def test_a_snapshot_gets_the_same_advice_later_on(timed):
    run = timed().begin().train(STEPS, Step(data=0.3))
    snapshot, before = run.state.snapshot(), given(run)
    run.train(STEPS, BALANCED)
    assert given(run) == {}
    assert {part.rule: part for part in advise(snapshot, run.config)} == before


# -- data


def test_a_loader_bound_run_is_told_how_many_workers_it_takes(timed):
    run = timed(nproc=2, batch_size=256, cores=16).begin().train(STEPS, Step(data=0.18))  # 2 workers per rank make it in the remaining 0.09 s
    said = given(run)
    assert set(said) == {"loader-bound"}
    assert said["loader-bound"].option == "--num-workers 4"
    assert "67 % of a step (180 ms of 270 ms) is waiting for data" in said["loader-bound"].text


@pytest.mark.parametrize("data_s, said", [(0.031, True), (0.029, False)])  # of 0.09 s besides: 25.6 % and 24.4 %
def test_the_threshold_of_loader_bound(timed, data_s, said):
    assert ("loader-bound" in given(timed().begin().train(STEPS, Step(data=data_s)))) is said


def test_time_for_data_that_a_worker_would_cost_as_well_is_no_reason_for_one(timed):
    quick = Step(data=0.9e-3, forward=0.3e-3, backward=0.3e-3, sync=0, optimizer=0.1e-3)
    assert given(timed().begin().train(3000, quick, report=50)) == {}
    assert set(given(timed().begin().train(3000, replace(quick, data=1.1e-3), report=50))) == {"loader-bound"}


@pytest.mark.parametrize(
    "options, data_s, expected",
    [
        ({"nproc": 2, "cores": 4}, 1.0, "--num-workers 2"),  # 12 per rank would be needed: the cores have room for 1
        ({"nproc": 2, "cores": 2}, 1.0, "--num-workers 2"),
        ({"nproc": 3, "cores": 16, "batch_size": 96}, 1.0, "--num-workers 12"),
        ({"nproc": 3, "cores": 2, "batch_size": 96}, 1.0, None),
        ({"nproc": 2, "cores": 32, "num_workers": 4}, 0.09, "--num-workers 8"),  # twice as quick is what it takes
        ({"nproc": 2, "cores": 4, "num_workers": 4}, 0.09, "--prefetch-factor 4"),
        ({"nproc": 2, "cores": 4, "num_workers": 4, "prefetch_factor": 4}, 0.09, None),
        ({"nproc": 2, "cores": 32, "num_workers": 4, "persistent_workers": False, "n_train": 1024}, 0.09, "--persistent-workers"),
        ({"nproc": 2, "cores": 32, "num_workers": 4, "persistent_workers": False}, 0.09, "--num-workers 8"),
    ],
)
def test_what_a_loader_bound_run_is_advised(timed, options, data_s, expected):
    run = timed(**options, epochs=10).begin().train(STEPS, Step(data=data_s))
    assert option(run, "loader-bound") == expected
    assert expected is not None or "make a sample cheaper" in given(run)["loader-bound"].text


def test_workers_beyond_the_cores_are_too_many_where_data_is_quick(timed):
    run = timed(nproc=2, cores=8, num_workers=20, batch_size=256).begin().train(STEPS, Step(data=0.004))
    said = given(run)
    assert set(said) == {"too-many-workers"}
    assert said["too-many-workers"].option == "--num-workers 6"
    assert "20 loader workers share 8 cores with 2 ranks, and data takes 4 % of a step" in said["too-many-workers"].text
    assert given(timed(nproc=2, cores=8, num_workers=20, batch_size=256).begin().train(STEPS, Step(data=0.006))) == {}  # 6 %
    assert given(timed(nproc=2, cores=20, num_workers=20, batch_size=256).begin().train(STEPS, Step(data=0.004))) == {}


def test_no_run_has_too_few_workers_and_too_many(timed):
    run = timed(nproc=2, cores=8, num_workers=20, batch_size=256).begin()
    for data_s in (0.001, 0.3, 0.001, 0.02, 0.3):
        for _ in range(12):
            run.train(5, Step(data=data_s))
            assert len(given(run)) <= 1


# -- ranks


def test_a_straggler_is_named_with_its_device_and_the_phase_that_differs(timed):
    slow = Step(forward=0.08)
    run = timed(nproc=4, gpu=9.0, batch_size=512).begin().train(STEPS, BALANCED, BALANCED, slow, BALANCED)
    said = given(run)
    assert set(said) == {"straggler"}
    text = said["straggler"].text
    assert "rank 2 (cuda:2) is the slowest in 100 % of the steps" in text
    assert "the others wait 50 ms of 150 ms for it: its forward pass takes 80 ms, that of the others 30 ms" in text
    assert said["straggler"].option == "%ddp_stacks"
    run.state.state = "finished"
    assert option(run, "straggler") is None


@pytest.mark.parametrize("forward_s, said", [(0.049, True), (0.046, False)])  # 16 % and 14 % of the step
def test_the_threshold_of_a_straggler(timed, forward_s, said):
    run = timed(nproc=2, batch_size=256).begin().train(STEPS, BALANCED, Step(forward=forward_s))
    assert ("straggler" in given(run)) is said


def test_ranks_that_are_late_in_turn_are_no_stragglers(timed):
    run = timed(nproc=2, batch_size=256).begin()
    for turn in range(STEPS):
        run.train(1, *((BALANCED, Step(forward=0.1)) if turn % 2 else (Step(forward=0.1), BALANCED)), report=1)
    assert given(run) == {}


def test_a_rank_that_is_quick_is_no_reason_to_call_another_slow(timed):
    quick = Step(forward=0.005, backward=0.01)
    assert given(timed(nproc=3, batch_size=384).begin().train(STEPS, quick, BALANCED, BALANCED)) == {}


def test_a_device_that_is_slow_in_everything_is_told_from_a_step_that_differs(timed):
    run = timed(nproc=2, gpu=9.0, batch_size=256).begin().train(STEPS, BALANCED, Step(forward=0.06, backward=0.1))
    text = "its forward and backward passes take 160 ms, those of the others 80 ms. Its GPU is slower, or shared with another process"
    assert text in given(run)["straggler"].text


def test_one_rank_that_waits_for_data_is_a_straggler_and_all_that_do_are_loader_bound(timed):
    one = timed(nproc=3, batch_size=384).begin().train(STEPS, BALANCED, Step(data=0.2), BALANCED)
    assert set(given(one)) == {"straggler"}
    assert "its data takes 200 ms, that of the others 10 ms" in given(one)["straggler"].text
    assert option(one, "straggler") == "--num-workers 9"
    everyone = timed(nproc=3, batch_size=384).begin().train(STEPS, Step(data=0.1), Step(data=0.2), Step(data=0.1))
    assert set(given(everyone)) == {"loader-bound"}


def test_a_straggler_for_another_reason_is_named_beside_slow_data(timed):
    run = timed(nproc=2, batch_size=256).begin().train(STEPS, Step(data=0.1), Step(data=0.1, forward=0.2))
    assert list(given(run)) == ["loader-bound", "straggler"]


def test_ranks_without_a_larger_batch(timed):
    busy = Step(data=0.001, forward=0.02, backward=0.03, sync=0.02, optimizer=0.01)
    run = timed(nproc=4, batch_size=64, optimizer="sgd", lr=0.1).begin().train(STEPS, busy)
    said = given(run)
    assert set(said) == {"unscaled-batch"}  # sync-bound would advise the same
    assert said["unscaled-batch"].option == "--batch-size 256 --lr-scale linear --base-batch-size 64"
    assert "16 samples per rank (64 = 4 x 16): as many steps as on one rank, and 37 % of a step (30 ms of 81 ms) is all-reduce" in said["unscaled-batch"].text


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"nproc": 4, "batch_size": 64}, "--batch-size 256 --lr-scale sqrt --base-batch-size 64"),
        ({"nproc": 2, "batch_size": 16}, "--batch-size 64 --lr-scale sqrt --base-batch-size 16"),  # 16 per rank would be too few again
        ({"nproc": 2, "per_rank_batch_size": 8}, "--per-rank-batch-size 32 --lr-scale sqrt --base-batch-size 16"),
        ({"nproc": 4, "batch_size": 64, "lr_scale": "sqrt", "base_batch_size": 32}, "--batch-size 256"),
        ({"nproc": 4, "batch_size": 64, "n_train": 640}, "-n 1"),
        ({"nproc": 2, "batch_size": 32, "n_train": 320, "devices": (0, 1), "gpu": 9.0}, "-n 1 --devices 0"),
        ({"nproc": 2, "per_rank_batch_size": 16, "n_train": 320}, "-n 1 --per-rank-batch-size 32"),
        ({"nproc": 64, "batch_size": 1024, "n_train": 1_000_000}, "--batch-size 8192 --lr-scale sqrt --base-batch-size 1024"),  # of 128 each
    ],
)
def test_what_an_unscaled_batch_is_advised(timed, options, expected):
    run = timed(**options, epochs=20).begin().train(STEPS, Step(sync=0.03))
    assert option(run, "unscaled-batch") == expected


@pytest.mark.parametrize("sync_s, said", [(0.02, True), (0.016, False)])  # with the update 21 % and 18 % of the step
def test_the_threshold_of_an_unscaled_batch(timed, sync_s, said):
    assert ("unscaled-batch" in given(timed(nproc=4, batch_size=64).begin().train(STEPS, Step(sync=sync_s)))) is said


def test_32_samples_per_rank_are_enough(timed):
    assert given(timed(nproc=4, batch_size=128).begin().train(STEPS, Step(sync=0.03))) == {}
    assert set(given(timed(nproc=4, batch_size=124).begin().train(STEPS, Step(sync=0.03)))) == {"unscaled-batch"}
    assert given(timed(nproc=1, batch_size=4).begin().train(STEPS, Step(optimizer=0.1))) == {}


def test_small_batches_whose_samples_take_long_do_scale(timed):
    assert given(timed(nproc=4, batch_size=8).begin().train(STEPS, Step(forward=1.0, backward=2.0, sync=0.1))) == {}


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"batch_size": 1024}, "--grad-compression bf16"),
        ({"batch_size": 1024, "grad_compression": "bf16"}, "--batch-size 2048 --accumulate 2"),
        ({"batch_size": 1024, "bucket_cap_mb": 1.0}, "--bucket-cap-mb 25"),
        ({"batch_size": 1024, "facts": {"trainable": 1000}}, "--batch-size 2048 --accumulate 2"),
        ({"batch_size": 1024, "facts": {"trainable": 1000}, "n_train": 4096}, None),
        ({"per_rank_batch_size": 256, "accumulate": 2, "grad_compression": "fp16"}, "--per-rank-batch-size 512 --accumulate 4"),
    ],
)
def test_sync_bound_runs_exchange_less_or_less_often(timed, options, expected):
    run = timed(nproc=4, **options).begin().train(STEPS, Step(sync=0.06))
    assert set(given(run)) == {"sync-bound"}
    assert option(run, "sync-bound") == expected


@pytest.mark.parametrize("sync_s, said", [(0.042, True), (0.040, False)])  # of 0.095 s besides: 30.7 % and 29.6 %
def test_the_threshold_of_sync_bound(timed, sync_s, said):
    assert ("sync-bound" in given(timed(nproc=2, batch_size=256).begin().train(STEPS, Step(sync=sync_s)))) is said


def test_waiting_for_a_straggler_is_not_the_network(timed):
    run = timed(nproc=2, batch_size=256).begin().train(STEPS, Step(sync=0.25), Step(forward=0.23, sync=0.15))
    assert set(given(run)) == {"straggler"}


@pytest.mark.parametrize(
    "norm, expected",
    [("keep", "--norm sync"), ("auto", None)],  # with auto, layers stay that can't be synchronised
)
def test_batch_norm_over_few_samples(timed, norm, expected):
    facts = {"batch_norm": 3}
    run = timed(nproc=4, batch_size=32, norm=norm, facts=facts).begin().train(STEPS, BALANCED)
    assert set(given(run)) == {"small-batch-norm"}
    assert option(run, "small-batch-norm") == expected
    assert "3 BatchNorm layers take statistics of each rank's 8 samples alone" in given(run)["small-batch-norm"].text
    assert given(timed(nproc=4, batch_size=64, norm=norm, facts=facts).begin().train(STEPS, BALANCED)) == {}  # 16 each
    assert set(given(timed(nproc=4, batch_size=64, accumulate=2, norm=norm, facts=facts).begin().train(STEPS, BALANCED))) == {"small-batch-norm"}
    assert given(timed(nproc=4, batch_size=32, norm=norm).begin().train(STEPS, BALANCED)) == {}
    assert given(timed(nproc=1, batch_size=8, norm=norm, facts=facts).begin().train(STEPS, BALANCED)) == {}


# -- compiling and precision


def test_a_gpu_that_waits_for_the_host_wants_a_compiled_step(timed):
    run = timed(gpu=9.0, batch_size=256, epochs=20).begin().train(STEPS, BALANCED, starved=0.97)
    said = given(run)
    assert set(said) == {"launch-bound"}
    assert "in 97 % of the steps the GPU was done before it was asked for more" in said["launch-bound"].text
    assert said["launch-bound"].option == "--compile"
    assert given(timed(gpu=9.0, batch_size=256, epochs=20).begin().train(STEPS, BALANCED, starved=0.79)) == {}


@pytest.mark.parametrize(
    "options, compile_s, expected",
    [
        ({"epochs": 5}, None, "--batch-size 512"),  # 195 s of steps: compiling would not pay
        ({"epochs": 20, "drop_last": False}, None, "--batch-size 512"),
        ({"epochs": 20, "compile": True}, 30.0, "--compile-mode reduce-overhead"),
        ({"epochs": 20, "compile": True, "compile_mode": "max-autotune"}, 30.0, "--batch-size 512"),
        ({"epochs": 20, "compile": True, "compile_mode": "max-autotune", "n_train": 2560}, 3.0, None),
    ],
)
def test_what_a_launch_bound_run_is_advised(timed, options, compile_s, expected):
    run = timed(gpu=9.0, batch_size=256, **options).begin(compile_s=compile_s).train(STEPS, BALANCED, starved=1.0)
    assert option(run, "launch-bound") == expected


def test_a_gpu_that_waits_for_data_is_not_launch_bound(timed):
    assert set(given(timed(gpu=9.0, batch_size=256).begin().train(STEPS, Step(data=0.3), starved=1.0))) == {"loader-bound"}


def test_small_batches_on_gpus_that_wait_are_unscaled(timed):
    run = timed(nproc=4, gpu=9.0, batch_size=32).begin().train(STEPS, Step(sync=0.001), starved=0.9)
    assert set(given(run)) == {"unscaled-batch"}
    assert "as on one GPU, and in 90 % of them the GPU waits for the host" in given(run)["unscaled-batch"].text


@pytest.mark.parametrize(
    "gpu, options, expected",
    [
        (9.0, {"precision": "fp32"}, "--matmul-precision high"),
        (8.0, {"precision": "fp32"}, "--matmul-precision high"),
        (7.5, {}, "--precision fp16"),
        (9.0, {}, None),
        (9.0, {"precision": "fp32", "matmul_precision": "high"}, None),
        (9.0, {"precision": "fp32", "facts": {"matmul_precision": "medium"}}, None),  # inherited from the notebook
        (9.0, {"precision": "fp32", "facts": {"float32": False}}, None),
        (6.1, {"precision": "fp32"}, None),
        (None, {"precision": "fp32"}, None),
    ],
)
def test_tensor_cores_that_are_not_used(timed, gpu, options, expected):
    run = timed(gpu=gpu, batch_size=256, **options).begin().train(STEPS, BALANCED)
    assert {rule: part.option for rule, part in given(run).items()} == ({} if expected is None else {"precision": expected})


@pytest.mark.parametrize("forward_s, said", [(0.021, True), (0.018, False)])  # of 0.07 s: with backward 51 % and 49 %
def test_the_threshold_of_precision(timed, forward_s, said):
    step = Step(data=0.01, forward=forward_s, backward=0.05, sync=0.02, optimizer=0.04)
    assert ("precision" in given(timed(gpu=9.0, batch_size=256, precision="fp32").begin().train(STEPS, step))) is said


@pytest.mark.parametrize("compile_s, said", [(39.5, True), (38.5, False)])  # 390 steps of 0.1 s
def test_compiling_that_can_not_pay(timed, compile_s, said):
    run = timed(batch_size=256, compile=True).begin(compile_s=compile_s).train(STEPS, BALANCED)
    assert ("compile-cannot-pay" in given(run)) is said
    if said:
        assert option(run, "compile-cannot-pay") == "--compile false"
        assert "compiling took 39.5 s, and the 390 steps take 39 s" in given(run)["compile-cannot-pay"].text


def test_compiling_for_a_run_of_few_steps_is_said_to_be_in_vain_within_a_second(timed):
    run = timed(batch_size=256, compile=True, max_steps=20).begin(compile_s=30.0).train(WARMUP + 5, BALANCED, scale=0.1)
    assert option(run, "compile-cannot-pay") == "--compile false"


def test_compiling_in_a_run_that_time_ends(timed):
    assert set(given(timed(batch_size=256, compile=True, max_time="60 s").begin(compile_s=70.0).train(STEPS, BALANCED))) == {"compile-cannot-pay"}
    assert given(timed(batch_size=256, compile=True, max_time="60 s").begin(compile_s=50.0).train(STEPS, BALANCED)) == {}


def test_compiling_in_a_run_that_was_stopped_early_is_judged_by_the_steps_it_took(timed):
    run = timed(batch_size=256, compile=True, epochs=10).begin(compile_s=30.0).train(STEPS, BALANCED)
    assert given(run) == {}
    run.state.state = "stopped"
    assert set(given(run)) == {"compile-cannot-pay"}


def test_options_of_compiling_that_would_be_left_over_are_named(timed):
    run = timed(batch_size=256, compile=True, compile_mode="max-autotune").begin(compile_s=100.0).train(STEPS, BALANCED)
    assert option(run, "compile-cannot-pay") == "leave out --compile, --compile-mode"


def test_a_step_that_is_compiled_again_and_again(timed):
    run = timed(batch_size=256, compile=True, epochs=100).begin(compile_s=10.0).train(STEPS, BALANCED, recompiles=(20, 50))
    assert given(run) == {}  # twice is how torch finds out what varies
    run.train(STEPS, BALANCED, recompiles=(150,))
    assert set(given(run)) == {"recompiling"}
    assert option(run, "recompiling") == "--compile false"
    assert "the step was compiled again 3 times" in given(run)["recompiling"].text
    run.train(3 * STEPS, BALANCED)
    assert given(run) == {}  # it has settled
    run.train(STEPS, BALANCED, recompiles=range(505, 510)).train(3 * STEPS, BALANCED)
    assert set(given(run)) == {"recompiling"}  # 8 times: from here on nothing is compiled any more


def test_compiling_again_that_can_not_pay_anyway_is_one_advice(timed):
    run = timed(batch_size=256, compile=True).begin(compile_s=100.0).train(STEPS, BALANCED, recompiles=range(20, 90, 10))
    assert set(given(run)) == {"compile-cannot-pay"}


# -- what is advised can be written


PROVOKED: dict[str, Callable[[Callable[..., TimedRun]], TimedRun]] = {
    "loader-bound": lambda timed: timed(nproc=2, batch_size=256).begin().train(STEPS, Step(data=0.3)),
    "too-many-workers": lambda timed: timed(nproc=2, cores=8, num_workers=20, batch_size=256).begin().train(STEPS, Step(data=0.004)),
    "straggler": lambda timed: timed(nproc=2, batch_size=256).begin().train(STEPS, BALANCED, Step(data=0.2)),
    "unscaled-batch": lambda timed: timed(nproc=4, batch_size=64).begin().train(STEPS, Step(sync=0.05)),
    "sync-bound": lambda timed: timed(nproc=4, batch_size=512, grad_compression="bf16").begin().train(STEPS, Step(sync=0.06)),
    "launch-bound": lambda timed: timed(gpu=9.0, batch_size=256, epochs=20).begin().train(STEPS, BALANCED, starved=1.0),
    "precision": lambda timed: timed(gpu=9.0, batch_size=256, precision="fp32").begin().train(STEPS, BALANCED),
    "small-batch-norm": lambda timed: timed(nproc=2, batch_size=16, norm="keep", facts={"batch_norm": 1}).begin().train(STEPS, BALANCED),
    "compile-cannot-pay": lambda timed: timed(batch_size=256, compile=True).begin(compile_s=100.0).train(STEPS, BALANCED),
    "recompiling": lambda timed: timed(batch_size=256, compile=True, epochs=9).begin(compile_s=1.0).train(STEPS, BALANCED, recompiles=(20, 50, 80)),
}


def test_every_rule_can_be_provoked():
    assert set(PROVOKED) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", PROVOKED)
def test_the_option_is_one_that_the_line_takes_beside_the_others(timed, rule):
    run = PROVOKED[rule](timed)
    written = option(run, rule)
    invocation = parse(f"net data {written}")
    config = run.config.replace(**invocation.options)
    assert config != run.config
    gpus = ("H100",) * run.plan.nproc if run.plan.device == "cuda" else ()
    make_plan(config, n_train=100_000, n_val=0, machine=Machine(gpus, 16))


def test_options_of_a_stage_are_written_where_it_is(timed):
    stages = [Stage("head", epochs=1, batch_size=64, optimizer="sgd"), Stage("all", epochs=1)]
    run = timed(nproc=4, stages=stages, batch_size=512).begin().train(STEPS, Step(sync=0.05))
    written = option(run, "unscaled-batch")
    assert written == "Stage('head', batch_size=256, lr_scale='linear', base_batch_size=64)"
    assert eval(written, {"Stage": Stage}).options["batch_size"] == 256
    run = timed(nproc=2, stages=stages, batch_size=512).begin().train(STEPS, Step(data=0.3))
    assert option(run, "loader-bound").startswith("--num-workers ")  # loader workers are those of the run


# -- properties


@pytest.mark.parametrize("rule", PROVOKED)
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_where_everything_takes_longer_the_advice_stays(timed, rule, factor, monkeypatch):
    if rule == "compile-cannot-pay":
        factor = min(factor, 1.0)  # longer steps do bring it back
    train = TimedRun.train
    monkeypatch.setattr(TimedRun, "train", lambda run, steps, *ranks, **options: train(run, int(steps / min(1, factor)), *ranks, scale=factor, **options))
    run = PROVOKED[rule](timed)
    scaled = given(run)
    monkeypatch.setattr(TimedRun, "train", train)
    same = given(PROVOKED[rule](timed))
    assert {rule: part.option for rule, part in scaled.items()} == {rule: part.option for rule, part in same.items()}


@pytest.mark.parametrize("seed", range(8))
def test_another_order_of_the_ranks_only_renames_the_straggler(timed, seed):
    chance = random.Random(seed)
    ranks = [Step(data=chance.uniform(0.005, 0.05), forward=chance.uniform(0.02, 0.06), sync=chance.uniform(0.0, 0.05)) for _ in range(4)]
    ranks[0] = replace(ranks[0], forward=0.3)
    order = chance.sample(range(4), 4)
    one = given(timed(nproc=4, batch_size=512).begin().train(STEPS, *ranks))
    other = given(timed(nproc=4, batch_size=512).begin().train(STEPS, *(ranks[rank] for rank in order)))
    assert "straggler" in one
    assert list(one) == list(other)
    renamed = one["straggler"].text.replace("rank 0 (cpu)", f"rank {order.index(0)} (cpu)")
    assert other["straggler"].text == renamed


@pytest.mark.parametrize("seed", range(8))
def test_no_two_advices_exclude_each_other(timed, seed):
    """Whatever the times are: each option names a field once, and none is both on and off."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"nproc": chance.choice([1, 2, 4]), "gpu": chance.choice([None, 7.5, 9.0]), "cores": chance.choice([2, 8, 64])}
    options |= {"batch_size": chance.choice([16, 64, 1024]), "num_workers": chance.choice([0, 4, 32]), "compile": chance.random() < 0.5}
    run = timed(**options, precision="fp32", epochs=chance.choice([1, 50]), norm="keep", facts={"batch_norm": chance.choice([0, 2])})
    run.begin(compile_s=chance.choice([1.0, 1000.0]) if run.config.compile else None)
    for _ in range(10):
        ranks = [Step(*(10 ** chance.uniform(-4, -1) for _ in range(5))) for _ in range(run.plan.nproc)]
        run.train(60, *ranks, starved=chance.choice([0.0, 1.0]), recompiles=range(run.step, run.step + chance.choice([0, 4])))
        fields: dict[str, Any] = {}
        for part in advise(run.state, run.config):
            for name, value in parse(f"net data {part.option}").options.items() if part.option and part.option.startswith("-") else ():
                assert fields.setdefault(name, value) == value, advise(run.state, run.config)
            assert part.text
            assert "nan" not in part.text


# -- what is not advised


def test_micro_batches_have_a_handover_each(timed):
    """Quick data in eight pieces: loader workers would hand over each of them."""
    quick = Step(data=4e-3, forward=1e-3, backward=1e-3, sync=0, optimizer=1e-3)
    assert set(given(timed(batch_size=256).begin().train(STEPS * 5, quick))) == {"loader-bound"}
    assert given(timed(batch_size=256, accumulate=8).begin().train(STEPS * 5, quick)) == {}


def test_a_rank_whose_data_is_late_is_named_where_ranks_meet_in_the_forward_pass(timed):
    """The others' forward passes last until it is there, so that the sums of all ranks are the same, and any of them may be called the slowest."""
    other, late = Step(data=0.01, forward=0.12), Step(data=0.1, forward=0.03)
    facts = {"synced_norm": 2}
    run = timed(nproc=3, batch_size=384, facts=facts, num_workers=3).begin()
    for turn in range(STEPS):
        quick = [replace(other, forward=0.12 + 1e-4 * (turn % 2)), late, other]
        run.train(1, *quick, report=1)
    assert set(given(run)) == {"straggler"}
    text = given(run)["straggler"].text
    assert "rank 1 (cpu) is late, and the others wait 90 ms of 190 ms for it in their first synchronised BatchNorm" in text
    assert "its data takes 100 ms, that of the others 10 ms" in text
    assert "--num-workers" in option(run, "straggler")
    everyone = timed(nproc=3, batch_size=384, facts=facts).begin().train(STEPS, late)
    assert set(given(everyone)) == {"loader-bound"}
    assert given(timed(nproc=3, batch_size=384, facts=facts).begin().train(STEPS, other)) == {}


@pytest.mark.parametrize("data_s, said", [(0.040, True), (0.033, False)])  # 30 and 23 ms more than the other of 0.19 s: 16 % and 12 %
def test_the_threshold_where_ranks_meet_in_the_forward_pass(timed, data_s, said):
    ranks = [Step(data=0.01, forward=0.12), Step(data=data_s, forward=0.13 - data_s)]
    run = timed(nproc=2, batch_size=256, facts={"synced_norm": 1}).begin().train(STEPS, *ranks)
    assert ("straggler" in given(run)) is said


def test_a_forward_pass_that_is_late_can_not_be_told_where_ranks_meet_in_it(timed):
    run = timed(nproc=2, batch_size=256, facts={"synced_norm": 1}).begin().train(STEPS, Step(forward=0.13), Step(forward=0.1301))
    assert given(run) == {}


def test_a_large_step_on_many_ranks_gets_none_and_a_slow_one_among_them_is_found(timed):
    assert given(timed(nproc=64, batch_size=64 * 128).begin().train(STEPS, BALANCED)) == {}
    run = timed(nproc=64, batch_size=64 * 128).begin().train(STEPS, *[BALANCED] * 41, Step(backward=0.1), *[BALANCED] * 22)
    assert set(given(run)) == {"straggler"}
    assert "rank 41 (cpu)" in given(run)["straggler"].text


def test_a_slow_first_epoch_is_forgotten(timed):
    """Of files that are in memory from then on."""
    run = timed(num_workers=4, epochs=10).begin().train(100, Step(data=0.3))
    assert set(given(run)) == {"loader-bound"}
    assert given(run.train(60, BALANCED)) == {}


def test_pauses_between_steps_are_no_part_of_them(timed):
    """Validations that take longer than the epochs."""
    run = timed(nproc=2, batch_size=256, n_train=2560).begin()
    for _ in range(20):
        run.train(10, BALANCED)
        run.now += 1000.0
    assert given(run) == {}


def test_a_run_that_was_resumed_is_looked_at_from_there_on(timed):
    run = timed(batch_size=256, compile=True, epochs=10)
    run.step = 3850  # of 3900
    assert set(given(run.begin(compile_s=30.0).train(40, BALANCED))) == {"compile-cannot-pay"}
    run = timed(batch_size=256, compile=True, epochs=10)
    assert given(run.begin(compile_s=30.0).train(40, BALANCED)) == {}


def test_compiling_is_judged_by_the_time_that_is_left_where_that_ends_the_run(timed):
    run = timed(batch_size=256, compile=True, epochs=100, max_time="60 s").begin(compile_s=70.0).train(STEPS, BALANCED)
    assert "compiling took 70 s, and the run is to take 60 s" in given(run)["compile-cannot-pay"].text


def test_gradients_in_16_bits_are_not_compressed_to_16_bits(timed):
    run = timed(nproc=4, batch_size=1024, facts={"float32": False}).begin().train(STEPS, Step(sync=0.06))
    assert option(run, "sync-bound") == "--batch-size 2048 --accumulate 2"


def test_what_a_larger_batch_mends_is_said_once(timed):
    """Few samples per rank are the reason for noisy statistics too; and micro-batches, which spare exchanges, would not spare kernels."""
    few = timed(nproc=4, batch_size=32, norm="keep", facts={"batch_norm": 3}).begin().train(STEPS, Step(sync=0.05))
    assert set(given(few)) == {"unscaled-batch"}
    starved = timed(nproc=4, gpu=9.0, batch_size=1024, facts={"trainable": 1000}).begin().train(STEPS, Step(sync=0.06), starved=1.0)
    assert {rule: part.option for rule, part in given(starved).items()} == {"sync-bound": "--batch-size 2048 --accumulate 2"}


def test_options_that_compiling_needs_are_named_where_it_is_recompiled_too(timed):
    run = timed(batch_size=256, compile=True, compile_mode="max-autotune", epochs=100).begin(compile_s=1.0).train(STEPS, BALANCED, recompiles=(20, 50, 80))
    assert option(run, "recompiling") == "leave out --compile, --compile-mode"


def test_long_times_and_small_shares_are_readable(timed):
    run = timed(batch_size=256, compile=True, epochs=3).begin(compile_s=4000.0).train(STEPS, BALANCED)
    assert "compiling took 66.7 min, and the 1170 steps take 117 s" in given(run)["compile-cannot-pay"].text
    quick = timed(nproc=2, cores=8, num_workers=20, batch_size=256).begin().train(STEPS, Step(data=1e-4))
    assert "data takes <1 % of a step" in given(quick)["too-many-workers"].text
