"""What the live view costs the kernel and the browser, while made-up ranks write their events from a process of its own."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.kernel import kernel

TESTS = Path(__file__).resolve().parents[1] / "tests"
RANKS = 8
SECONDS = 15
MILLION = 1_000_000
# The ranks: argv is the folder of run directories, ranks, steps per second, seconds.
WRITER = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.fake_run import FakeRun
nproc, rate, seconds = map(int, sys.argv[2:5])
run = FakeRun(Path(sys.argv[1]), nproc=nproc, epochs=10_000, report_steps=max(1, rate // 4))
run.start()
print(run.run_dir.path, flush=True)
sys.stdin.readline()
began = time.monotonic()
for quarter in range(1, 4 * seconds + 1):
    run.train(rate // 4)
    for rank in range(nproc):
        run.print("".join(f"\\x1b[3{{n}}mline {{n}}\\x1b[m of step {{run.step}} {{'x' * 60}}\\n" for n in range(4)), rank=rank)
    time.sleep(max(0.0, began + quarter / 4 - time.monotonic()))
run.end("stopped")
"""
# The main thread ticks all the while, as an idle kernel or a user's next cell would.
SETUP = f"""
import gc, json, resource, subprocess, sys, time
from pathlib import Path
import nbddp
from ipykernel.comm.comm import BaseComm
from nbddp.kernel.card import make_card
from nbddp.kernel.follow import Follower
from nbddp.kernel.view import open_view
from nbddp.rundir import RunDir

sent, publish = [], BaseComm.publish_msg
def counted(self, msg_type, data=None, metadata=None, buffers=None, **keys):
    sent.append((time.monotonic(), msg_type, len(json.dumps([data, metadata], default=repr)) + sum(map(len, buffers or []))))
    return publish(self, msg_type, data=data, metadata=metadata, buffers=buffers, **keys)
BaseComm.publish_msg = counted

def watched(ranks, rate, seconds, view=True):
    root = Path("nbddp_runs"); root.mkdir(exist_ok=True)
    command = [sys.executable, "-c", {WRITER!r}, str(root), str(ranks), str(rate), str(seconds)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    run_dir = RunDir(Path(writer.stdout.readline().strip()))
    sent.clear()
    if view:
        follower = Follower(run_dir, lambda: None)
        shown = open_view(run_dir, follower.state, plan_line="made up")
        follower.add_listener(shown.update)
        follower.start()
    cpu, began = time.process_time(), time.monotonic()
    print(file=writer.stdin, flush=True)
    gaps, last = [], time.monotonic()
    while time.monotonic() < began + seconds:
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - last - 0.001)
        last = now
    cpu = (time.process_time() - cpu) / (time.monotonic() - began)
    if view:
        updates = [(when - began, size) for when, kind, size in sent if kind == "comm_msg" and when > began + 2]
        seconds_of = [[size for when, size in updates if begin <= when < begin + 1] for begin, _ in updates]
        follower.done.wait(); follower.join()
        shown.finish(make_card(run_dir, follower.state, plan_line="made up", holds=None, error=None))
        assert follower.view_error is None, follower.view_error
    writer.wait()
    figures = {{"cpu": cpu, "longest_gap_s": max(gaps)}}
    if view:
        figures |= {{"updates_per_s": max(map(len, seconds_of)), "bytes_per_s": max(map(sum, seconds_of))}}
    return figures

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
"""
# A run of a million steps, written before by a process of its own, since what that frees would be used again here.
MILLION_STEPS = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.fake_run import FakeRun
run = FakeRun(Path(sys.argv[1]), nproc=2, epochs=100, steps_per_epoch={MILLION // 100}, report_steps=1000)
run.start()
run.train(run.total_steps)
run.end()
print(run.run_dir.path)
"""
MEMORY = f"""
command = [sys.executable, "-c", {MILLION_STEPS!r}, "nbddp_runs"]
run_dir = RunDir(Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()))
before = resident()
follower = Follower(run_dir, lambda: None)
shown = open_view(run_dir, follower.state, plan_line="made up")
follower.add_listener(shown.update)
follower.start()
follower.done.wait()
steps, held = follower.state.step, resident() - before
"""


def measure(rounds: int = 2) -> dict[str, float]:
    """The worst second of messages and bytes, the longest time the main thread waited, the kernel's share of a core, and bytes that a million steps hold."""
    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder)) as running:
        running.run("%load_ext nbddp")
        running.run(SETUP)
        running.run("watched(2, 200, 4)")  # what is imported once

        def watched(*arguments: object) -> dict[str, float]:
            running.run(f"taken = watched{arguments}")
            return running.value("taken")  # type: ignore[return-value]

        busy = [watched(RANKS, 500, SECONDS) for _ in range(rounds)]
        quiet = [watched(RANKS, 500, SECONDS, False) for _ in range(rounds)]
        slower = [watched(2, 200, SECONDS) for _ in range(rounds)]
        alone = [watched(2, 200, SECONDS, False) for _ in range(rounds)]
        running.run(MEMORY)
        assert running.value("steps") == MILLION
        held = float(running.value("held"))  # type: ignore[arg-type]
    return {
        "updates_per_s": max(figures["updates_per_s"] for figures in busy),
        "bytes_per_s": max(figures["bytes_per_s"] for figures in busy),
        "longest_gap_s": max(figures["longest_gap_s"] for figures in busy),
        "longest_gap_without_s": max(figures["longest_gap_s"] for figures in quiet),
        "cpu": statistics.median(figures["cpu"] for figures in slower) - statistics.median(figures["cpu"] for figures in alone),
        "held_bytes": held,
    }
