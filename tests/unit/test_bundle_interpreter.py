"""The settings of the kernel's interpreter, applied in another process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from nbddp.bundle import Interpreter
from nbddp.errors import BundleError
from support.bundled import CellNotebook


@pytest.fixture(autouse=True)
def torch_defaults():
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)


def test_settings_arrive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", *sys.path])
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    program = """
import os, sys, torch
result = [os.getcwd(), sys.path[:2], str(torch.get_default_dtype()), torch.get_float32_matmul_precision(), str(torch.get_default_device())]
"""
    cwd = str(tmp_path)
    assert CellNotebook(tmp_path).ship().opened(program) == [cwd, [cwd, f"{cwd}/lib"], "torch.float64", "medium", "cpu"]


def test_json_round_trip_and_fields_of_newer_versions():
    captured = Interpreter.capture()
    data = json.loads(json.dumps(captured.to_json()))
    assert Interpreter.from_json({**data, "newer": 1}) == captured
    assert set(data) == {"sys_path", "cwd", "default_dtype", "default_device", "float32_matmul_precision"}


def test_no_environment_value_is_captured(monkeypatch):
    monkeypatch.setenv("NBDDP_TEST_SECRET", "swordfish")
    assert "swordfish" not in json.dumps(Interpreter.capture().to_json())


def test_working_directory_that_is_gone_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BundleError, match=r"working directory no longer exists; change to one that does"):
        Interpreter.capture()


def test_precision_set_through_the_newer_switches_is_left_alone(monkeypatch):
    def refuse():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    captured = Interpreter.capture()
    assert captured.float32_matmul_precision is None
    before = Path.cwd(), list(sys.path)
    captured.apply()
    sys.path[:] = before[1]
    assert Path.cwd() == before[0]


@pytest.mark.parametrize("rank_device,expected", [("cuda:3", "cuda:3"), ("cpu", None), (None, None)])
def test_default_device_becomes_the_rank_s_own(monkeypatch, rank_device, expected):
    chosen = []
    monkeypatch.setattr(torch, "set_default_device", lambda device: chosen.append(str(device)))
    path = list(sys.path)
    settings = Interpreter(tuple(path), str(Path.cwd()), "float32", "cuda", "highest")
    settings.apply(torch.device(rank_device) if rank_device else None)
    assert chosen == ([expected] if expected else [])
