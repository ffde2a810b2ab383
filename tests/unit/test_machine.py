"""What the kernel finds on its host."""

from __future__ import annotations

import os
import socket

import pytest

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.machine import check_devices, this_machine, visible_devices
from nbddp.planning import Machine, make_plan
from nbddp.process import ProcessId
from nbddp.rundir import RunDir


@pytest.mark.parametrize("value, threads", [("4", 4), (" 3 ", 3), ("2,1", 2), ("0", None), ("", None), ("many", None), ("-1", None)])
def test_threads_are_those_that_the_environment_asks_for(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert this_machine() == Machine(this_machine().gpus, len(os.sched_getaffinity(0)), threads)


@pytest.mark.parametrize("asked, threads", [(None, 4), (1, 1), (6, 6)])
def test_ranks_share_the_cores_unless_the_environment_says_otherwise(asked, threads):
    plan = make_plan(TrainConfig(nproc=2, devices="cpu"), n_train=64, n_val=0, machine=Machine((), 8, asked))
    assert plan.threads == threads


def nvidia_smi(monkeypatch, folder, says):
    """A program of that name that says so."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    "says, names, bf16",
    [
        ("NVIDIA H100, 10, 9.0\nNVIDIA A100-SXM4-40GB, 10, 8.0\n", ("H100", "A100-SXM4-40GB"), True),
        ("NVIDIA H100, 10, 9.0\nTesla V100-SXM2-16GB, 10, 7.0\n", ("H100", "Tesla V100-SXM2-16GB"), False),
        ("Odd, name, 10, 8.6\nOdd, name, 10, 8.6\n", ("Odd, name", "Odd, name"), True),
        ("NVIDIA H100, 10, [N/A]\nNVIDIA H100, 10, 9.0\n", ("H100", "H100"), False),
        ("NVIDIA H100, 10, 9.0\n", ("H100", "H100"), True),
        ("NVIDIA-SMI has failed\n", ("GPU", "GPU"), False),
    ],
)
def test_gpus_have_names_and_compute_in_bf16_or_not(monkeypatch, tmp_path, says, names, bf16):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    nvidia_smi(monkeypatch, tmp_path, says)
    found = this_machine()
    assert (found.gpus, found.bf16) == (names, bf16)


def test_where_nothing_tells_of_the_gpus_none_is_taken_for_new(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("PATH", "")
    assert this_machine() == Machine(("GPU",), len(os.sched_getaffinity(0)), this_machine().threads, bf16=False)


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A host with two GPUs, as far as torch and nvidia-smi say."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    nvidia_smi(monkeypatch, tmp_path, "NVIDIA H100, 10, 9.0\nNVIDIA H100, 40000, 9.0\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(("H100", "H100"), 8)


def gpu_plan(machine, devices):
    return make_plan(TrainConfig(devices=devices), n_train=64, n_val=0, machine=machine)


def live_run(root, plan):
    run = RunDir.create(root, "other")
    run.write_spec({"host": socket.gethostname(), "kernel": ProcessId.current().to_json(), "visible_devices": visible_devices(), "plan": plan.to_json()})
    return run


def test_gpus_that_a_live_run_holds_are_refused_and_the_free_ones_offered(two_gpus, tmp_path):
    run = live_run(tmp_path, gpu_plan(two_gpus, "0"))
    assert check_devices(gpu_plan(two_gpus, "1"), tmp_path) != []  # other people's memory is in use there
    with pytest.raises(ConfigError, match=f"GPU 0 held by run {run.id}; free are --devices 1"):
        check_devices(gpu_plan(two_gpus, "0,1"), tmp_path)
    other = live_run(tmp_path, gpu_plan(two_gpus, "1"))
    with pytest.raises(ConfigError, match="none is free: %ddp_stop ends a run"):
        check_devices(gpu_plan(two_gpus, "0"), tmp_path)
    for ended in (run, other):
        ended.write_result({"state": "finished", "time": 0.0})
    assert check_devices(gpu_plan(two_gpus, "0"), tmp_path) == []


def test_memory_that_others_hold_is_a_warning(two_gpus, tmp_path):
    assert check_devices(gpu_plan(two_gpus, "0"), tmp_path) == []
    assert check_devices(gpu_plan(two_gpus, "1"), tmp_path) == ["GPU 1 already has 39.1 GiB in use, by this kernel or another process"]


def test_gpus_have_their_names_and_are_the_default(two_gpus):
    assert this_machine().gpus == ("H100", "H100")
    assert gpu_plan(two_gpus, "auto").line().startswith("2 x H100 · 64 = 2 x 32 (default)")
    assert make_plan(TrainConfig(), n_train=64, n_val=0, machine=this_machine()).stages[0].precision == "bf16"
