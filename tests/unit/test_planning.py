"""The arithmetic of a run: what the options mean for so many ranks, samples, cores and GPUs."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.planning import DEFAULT_LR, Job, Machine, make_plan, nearest_multiples
from nbddp.plans import Plan
from nbddp.stage import STAGE_FIELDS, Stage, read_stages

CPUS, GPUS = Machine((), 2), Machine(("H100", "H100", "H100", "H100"), 32, bf16=True)
OLD_GPUS = Machine(("V100", "V100"), 8)


def plan(machine=CPUS, *, n_train=1000, n_val=0, job=None, stages=(), **options):
    given = read_stages(stages) if stages else ()
    return make_plan(TrainConfig(**options), n_train=n_train, n_val=n_val, machine=machine, job=job, stages=given)


def stage(machine=CPUS, **options):
    """The only stage of a run."""
    made = plan(machine, **options)
    assert len(made.stages) == 1
    return made.stages[0]


def refused(machine=CPUS, **options):
    with pytest.raises(ConfigError) as caught:
        plan(machine, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "machine, options, expected",
    [
        (CPUS, {}, (1, "cpu", (), "gloo", "CPU")),
        (CPUS, {"nproc": 3}, (3, "cpu", (), "gloo", "CPU")),
        (GPUS, {}, (4, "cuda", (0, 1, 2, 3), "nccl", "H100")),
        (GPUS, {"nproc": 2}, (2, "cuda", (0, 1), "nccl", "H100")),
        (GPUS, {"nproc": 2, "devices": "cpu"}, (2, "cpu", (), "gloo", "CPU")),
        (GPUS, {"devices": "1,3"}, (2, "cuda", (1, 3), "nccl", "H100")),
        (GPUS, {"devices": "1,3", "nproc": 2, "backend": "gloo"}, (2, "cuda", (1, 3), "gloo", "H100")),
    ],
)
def test_ranks_and_their_devices(machine, options, expected):
    made = plan(machine, **options)
    assert (made.nproc, made.device, made.device_indices, made.backend, made.device_name) == expected


@pytest.mark.parametrize(
    "machine, options, message",
    [
        (GPUS, {"nproc": 5}, "nproc=5 is more than the 4 visible GPUs: -n 4, or --devices cpu for ranks on the CPU"),
        (Machine(("T4",), 2), {"nproc": 2}, "nproc=2 is more than the 1 visible GPU: -n 1, or --devices cpu"),
        (GPUS, {"devices": "3,4"}, "devices=3,4: the visible GPUs are 0..3; use --devices cpu for ranks on the CPU"),
        (CPUS, {"devices": "0,1"}, "devices=0,1: this machine has no visible GPU; use --devices cpu for ranks on the CPU"),
        (GPUS, {"devices": "0,1", "nproc": 3}, "nproc=3 with 2 devices: one rank per device; leave -n out"),
        (CPUS, {"backend": "nccl"}, "backend=nccl needs GPUs, and the ranks are on the CPU: leave --backend out, or gloo"),
        (GPUS, {"backend": "nccl", "devices": "cpu"}, "backend=nccl needs GPUs"),
        (CPUS, {"nproc": 3, "batch_size": 100}, "batch_size=100 is the global batch and must divide by 3 ranks: use 99 or 102"),
        (CPUS, {"nproc": 2, "accumulate": 3, "batch_size": 8}, r"must divide by 2 ranks x 3 micro-batches = 6: use 6 or 12"),
        (CPUS, {"nproc": 4, "batch_size": 2}, "must divide by 4 ranks: use 4$"),
        (CPUS, {"nproc": 2, "per_rank_batch_size": 5, "accumulate": 2}, "per_rank_batch_size=5 does not divide into 2 micro-batches: use 4 or 6"),
        (CPUS, {"nproc": 2, "val_batch_size": 5, "n_val": 9}, "val_batch_size=5 must divide by 2 ranks: use 4 or 6"),
        (CPUS, {"nproc": 3, "num_workers": 4}, "num_workers=4 is the total over the ranks and must divide by 3 ranks: use 3 or 6"),
        (CPUS, {"n_train": 0}, "the training data is empty: it needs at least one sample"),
        (CPUS, {"n_train": 20}, "the training data has 20 samples, fewer than one batch of 32: --batch-size 20, or --drop-last false"),
        (CPUS, {"n_train": 20, "batch_size": 64, "nproc": 4}, "20 samples, fewer than one batch of 64: --batch-size 20 or less, or --drop-last false"),
        (CPUS, {"n_train": 3, "nproc": 4}, "3 samples, fewer than one batch of 128: --drop-last false$"),
        (
            CPUS,
            {"n_train": 20, "per_rank_batch_size": 16, "nproc": 2, "accumulate": 2},
            "20 samples, fewer than one batch of 32: --per-rank-batch-size 10 or less, or --drop-last false",
        ),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_nearest_that_does(machine, options, message):
    with pytest.raises(ConfigError, match=message):
        plan(machine, **options)


@pytest.mark.parametrize(
    "options, batch, per_rank, micro, default",
    [
        ({}, 32, 32, 32, True),
        ({"nproc": 2}, 64, 32, 32, True),
        ({"nproc": 2, "accumulate": 3}, 192, 96, 32, True),
        ({"nproc": 2, "batch_size": 12, "accumulate": 3}, 12, 6, 2, False),
        ({"nproc": 3, "per_rank_batch_size": 8, "accumulate": 2}, 24, 8, 4, False),
    ],
)
def test_batches(options, batch, per_rank, micro, default):
    made = plan(**options)
    only = made.stages[0]
    assert (only.batch_size, only.per_rank_batch_size, only.micro_batch_size, only.default_batch_size) == (batch, per_rank, micro, default)
    assert made.val_batch_size == batch


@st.composite
def settings(draw):
    nproc, accumulate = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return {"nproc": nproc, "accumulate": accumulate, "batch_size": nproc * accumulate * draw(st.integers(1, 9)), "drop_last": draw(st.booleans())}


@given(settings(), st.integers(1, 2000), st.integers(0, 50), st.integers(1, 5), st.none() | st.integers(1, 300))
def test_samples_steps_and_epochs_add_up(options, n_train, n_val, epochs, max_steps):
    limits = {} if max_steps is None else {"max_steps": max_steps}
    try:
        made = plan(n_train=n_train, n_val=n_val, epochs=epochs, **options, **limits)
    except ConfigError as error:
        assert options["drop_last"]
        assert n_train < options["batch_size"]
        assert "fewer than one batch" in str(error)  # noqa: PT017
        return
    batch, only = options["batch_size"], made.stages[0]
    assert only.per_rank_batch_size * made.nproc == only.micro_batch_size * only.accumulate * made.nproc == only.batch_size == batch
    used = n_train - only.dropped
    assert (only.steps_per_epoch - 1) * batch < used <= only.steps_per_epoch * batch
    assert (only.dropped == 0) if not options["drop_last"] else (only.dropped < batch and used % batch == 0)
    assert made.total_steps == only.total_steps == min(epochs * only.steps_per_epoch, max_steps or 10**9)
    assert made.val_batch_size % made.nproc == 0
    assert made.threads >= 1
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@given(st.integers(1, 1000), st.integers(1, 64))
def test_the_nearest_multiples_are_the_nearest(value, unit):
    near = [int(number) for number in re.findall(r"\d+", nearest_multiples(value, unit))]
    assert all(number % unit == 0 and abs(number - value) < unit and number > 0 for number in near)


@pytest.mark.parametrize(
    "options, epochs, total",
    [
        ({}, 1, 31),
        ({"epochs": 3}, 3, 93),
        ({"max_steps": 50}, None, 50),
        ({"max_steps": 50, "epochs": 1}, 1, 31),
        ({"max_steps": 50, "epochs": 3}, 3, 50),
        ({"max_time": 60}, None, None),
        ({"max_time": 60, "epochs": 2}, 2, 62),
    ],
)
def test_the_first_limit_counts_and_without_epochs_they_are_unlimited(options, epochs, total):
    made = plan(**options)
    assert (made.epochs, made.total_steps) == (epochs, total)
    assert made.stages[0].max_steps == made.max_steps == options.get("max_steps")


@pytest.mark.parametrize(
    "optimizer, cls", {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "lbfgs": "LBFGS"}.items()
)
def test_the_default_rate_is_torchs_own(optimizer, cls):
    import torch

    assert stage(optimizer=optimizer).lr == DEFAULT_LR[optimizer] == inspect.signature(getattr(torch.optim, cls)).parameters["lr"].default
    assert stage(optimizer=optimizer, lr=0.5).lr == 0.5


def test_a_hook_sets_its_own_rate():
    made = plan(job=Job(has_optimizer=True))
    assert made.stages[0].lr is None
    assert " · optimizer hook · " in made.line()


@pytest.mark.parametrize(
    "options, lr, said",
    [
        ({"lr": 0.1, "batch_size": 512}, 0.1, "lr 0.1"),
        ({"lr": 0.1, "batch_size": 512, "lr_scale": "linear", "base_batch_size": 128}, 0.4, "lr 0.4 (0.1 x 512/128)"),
        ({"lr": 0.1, "batch_size": 512, "lr_scale": "sqrt", "base_batch_size": 128}, 0.2, "lr 0.2 (0.1 x sqrt 512/128)"),
        ({"lr": 0.1, "batch_size": 64, "lr_scale": "linear", "base_batch_size": 128}, 0.05, "lr 0.05 (0.1 x 64/128)"),
        ({"nproc": 2, "lr_scale": "linear", "base_batch_size": 32}, 0.002, "lr 0.002 (0.001 x 64/32)"),
        ({"per_rank_batch_size": 64, "nproc": 2, "lr": 1, "lr_scale": "linear", "base_batch_size": 32}, 4.0, "lr 4 (1 x 128/32)"),
        ({"lr": 0, "lr_scale": "linear", "base_batch_size": 32}, 0.0, "lr 0 (0 x 32/32)"),
    ],
)
def test_the_rate_scales_with_the_batch_and_says_so(options, lr, said):
    made = plan(**options)
    assert made.stages[0].lr == pytest.approx(lr, rel=1e-15)
    assert said in made.line().split(" · ")


@pytest.mark.parametrize(
    "machine, options, precision, default",
    [
        (CPUS, {}, "fp32", True),
        (GPUS, {}, "bf16", True),
        (OLD_GPUS, {}, "fp32", True),
        (GPUS, {"devices": "cpu"}, "fp32", True),
        (GPUS, {"job": Job(float64=True)}, "fp32", True),
        (CPUS, {"precision": "bf16"}, "bf16", False),
        (CPUS, {"precision": "fp16"}, "fp16", False),
        (GPUS, {"precision": "fp32"}, "fp32", False),
        (CPUS, {"precision": "fp16", "optimizer": "lbfgs"}, "bf16", False),
        (CPUS, {"precision": "fp16", "job": Job(has_optimizer=True)}, "fp16", False),
        (CPUS, {"precision": "bf16", "job": Job(float64=True)}, "bf16", False),
    ],
)
def test_the_precision_in_effect_is_told(machine, options, precision, default):
    made = plan(machine, **options)
    assert (made.stages[0].precision, made.stages[0].default_precision) == (precision, default)
    assert (f"{precision} (auto)" if default else precision) in made.line().split(" · ")


@pytest.mark.parametrize(
    "machine, options, warning",
    [
        (CPUS, {"nproc": 2, "batch_size": 32}, "16 samples per rank: same steps as on one rank plus all-reduce; raise --batch-size"),
        (GPUS, {"nproc": 2, "batch_size": 32}, "16 samples per rank: same steps as on one GPU plus all-reduce"),
        (CPUS, {"nproc": 64, "n_train": 10**4}, "64 ranks on 2 cores: they take turns; -n 2 is as fast"),
        (CPUS, {"num_workers": 4}, "4 loader workers on 2 cores: more than the cores can serve"),
        (CPUS, {"load": "best"}, "load=best without validation data: best is by the training loss"),
        (CPUS, {"prefetch_factor": 4}, "prefetch_factor has no effect without loader workers: --num-workers"),
        (CPUS, {"persistent_workers": False}, "persistent_workers has no effect without loader workers"),
        (CPUS, {"val_every": 2}, "val_every has no effect without validation data: --val or --val-split"),
        (CPUS, {"val_batch_size": 32}, "val_batch_size has no effect without validation data"),
        (CPUS, {"pin_memory": True}, "pin_memory has no effect for ranks on the CPU"),
        (CPUS, {"cudnn_benchmark": True}, "cudnn_benchmark has no effect for ranks on the CPU"),
        (CPUS, {"compile_mode": "max-autotune"}, "compile_mode has no effect without --compile"),
        (CPUS, {"compile_cache_dir": "/tmp/x"}, "compile_cache_dir has no effect without --compile"),
        (CPUS, {"compile_timeout_s": 60}, "compile_timeout_s has no effect without --compile"),
        (CPUS, {"grad_compression": "bf16"}, "grad_compression has no effect on one rank"),
        (CPUS, {"find_unused_parameters": True}, "find_unused_parameters has no effect on one rank"),
        (CPUS, {"static_graph": True}, "static_graph has no effect on one rank"),
        (CPUS, {"bucket_cap_mb": 5}, "bucket_cap_mb has no effect on one rank"),
        (CPUS, {"gradient_as_bucket_view": True}, "gradient_as_bucket_view has no effect on one rank"),
        (CPUS, {"precision": "bf16", "job": Job(float64=True)}, "precision=bf16 changes nothing in a float64 model: autocast leaves float64 alone"),
        (CPUS, {"precision": "fp16", "optimizer": "lbfgs"}, "precision=fp16 with lbfgs runs as bf16: its loss can't be scaled within a line search"),
        (GPUS, {"matmul_precision": "high"}, "matmul_precision changes little under bf16, whose matrix products are not in float32"),
    ],
)
def test_warnings(machine, options, warning):
    assert len([text for text in plan(machine, **options).warnings if text.startswith(warning)]) == 1


@pytest.mark.parametrize(
    "machine, options, word",
    [
        (CPUS, {"compile": True, "compile_mode": "max-autotune", "compile_cache_dir": "/tmp/x", "compile_timeout_s": 60}, "compile"),
        (CPUS, {"nproc": 2, "grad_compression": "bf16", "static_graph": True, "bucket_cap_mb": 5}, "effect"),
        (GPUS, {"cudnn_benchmark": False, "pin_memory": True}, "effect"),
        (GPUS, {"matmul_precision": "high", "precision": "fp32"}, "matmul_precision"),
        (CPUS, {"matmul_precision": "high"}, "matmul_precision"),
    ],
)
def test_options_that_have_an_effect_are_not_warned_of(machine, options, word):
    assert not [text for text in plan(machine, **options).warnings if word in text]


def test_an_ordinary_run_has_no_warnings():
    assert plan(nproc=2, batch_size=64, n_val=100, num_workers=2, prefetch_factor=4, val_every=2).warnings == ()
    assert plan(GPUS, pin_memory=True).warnings == ()


@pytest.mark.parametrize(
    "options, monitor",
    [
        ({}, "loss"),
        ({"n_val": 9}, "val_loss"),
        ({"n_val": 9, "monitor": "loss"}, "loss"),
        ({"n_val": 9, "monitor": "val_acc"}, "val_acc"),
        ({"n_val": 9, "monitor": "acc"}, "acc"),
        ({"monitor": "loss"}, "loss"),
        ({"monitor": "loss", "patience": 3}, "loss"),
        ({"n_val": 9, "patience": 3}, "val_loss"),
        ({"n_val": 9, "monitor": "val_acc", "job": Job(recorded=("loss", "val_loss", "val_acc"))}, "val_acc"),
    ],
)
def test_what_is_monitored(options, monitor):
    assert stage(**options).monitor == monitor


RECORDED = Job(recorded=("loss", "val_loss", "val_acc"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"patience": 3}, "patience=3 needs validation data (--val or --val-split), or a value of the training to watch: --monitor loss"),
        ({"monitor": "val_loss"}, "monitor=val_loss needs validation data: give --val or --val-split, or --monitor loss"),
        ({"monitor": "val_acc", "patience": 3}, "monitor=val_acc needs validation data: give --val or --val-split, or --monitor loss"),
        (
            {"n_val": 9, "monitor": "val_ac", "job": RECORDED},
            "monitor=val_ac is not recorded; recorded are loss, val_loss, val_acc. Did you mean val_acc?",
        ),
        ({"n_val": 9, "monitor": "zzz", "job": RECORDED}, "monitor=zzz is not recorded; recorded are loss, val_loss, val_acc."),
        ({"monitor": "acc", "job": Job(recorded=("loss",))}, "monitor=acc is not recorded; recorded are loss."),
    ],
)
def test_a_value_that_nothing_records_is_refused(options, message):
    assert refused(**options) == message


@pytest.mark.parametrize(
    "options, message",
    [
        ({"warmup_steps": 32}, "warmup_steps=32 is longer than the 31 steps there are: use less, or train longer"),
        ({"warmup_steps": 100, "epochs": 3}, "warmup_steps=100 is longer than the 93 steps there are: use less, or train longer"),
        ({"warmup_steps": 9, "max_steps": 8}, "warmup_steps=9 is longer than the 8 steps there are: use less, or train longer"),
        (
            {"schedule": "cosine", "max_time": 60},
            "schedule=cosine ends at a step that is not known: give epochs or max_steps, beside the limit of the run",
        ),
        (
            {"schedule": "linear", "max_time": 60},
            "schedule=linear ends at a step that is not known: give epochs or max_steps, beside the limit of the run",
        ),
    ],
)
def test_a_schedule_has_room_and_an_end(options, message):
    assert refused(**options) == message


@pytest.mark.parametrize(
    "options, total",
    [
        ({"warmup_steps": 31}, 31),
        ({"warmup_steps": 5, "max_time": 60}, None),
        ({"schedule": "plateau", "max_time": 60}, None),
        ({"schedule": "cosine", "max_time": 60, "epochs": 2}, 62),
        ({"schedule": "cosine", "max_time": 60, "max_steps": 7}, 7),
    ],
)
def test_schedules_that_fit(options, total):
    assert stage(**options).total_steps == total


@pytest.mark.parametrize(
    "machine, options, line",
    [
        (CPUS, {"nproc": 2}, "2 x CPU ranks · 64 = 2 x 32 (default) · 15 steps/epoch, 40 samples dropped · lr 0.001 · fp32 (auto)"),
        (CPUS, {"batch_size": 100, "precision": "fp32"}, "1 x CPU rank · 100 = 1 x 100 · 10 steps/epoch · lr 0.001 · fp32"),
        (
            GPUS,
            {"accumulate": 2, "batch_size": 128, "job": Job(has_optimizer=True)},
            "4 x H100 · 128 = 4 x 32 (in 2 micro-batches of 16) · 7 steps/epoch, 104 samples dropped · optimizer hook · bf16 (auto)",
        ),
        (
            CPUS,
            {"batch_size": 999, "compile": True, "precision": "fp16"},
            "1 x CPU rank · 999 = 1 x 999 · 1 step/epoch, 1 sample dropped · lr 0.001 · fp16 · compiled",
        ),
    ],
)
def test_the_plan_line(machine, options, line):
    made = plan(machine, **options)
    assert made.line() == line
    assert made.line("", "data 1 GiB") == line + " · data 1 GiB"
    assert made.stage_lines() == []


def test_threads_share_the_cores():
    assert plan(Machine((), 16), nproc=4).threads == 4
    assert plan(Machine((), 2), nproc=3).threads == 1
    assert plan(Machine((), 16, threads=3), nproc=4).threads == 3


# -- stages


def test_each_stage_has_a_plan_of_its_own():
    stages = [
        Stage("head", freeze="backbone.*", epochs=3, lr=0.1, freeze_batch_norm=True),
        Stage(train_only=["a.*", "b.*"], max_steps=7, batch_size=100, accumulate=2, precision="bf16", optimizer="sgd"),
        Stage("all", optimizer=len, monitor="loss", compile=True),
    ]
    made = plan(stages=stages, nproc=2, lr=0.01, n_val=50)
    head, middle, last = made.stages
    assert [(each.index, each.name) for each in made.stages] == [(0, "head"), (1, "1"), (2, "all")]
    assert (head.epochs, head.max_steps, head.total_steps, head.lr, head.batch_size, head.precision) == (3, None, 45, 0.1, 64, "fp32")
    assert (middle.epochs, middle.max_steps, middle.total_steps, middle.lr, middle.batch_size, middle.precision) == (None, 7, 7, 0.01, 100, "bf16")
    assert (middle.per_rank_batch_size, middle.micro_batch_size, middle.accumulate) == (50, 25, 2)
    assert (last.epochs, last.total_steps, last.lr, last.compile) == (1, 15, None, True)
    assert [each.monitor for each in made.stages] == ["val_loss", "val_loss", "loss"]
    assert (made.epochs, made.total_steps, made.max_steps) == (None, 67, None)
    assert made.line("data 1 KiB") == "2 x CPU ranks · 3 stages · 67 steps · data 1 KiB"
    assert made.stage_lines() == [
        "stage head: 3 epochs · 64 = 2 x 32 (default) · 15 steps/epoch, 40 samples dropped · lr 0.1 · fp32 (auto) · freezes backbone.* and holds BatchNorm",
        "stage 1: 7 steps · 100 = 2 x 50 (in 2 micro-batches of 25) · 10 steps/epoch · lr 0.01 · bf16 · sgd · trains a.*, b.* only",
        "stage all: 1 epoch · 64 = 2 x 32 (default) · 15 steps/epoch, 40 samples dropped · optimizer hook · fp32 (auto) · compiled",
    ]
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_one_stage_alone_is_told_in_the_plan_line():
    made = plan(stages=[Stage("head", freeze="backbone.*", epochs=3)])
    assert made.line().endswith(" · lr 0.001 · fp32 (auto) · freezes backbone.*")
    assert made.stage_lines() == []
    assert (made.epochs, made.total_steps) == (3, 93)


@pytest.mark.parametrize(
    "options, stages, epochs, totals, total",
    [
        ({}, [Stage(), Stage(epochs=2)], [1, 2], [31, 62], 93),
        ({"epochs": 3}, [Stage(), Stage(epochs=2)], [3, 2], [93, 62], 155),
        ({"epochs": 3, "max_steps": 100}, [Stage(), Stage(epochs=2)], [3, 2], [93, 62], 100),
        ({"epochs": 3, "max_time": 60}, [Stage(), Stage(max_steps=5)], [3, 3], [93, 5], 98),
        ({"max_steps": 100}, [Stage(epochs=2), Stage()], [2, None], [62, None], 100),
        ({"max_time": 60}, [Stage(max_steps=5), Stage()], [None, None], [5, None], None),
        ({"max_time": 60}, [Stage(max_steps=500, epochs=2), Stage(epochs=1)], [2, 1], [62, 31], 93),
        ({"max_steps": 20}, [Stage()], [None], [None], 20),
    ],
)
def test_limits_of_the_run_and_of_its_stages(options, stages, epochs, totals, total):
    made = plan(stages=stages, **options)
    assert [each.epochs for each in made.stages] == epochs
    assert [each.total_steps for each in made.stages] == totals
    assert (made.total_steps, made.max_steps) == (total, options.get("max_steps"))


@pytest.mark.parametrize(
    "options, stages, message",
    [
        ({"nproc": 3}, [Stage(), Stage("b", batch_size=100)], "stage b: batch_size=100 is the global batch and must divide by 3 ranks: use 99 or 102"),
        ({"drop_last": False}, [Stage(), Stage(compile=True)], "stage 1: compile=True with drop_last=False: the last batch of an epoch has another shape and "),
        ({}, [Stage(lr_scale="linear"), Stage()], "stage 0: lr_scale=linear needs base_batch_size, the batch that lr was tuned for: --base-batch-size 256"),
        ({}, [Stage("a", optimizer="lbfgs", fused=True)], "stage a: fused=True: lbfgs has no fused kernels; adam, adamw, adagrad, sgd have"),
        ({"on_nan": "skip"}, [Stage("a", optimizer="lbfgs")], "stage a: on_nan=skip can't undo a step of lbfgs"),
        ({}, [Stage("a", warmup_steps=40)], "stage a: warmup_steps=40 is longer than the 31 steps there are: use less, or train longer"),
        ({"max_steps": 5, "epochs": 1}, [Stage("a", warmup_steps=6)], "stage a: warmup_steps=6 is longer than the 5 steps there are"),
        ({}, [Stage("a", patience=2)], "stage a: patience=2 needs validation data (--val or --val-split), or a value of the training to watch"),
        ({"patience": 2}, [Stage("a", monitor="loss"), Stage()], "stage 1: patience=2 needs validation data"),
        ({"n_val": 9, "job": RECORDED}, [Stage("a", monitor="val_auc")], "stage a: monitor=val_auc is not recorded; recorded are loss, val_loss, val_acc."),
        (
            {"max_steps": 100},
            [Stage("a"), Stage("b")],
            "stage a: nothing ends it but the end of the run, and stages follow it: give it epochs or max_steps",
        ),
        ({"max_time": 60}, [Stage("a", epochs=1), Stage("b", schedule="cosine")], "stage b: schedule=cosine ends at a step that is not known"),
        ({"n_train": 20}, [Stage("a", batch_size=10), Stage("b", batch_size=40)], "stage b: the training data has 20 samples, fewer than one batch of 40"),
    ],
)
def test_what_does_not_add_up_in_a_stage_is_refused_by_its_name(options, stages, message):
    said = refused(stages=stages, **options)
    assert said.startswith(message)
    assert said.count("stage ") == message.count("stage "), "the name once"


@pytest.mark.parametrize(
    "options, stages, warning",
    [
        ({"lr": 0.1}, [Stage(lr=1), Stage(optimizer=len)], "lr of the run has no effect: every stage has its own"),
        ({"epochs": 2, "batch_size": 64}, [Stage(epochs=1, per_rank_batch_size=64)], "batch_size, epochs of the run have no effect: every stage has its own"),
        ({"warmup_steps": 3}, [Stage(scheduler=len)], "warmup_steps of the run has no effect: every stage has its own"),
        ({"max_steps": 31}, [Stage("a", epochs=1), Stage("b")], "max_steps=31 ends the run in stage a: stage b is not reached"),
        ({"epochs": 1, "max_steps": 40}, [Stage("a"), Stage("b"), Stage("c")], "max_steps=40 ends the run in stage b: stage c is not reached"),
        ({"nproc": 2}, [Stage(batch_size=64), Stage(batch_size=8)], "4 samples per rank: same steps as on one rank plus all-reduce; raise --batch-size"),
        ({"nproc": 1}, [Stage(), Stage(grad_compression="fp16")], "grad_compression has no effect on one rank"),
        ({}, [Stage(), Stage(precision="fp16", optimizer="lbfgs")], "precision=fp16 with lbfgs runs as bf16"),
    ],
)
def test_warnings_of_stages(options, stages, warning):
    assert len([text for text in plan(stages=stages, **options).warnings if text.startswith(warning)]) == 1


def test_ordinary_stages_have_no_warnings():
    stages = [Stage("head", freeze="a.*", lr=0.1, epochs=1), Stage("all", batch_size=128)]
    assert plan(stages=stages, nproc=2, batch_size=64, n_val=100, lr=0.01, epochs=2, max_steps=40).warnings == ()
    assert plan(stages=[Stage(compile=True), Stage()], compile_mode="max-autotune").warnings == ()


def test_the_optimizer_of_a_stage_goes_before_the_hook_of_the_run():
    job = Job(has_optimizer=True)
    made = plan(job=job, stages=[Stage(), Stage(optimizer="sgd"), Stage(optimizer=len), Stage(optimizer="lbfgs", precision="fp16")])
    assert [each.lr for each in made.stages] == [None, 0.001, None, 1.0]
    assert made.stages[3].precision == "bf16"


VALUES = {
    "batch_size": [32, 64],
    "accumulate": [1, 2],
    "epochs": [1, 5],
    "max_steps": [3, 100],
    "drop_last": [True, False],
    "lr": [0.1],
    "optimizer": ["sgd", "adamw"],
    "warmup_steps": [0, 2],
    "precision": ["auto", "bf16", "fp16", "fp32"],
    "grad_compression": ["fp16"],
    "patience": [1],
    "monitor": ["loss", "val_loss"],
}
of_stage = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


@given(of_stage, st.lists(of_stage, max_size=4), st.integers(1, 4), st.integers(64, 400))
def test_stages_of_all_kinds_add_up_and_survive_being_written_down(base, stages, nproc, n_train):
    assert set(VALUES) <= set(STAGE_FIELDS)
    try:
        made = plan(n_train=n_train, n_val=32, nproc=nproc, stages=[Stage(**options) for options in stages], **base)
    except ConfigError as error:
        said = str(error)
        assert any(words in said for words in ("must divide by", "nothing ends it", "warmup_steps=2 is longer", "fewer than one batch"))
        return
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert len(made.stages) == len(stages) or not stages
    known = [each.total_steps for each in made.stages]
    by_stages = None if None in known else sum(known)
    assert made.total_steps == min([steps for steps in (by_stages, base.get("max_steps")) if steps is not None], default=None)
    for each in made.stages:
        assert each.micro_batch_size * each.accumulate * nproc == each.batch_size
        assert each.steps_per_epoch * each.batch_size + each.dropped >= n_train


@pytest.mark.parametrize(
    "options, says",
    [
        ({"optimizer": "sgd", "fused": True}, "sgd, fused"),
        ({"schedule": "cosine", "warmup_steps": 3}, "cosine, warm-up 3 steps"),
        ({"warmup_steps": 1, "clip_norm": 0.5, "grad_compression": "bf16"}, "warm-up 1 step, clip 0.5, gradients bf16"),
        ({"matmul_precision": "high"}, "matmul high"),
    ],
)
def test_the_line_says_what_is_not_the_default(options, says):
    assert plan(**options).line().endswith(f" · fp32 (auto) · {says}")
    assert plan(job=Job(has_optimizer=True), schedule="linear").line().endswith("optimizer hook · fp32 (auto) · linear")
