"""The clause about memory in the message on a killed rank, from this machine's real figures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nbddp.supervisor import memory
from nbddp.supervisor.memory import MemoryWatch


def test_figures_of_this_machine() -> None:
    watch = MemoryWatch()
    watch.sample({3: os.getpid(), 4: 1 << 22})  # one that is gone is left out
    match = re.fullmatch(
        r"if memory was short, the kernel's out-of-memory killer did it \(rank 3 held (\d+\.\d) GiB, "
        r"(\d+\.\d) of (\d+\.\d) GiB were free(?:, limit \d+\.\d GiB)?\): "
        r"use fewer ranks, smaller batches or fewer loader workers",
        watch.hint(),
    )
    assert match is not None
    total_kib = int(next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")))
    assert 0 < float(match[2]) <= float(match[3])
    assert float(match[3]) == pytest.approx(total_kib / 2**20, abs=0.06)


def test_a_control_group_in_which_the_killer_was_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 0\n")
    (tmp_path / "memory.max").write_text("3221225472\n")
    monkeypatch.setattr(memory, "_cgroup", lambda: tmp_path)
    watch = MemoryWatch()
    assert "if memory was short" in watch.hint()
    assert "limit 3.0 GiB" in watch.hint()
    events.write_text(f"low 0\noom 1\noom_kill {watch.kills + 1}\n")  # the machine's own count may be above that of the group
    assert watch.hint().startswith("the kernel's out-of-memory killer was at work (")


def test_a_control_group_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "_cgroup", lambda: tmp_path)
    assert "limit" not in MemoryWatch().hint()
