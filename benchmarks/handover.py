"""A dataset of 1 GiB on its way to two ranks: how long it takes, and how much memory it takes."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.kernel import kernel

SETUP = """import os, time, pathlib, torch
from torch import nn
from torch.utils.data import TensorDataset
x = torch.randn(1 << 20, 256)  # 1 GiB
y = torch.zeros(1 << 20, dtype=torch.int64)
train_set = TensorDataset(x, y)
net = nn.Linear(256, 10)

def pss(pid):
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))

def of_session(session):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == session:
                found.append(int(path.name))
        except ProcessLookupError:
            pass
    return found

def handover():
    x[0, 0] += 1  # other content, so that it is staged again
    run = nbddp.train(net, train_set, loss=nn.CrossEntropyLoss(), nproc=2, devices="cpu", max_steps=1, batch_size=8192)
    return run.timeline["bundled"] - run.timeline["requested"]

def saving(path):
    x[0, 0] += 1
    before = time.time()
    torch.save(train_set.tensors, path)
    took = time.time() - before
    os.unlink(path)
    return took
"""
MEMORY = """run = nbddp.train(net, train_set, loss=nn.CrossEntropyLoss(), nproc=2, devices="cpu", epochs=1000, batch_size=8192, background=True)
while run.epochs["epoch"].size < 1 and run.state in ("starting", "running"):
    time.sleep(0.1)
from nbddp.launch.local import standby
session = os.getsid(run.files.supervisor()[1].pid)
used = sum(pss(pid) for pid in [*of_session(session), standby.template.process.pid])
run.stop(); run.wait()"""


def measure(rounds: int = 3) -> dict[str, float]:
    """Seconds for the hand-over and for `torch.save` of the same tensors; bytes of PSS of the standby and all processes of the run after an epoch."""
    handovers, saves = [], []
    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder)) as running:
        running.run("%load_ext nbddp\nimport nbddp")
        running.run(SETUP)
        for _ in range(rounds):
            saves.append(float(running.value(f"saving({str(Path(folder) / 'x.pt')!r})")))  # type: ignore[arg-type]
            running.run("taken = handover()")
            handovers.append(float(running.value("taken")))  # type: ignore[arg-type]
        running.run(MEMORY)
        used = float(running.value("used"))  # type: ignore[arg-type]
    return {"handover_s": statistics.median(handovers), "torch_save_s": statistics.median(saves), "pss_bytes": used}
