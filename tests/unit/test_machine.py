"""What the kernel finds on its host."""

from __future__ import annotations

import os

import pytest

from nbddp.config import TrainConfig
from nbddp.kernel.machine import this_machine
from nbddp.planning import Machine, make_plan


@pytest.mark.parametrize("value, threads", [("4", 4), (" 3 ", 3), ("2,1", 2), ("0", None), ("", None), ("many", None), ("-1", None)])
def test_threads_are_those_that_the_environment_asks_for(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert this_machine() == Machine(this_machine().gpus, len(os.sched_getaffinity(0)), threads)


@pytest.mark.parametrize("asked, threads", [(None, 4), (1, 1), (6, 6)])
def test_ranks_share_the_cores_unless_the_environment_says_otherwise(asked, threads):
    plan = make_plan(TrainConfig(nproc=2, devices="cpu"), n_train=64, n_val=0, machine=Machine((), 8, asked))
    assert plan.threads == threads
