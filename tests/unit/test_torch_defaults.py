"""Torch's defaults and the random streams of a kernel, set for a while and put back."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from nbddp import rng
from nbddp.kernel.torch_defaults import torch_defaults

CPU = torch.device("cpu")


def now():
    return torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device(), torch.is_autocast_enabled("cpu")


def test_inference_mode_and_switched_off_gradients_do_not_reach_inside():
    with torch.inference_mode(), torch_defaults(CPU, dtype="float32", matmul_precision="highest"):
        assert not torch.ones(1).is_inference()
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad
    with torch.no_grad():
        with torch_defaults(CPU, dtype="float32", matmul_precision="highest"):
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("raises", [False, True])
def test_the_defaults_are_those_of_the_run_and_then_the_kernels_again(raises):
    before = now()
    inside = None
    try:
        with torch_defaults(CPU, dtype="float64", matmul_precision="high"):
            inside = now()
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert inside == (torch.float64, "high", CPU, False)
    assert now() == before


def test_what_the_kernel_has_set_does_not_reach_inside():
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch_defaults(CPU, dtype="float32", matmul_precision="highest"):
        assert torch.ones(1).device == CPU
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


SWITCHES = """
import torch
from nbddp.kernel.torch_defaults import torch_defaults
matmuls = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
{setting}
before = [m.fp32_precision for m in matmuls]
with torch_defaults(torch.device("cpu"), dtype="float32", matmul_precision="{wanted}"):
    inside = [m.fp32_precision for m in matmuls]
print(before, inside, [m.fp32_precision for m in matmuls] == before)
"""


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has no switches per backend")
@pytest.mark.parametrize(
    "setting, wanted, said",
    [
        ("", "high", "['none', 'none'] ['tf32', 'tf32'] True"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "highest", "['tf32', 'none'] ['ieee', 'ieee'] True"),
    ],
)
def test_the_switches_of_newer_versions_are_put_back_too(setting, wanted, said):
    program = SWITCHES.format(setting=setting, wanted=wanted)  # in a process of its own: torch does not forget which kind of setting was used
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == said


def draws():
    return torch.rand(2).tolist(), random.random(), float(np.random.rand())


def test_seeded_streams_depend_on_the_key_alone_and_the_others_go_on():
    rng.seed_rank(1, 0)
    expected = [draws(), draws()]
    rng.seed_rank(1, 0)
    first = draws()
    with rng.seeded(CPU, "a", 3):
        one = draws()
    with rng.seeded(CPU, "a", 3):
        same = draws()
    with rng.seeded(CPU, "b", 3):
        other = draws()
    assert [first, draws()] == expected
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))
