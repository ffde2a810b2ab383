"""Loader workers in ranks: their randomness is that of the batch, whatever travels to them works, and they end with their rank."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from support.ranks import RankError

pytestmark = pytest.mark.distributed


class Augmented(Dataset):
    """Samples with noise from each of the streams that user code draws from."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        return torch.full((3,), float(index)) + noise, torch.tensor([noise])


def make(data=Augmented, val=None):
    torch.manual_seed(5)
    return nn.Linear(3, 1), data(), val


def mse(model, batch):
    x, y = batch
    return {"loss": nn.functional.mse_loss(model(x / 40), y), "noise": y.mean()}


def run(training, nproc=2, make=make, hooks=None, **options):
    return training(nproc, make, {"training_step": mse, **(hooks or {})}, **{"batch_size": 8, "epochs": 2, "num_workers": 2, "lr": 0.01, **options})


def test_augmentation_is_the_same_at_any_number_of_workers(training):
    base = run(training).history["noise"]
    assert len(np.unique(base)) == 10, "every batch has noise of its own, in every epoch"
    for options in ({}, {"num_workers": 4}, {"num_workers": 6}, {"prefetch_factor": 5}, {"persistent_workers": False}):
        np.testing.assert_array_equal(run(training, **options).history["noise"], base, err_msg=str(options))
    assert not np.array_equal(run(training, seed=1).history["noise"], base)


def test_without_workers_the_ranks_own_streams_are_drawn_from(training):
    one, other = (run(training, num_workers=0).history["noise"] for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one)) == 10


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_serve_validation_as_well_and_an_epoch_may_be_left_early(training, persistent):
    result = run(training, make=lambda: make(val=Augmented()), max_steps=7, val_batch_size=16, persistent_workers=persistent)
    assert result.history["step"].tolist() == list(range(1, 8))
    assert np.isfinite(result.epochs["val_loss"]).all()


def test_lambdas_and_local_classes_reach_workers(training):
    class Local(Augmented):
        def __getitem__(self, index):
            return (lambda: super(Local, self).__getitem__(index))()

    hooks = {
        "collate_fn": lambda samples: tuple(torch.stack(part) for part in zip(*samples, strict=True)),
        "worker_init_fn": lambda worker: random.seed(worker),
    }
    result = run(training, make=lambda: make(Local), hooks=hooks)
    np.testing.assert_array_equal(result.history["noise"], run(training).history["noise"])


class Broken(Augmented):
    def __getitem__(self, index):
        if index == 7:
            message = "sample 7 is broken"
            raise KeyError(message)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_says_so(training, workers):
    with pytest.raises(KeyError, match="sample 7 is broken"):
        run(training, make=lambda: make(Broken), num_workers=workers)


class Exits(Augmented):
    def __getitem__(self, index):
        if index == 7:
            os._exit(3)
        return super().__getitem__(index)


def test_a_worker_that_exits_ends_the_rank(training):
    # torch tells it by a signal handler, which may find the rank anywhere, or the rank finds the connection cut.
    with pytest.raises((RuntimeError, RankError), match=r"DataLoader worker \(pid.+\) exited unexpectedly|a loader worker ended while it sent a batch"):
        run(training, make=lambda: make(Exits))


def test_workers_die_with_a_killed_rank(training, tmp_path):
    class Noted(Augmented):
        def __getitem__(self, index):
            (tmp_path / f"worker-{os.getpid()}").touch()
            return super().__getitem__(index)

    calls = []

    def step(model, batch):
        calls.append(1)
        if len(calls) == 4 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mse(model, batch)

    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        run(training, make=lambda: make(Noted), hooks={"training_step": step}, num_workers=4)
    workers = [int(path.name.removeprefix("worker-")) for path in tmp_path.glob("worker-*")]
    assert len(workers) == 4
    # What is left is checked by the fixture of all tests: no process of this session survives.


def test_workers_of_a_rank_are_its_children(training, tmp_path):
    class Noted(Augmented):
        def __getitem__(self, index):
            (tmp_path / f"{os.getpid()}-{os.getppid()}").touch()
            return super().__getitem__(index)

    def step(model, batch):
        (tmp_path / f"rank-{os.getpid()}").touch()
        return mse(model, batch)

    run(training, make=lambda: make(Noted), hooks={"training_step": step}, num_workers=4)
    ranks = {path.name.removeprefix("rank-") for path in Path(tmp_path).glob("rank-*")}
    parents = [path.name.split("-")[1] for path in Path(tmp_path).glob("[0-9]*-[0-9]*") if path.is_file()]
    assert len(parents) == 4
    assert set(parents) == ranks
