"""Style, types and import contracts hold: the checks of `make lint`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)  # the first run of mypy reads torch
@pytest.mark.parametrize("check", ["ruff-check", "ruff-format", "mypy", "imports"])
def test_passes(check):
    done = subprocess.run([sys.executable, ROOT / "tools" / "lint.py", check], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_an_unknown_check_is_refused():
    done = subprocess.run([sys.executable, ROOT / "tools" / "lint.py", "ruf"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no check is called ruf; there are ruff-check, ruff-format, mypy, imports" in done.stderr
