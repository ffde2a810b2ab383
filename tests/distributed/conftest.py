"""Fixtures of the tests with real ranks under a real supervisor."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from nbddp.launch.local import Supervised, launch
from nbddp.launch.standby import Standby
from nbddp.process import ProcessId
from support.supervised import ENTRY, make_order, make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def standby() -> Iterator[Standby]:
    """Supervisors whose ranks run functions of `support.supervised`; the first is warming up."""
    standby = Standby(entry=ENTRY)
    standby.warm()
    yield standby
    standby.close()


@pytest.fixture
def dead() -> ProcessId:
    """A process that has ended."""
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        found = ProcessId.of(process.pid)
        process.kill()
    assert found is not None
    return found


@pytest.fixture
def start(tmp_path: Path, standby: Standby) -> Callable[..., Supervised]:
    """Start a run whose ranks do what is named."""

    def begin(do: str, *, nproc: int = 2, **config: Any) -> Supervised:
        run = make_run(tmp_path, nproc=nproc, **config)
        return launch(run, make_order(run, do), standby)

    return begin
