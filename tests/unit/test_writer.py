"""The thread that writes checkpoints: one after the other, in bounded memory, complete whenever the process is killed."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from nbddp import checkpoint
from nbddp.errors import CheckpointError
from nbddp.events import EventReader, EventWriter
from nbddp.worker.replicas import Comparison
from nbddp.worker.writer import Job, Writer

CPU = torch.device("cpu")


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    events = EventWriter(tmp_path / "rank-00000.0.jsonl", run="r", rank=0)
    made = Writer(tmp_path / "checkpoints", events, device=CPU, keep_last=2, buffers=frozenset({"mask"}))
    yield made
    made.give_up(None)
    events.close()


def put(writer, step, *names, comparison=None, value=None):
    staging = writer.stage()
    weight = staging.copy(torch.full((1000,), float(step) if value is None else value), "w")
    staging.end()
    content = {"model": {"w": weight, "mask": torch.tensor(float("-inf"))}, "epoch": 1, "step": step, "stage": 0, "value": None}
    writer.put(Job(names, content, staging, comparison))


def steps(folder):
    return {path.stem: checkpoint.read(path)["step"] for path in sorted(folder.glob("*.pt"))}


def test_files_are_written_in_the_order_in_which_they_were_put(writer, tmp_path):
    put(writer, 1, "last", "step-00000001", "best")
    put(writer, 2, "last", "step-00000002", "stage-0")
    put(writer, 3, "last", "step-00000003", "best", value=float("nan"))
    put(writer, 4, "best", value=float("inf"))
    writer.close()
    assert steps(tmp_path / "checkpoints") == {"best": 1, "last": 3, "stage-0": 2, "step-00000002": 2, "step-00000003": 3}
    reader = EventReader(tmp_path)
    events = [(event.data["name"], event.data["step"], event.data["finite"], event.data["removed"]) for event in reader.poll()]
    assert events == [
        ("last", 1, True, []),
        ("step-00000001", 1, True, []),
        ("best", 1, True, []),
        ("last", 2, True, []),
        ("step-00000002", 2, True, []),
        ("stage-0", 2, True, []),
        ("last", 3, False, []),
        ("step-00000003", 3, False, ["step-00000001"]),
    ]
    assert writer.write_s > 0


class Disk:
    """Writes when it is let; counts what it holds."""

    def __init__(self, monkeypatch):
        self._write, self._may = checkpoint.write, threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        monkeypatch.setattr(checkpoint, "write", self.write)

    def write(self, path, content):
        self.entered.release()
        assert self._may.acquire(timeout=60)
        return self._write(path, content)

    def go(self, files=1):
        self._may.release(files)


def test_two_snapshots_are_all_there_is_and_the_third_waits(writer, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    put(writer, 1, "last")
    assert disk.entered.acquire(timeout=60)
    put(writer, 2, "last")
    assert not writer.idle
    third = threading.Thread(target=put, args=(writer, 3, "stage-0"))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    disk.go()
    third.join(60)
    assert not third.is_alive(), "the first is written: its memory is free"
    disk.go(2)
    writer.close()
    assert steps(tmp_path / "checkpoints") == {"last": 2, "stage-0": 3}
    assert writer._stagings == 2


def test_memory_of_a_snapshot_that_is_released_is_used_again(writer):
    for _ in range(5):
        writer.release(writer.stage())
    assert writer._stagings == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed"), MemoryError()])
def test_what_goes_wrong_is_raised_once_where_the_run_goes_on_and_blocks_nothing(writer, tmp_path, monkeypatch, error):
    put(writer, 1, "last")

    def fail(content, file):
        raise error

    while not (tmp_path / "checkpoints" / "last.pt").exists():
        time.sleep(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        put(writer, 2, "last")
        deadline = time.monotonic() + 60
        while writer._error is None and time.monotonic() < deadline:
            time.sleep(0.001)
    kind, text = (MemoryError, None) if isinstance(error, MemoryError) else (CheckpointError, r"last\.pt can't be written: .*; what was written before stays")
    with pytest.raises(kind, match=text):
        writer.check()
    for step in (3, 4, 5):
        put(writer, step, "last")
    writer.close()
    assert steps(tmp_path / "checkpoints") == {"last": 5}


def test_after_an_error_nothing_more_is_written_until_it_is_told(writer, tmp_path):
    differ = Comparison(("a", "b", "c"), lambda: [1, 2, 3], [[1, 2, 3], [1, 5, 6]])
    put(writer, 1, "last")
    put(writer, 2, "last", "best", comparison=differ)
    deadline = time.monotonic() + 60
    while writer._error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match=r"2 parameters of rank 2 \(b, c\) are not those of rank 0"):
        put(writer, 3, "last")
    writer.close()
    assert steps(tmp_path / "checkpoints") == {"last": 1}


def test_equal_digests_are_no_difference_and_alone_none_are_made():
    Comparison(("a",), lambda: [7], [[7], [7]]).check()
    Comparison((), lambda: pytest.fail("they cost time"), []).check()


WRITER = """
import sys, torch
from pathlib import Path
from nbddp.events import EventWriter
from nbddp.worker.writer import Job, Writer
folder = Path(sys.argv[1])
others = torch.load(folder / "content", weights_only=True)
events = EventWriter(folder / "rank-00000.0.jsonl", run="r", rank=0)
writer = Writer(folder / "checkpoints", events, device=torch.device("cpu"), keep_last=3, buffers=frozenset())
for step in range(1, 10**9):
    staging = writer.stage()
    content = {**others, "model": {"w": staging.copy(torch.full((300_000,), float(step)), "w")}, "step": step, "value": None}
    staging.end()
    names = (f"stage-{step // 5}",) * (step % 5 == 0) + ("best",) * (step % 3 == 0)
    writer.put(Job(("last", f"step-{step:08d}", *names), content, staging))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_files_to_go_on_from(tmp_path):
    stream = {"torch": torch.get_rng_state()}
    content = {
        **{"optimizer": {"state": {}, "param_groups": []}, "scheduler": None, "scaler": None, "comm_hook": [None], "rng": [stream], "precision": "fp32"},
        **{"matmul_precision": "highest", "stage": 0, "stage_name": "0", "stage_step": 1, "stage_epochs_done": 0, "epoch": 1, "epochs_done": 0},
        **{"values": {}, "metrics": {}, "elapsed_s": 1.0, "config": {}, "world_size": 1},
        "epoch_sums": {"loss": 1.0, "weight": 2.0, "scalars": {}, "samples": 2, "steps": 1, "times": [0.0] * 3},
        "early_stop": {"without_gain": 0, "validated_at": -1},
        "best": {"name": "loss", "mode": "min", "value": None, "epoch": 0, "step": 0},
        **{"sampler": {"seed": 0, "stage": 0, "epoch": 1, "step": 1, "samples": 1, "n": 100}, "versions": {}, "run": "r"},
    }
    torch.save(content, tmp_path / "content")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
        try:
            deadline = time.monotonic() + 60
            while not (folder / "stage-2.pt").exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        last = checkpoint.read_resumable(folder / "last.pt", verify=True)
        for path in folder.glob("*.pt"):
            found = checkpoint.read_resumable(path, verify=True)
            assert (found["model"]["w"] == found["step"]).all()
        path, newest = checkpoint.newest_complete(folder, exclude=(folder / "last.pt",))
        assert last["step"] - 1 <= newest["step"] <= last["step"]
        with path.open("r+b") as file:  # and a disk that lost some of it
            file.truncate(path.stat().st_size // 2)
        damaged = path.stat().st_ino
        older, found = checkpoint.newest_complete(folder, exclude=(folder / "last.pt",))
        assert older.stat().st_ino != damaged
        assert found["step"] < newest["step"]
        for file in folder.glob("*.pt"):
            file.unlink()
    checkpoint.clear_unfinished(folder)
    assert list(folder.iterdir()) == []
