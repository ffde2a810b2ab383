"""What is said about layers that depend on the batch, and the precision that there is so far."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from nbddp.norm import batch_norms, keep_warning
from nbddp.precision import autocast_context


def net(count):
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(count)), nn.LayerNorm(3), nn.GroupNorm(1, 1))


def test_batch_norms_are_found_by_name_whatever_their_kind():
    assert batch_norms(net(2)) == ["0.1", "1.1"]
    assert batch_norms(nn.BatchNorm1d(3)) == ["BatchNorm1d"]
    assert batch_norms(nn.Sequential(nn.SyncBatchNorm(2), nn.LazyBatchNorm1d(), nn.InstanceNorm1d(2))) == ["0", "1"]


def test_one_rank_or_no_batch_norm_needs_no_warning():
    assert keep_warning(net(2), world_size=1, per_rank=4) is None
    assert keep_warning(nn.Linear(1, 1), world_size=4, per_rank=4) is None


@pytest.mark.parametrize(
    "count, per_rank, words", [(1, 32, "(0.1) uses the statistics of each rank's 32 samples;"), (6, 4, "(0.1, 1.1, 2.1, 3.1 and 2 more) uses")]
)
def test_the_warning_names_layers_and_samples(count, per_rank, words):
    warning = keep_warning(net(count), world_size=2, per_rank=per_rank)
    assert words in warning
    assert ("which is small" in warning) == (per_rank < 16)


def test_fp32_changes_nothing_and_the_others_cast_float32_alone():
    x = torch.ones(2, 2)
    assert isinstance(autocast_context("fp32", torch.device("cpu")), contextlib.nullcontext)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast_context(precision, torch.device("cpu")):
            assert (x @ x).dtype is dtype
            assert (x.double() @ x.double()).dtype is torch.float64
        assert (x @ x).dtype is torch.float32
