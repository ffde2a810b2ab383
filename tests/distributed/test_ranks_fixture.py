"""The ranks that distributed tests run on are real, and their failures reach the test."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankError

pytestmark = pytest.mark.distributed


class OddValueError(Exception):
    pass


def total_of_ranks(rank, factor):
    value = torch.tensor([float(rank + 1)], dtype=torch.float64) * factor
    dist.all_reduce(value)
    return rank, dist.get_world_size(), dist.get_backend(), torch.get_num_threads(), value.item(), os.getpid()


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_results_come_back_by_rank(ranks, nproc):
    results = ranks(nproc, total_of_ranks, 10)
    total = 10.0 * sum(range(1, nproc + 1))
    assert [result[:5] for result in results] == [(rank, nproc, "gloo", 1, total) for rank in range(nproc)]
    pids = {result[5] for result in results}
    assert len(pids) == nproc
    assert os.getpid() not in pids


def test_the_exception_of_one_rank_is_raised_while_others_wait(ranks):
    def fail(rank):
        if rank == 1:
            raise OddValueError("odd")
        dist.barrier()

    with pytest.raises(OddValueError, match="odd") as caught:
        ranks(3, fail)
    assert "rank 1 of 3" in caught.value.__notes__[0]
    assert "in fail" in caught.value.__notes__[0]


def test_a_killed_rank_is_named_with_what_it_printed(ranks):
    def die(rank):
        if rank == 1:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 ended with exit code -9.*last words"):
        ranks(2, die)


def test_a_hang_ends_with_the_stack_of_where_it_hangs(ranks):
    def hang(rank):
        signal.pause()

    with pytest.raises(RankError, match=r"(?s)no result from rank 0, 1.*in hang"):
        ranks(2, hang, timeout=4)


def test_sys_exit_counts_as_a_failure(ranks):
    def leave(rank):
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        ranks(1, leave)


def test_ranks_see_the_environment_of_the_test(ranks, monkeypatch):
    monkeypatch.setenv("NBDDP_EXAMPLE", "value")
    assert ranks(1, lambda rank: os.environ["NBDDP_EXAMPLE"]) == ["value"]
