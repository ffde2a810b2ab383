"""The arithmetic of a run: what the options mean for so many ranks, samples, cores and GPUs."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.planning import DEFAULT_LR, Machine, Plan, make_plan, nearest_multiples

CPUS, GPUS = Machine((), 2), Machine(("H100", "H100", "H100", "H100"), 32)


ACCUMULATED = "4 x H100 · 2000 = 4 x 500 (in 2 micro-batches of 250) · 1 steps/epoch · lr 0.001 · fp32 (auto)"


def plan(machine=CPUS, *, n_train=1000, n_val=0, has_optimizer=False, **options):
    return make_plan(TrainConfig(**options), n_train=n_train, n_val=n_val, machine=machine, has_optimizer=has_optimizer)


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
        (CPUS, {"monitor": "val_loss"}, "monitor=val_loss needs validation data: give --val or --val-split, or --monitor loss"),
        (CPUS, {"monitor": "val_acc"}, "monitor=val_acc needs validation data"),
        (CPUS, {"monitor": "acc", "n_val": 9}, "monitor=acc is not recorded: loss .* val_loss, or val_ and the name of a scalar"),
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
    assert (made.batch_size, made.per_rank_batch_size, made.micro_batch_size, made.default_batch_size) == (batch, per_rank, micro, default)
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
    batch = options["batch_size"]
    assert made.per_rank_batch_size * made.nproc == made.micro_batch_size * made.accumulate * made.nproc == batch
    used = n_train - made.dropped
    assert (made.steps_per_epoch - 1) * batch < used <= made.steps_per_epoch * batch
    assert (made.dropped == 0) if not options["drop_last"] else (made.dropped < batch and used % batch == 0)
    assert made.total_steps == min(epochs * made.steps_per_epoch, max_steps or 10**9)
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


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adagrad", "rmsprop"])
def test_the_default_rate_is_torchs_own(optimizer):
    import torch

    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    import inspect

    assert plan(optimizer=optimizer).lr == DEFAULT_LR[optimizer] == inspect.signature(classes[optimizer]).parameters["lr"].default
    assert plan(optimizer=optimizer, lr=0.5).lr == 0.5
    assert plan(has_optimizer=True).lr is None
    assert " · optimizer hook · " in plan(has_optimizer=True).line()


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
    ],
)
def test_warnings(machine, options, warning):
    assert any(text.startswith(warning) for text in plan(machine, **options).warnings)


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
        ({"monitor": "loss"}, "loss"),
    ],
)
def test_what_is_monitored(options, monitor):
    assert plan(**options).monitor == monitor


@pytest.mark.parametrize(
    "machine, options, line",
    [
        (CPUS, {"nproc": 2}, "2 x CPU ranks · 64 = 2 x 32 (default) · 15 steps/epoch, 40 samples dropped · lr 0.001 · fp32 (auto)"),
        (CPUS, {"batch_size": 100, "precision": "fp32"}, "1 x CPU rank · 100 = 1 x 100 · 10 steps/epoch · lr 0.001 · fp32"),
        (
            GPUS,
            {"accumulate": 2, "batch_size": 128, "has_optimizer": True},
            "4 x H100 · 128 = 4 x 32 (in 2 micro-batches of 16) · 7 steps/epoch, 104 samples dropped · optimizer hook · fp32 (auto)",
        ),
    ],
)
def test_the_plan_line(machine, options, line):
    assert plan(machine, **options).line() == line
    assert plan(machine, **options).line("", "data 1 GiB") == line + " · data 1 GiB"


def test_threads_share_the_cores():
    assert plan(Machine((), 16), nproc=4).threads == 4
    assert plan(Machine((), 2), nproc=3).threads == 1
    assert plan(Machine((), 16, threads=3), nproc=4).threads == 3
