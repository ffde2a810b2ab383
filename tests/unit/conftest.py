"""Fixtures that several modules of unit tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes what it is given as torch does, and returns the path."""

    def save(content: Any, name: str = "x.pt") -> Path:
        import torch

        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save
