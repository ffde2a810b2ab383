"""What this host offers: visible GPUs, free or in use, and cores. Never opens a CUDA context in the kernel."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbddp.errors import ConfigError
from nbddp.planning import Machine
from nbddp.plans import Plan
from nbddp.precision import NATIVE_BF16
from nbddp.rundir import run_dirs

if TYPE_CHECKING:
    from pathlib import Path

_FOREIGN_MIB = 1024


def this_machine() -> Machine:
    """Visible GPUs by name, the cores that this process may use, and the threads that OMP_NUM_THREADS asks for."""
    count = torch.cuda.device_count()
    found = _query() if count else []
    names = [gpu.name for gpu in found]
    if len(names) != count:
        names = [names[0] if len(set(names)) == 1 else "GPU"] * count
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is OpenMP's own way to write nested levels
    threads = int(asked) if asked.isdigit() and int(asked) else None
    return Machine(tuple(names), len(os.sched_getaffinity(0)), threads, bf16=bool(found) and all(gpu.compute_capability >= NATIVE_BF16 for gpu in found))


class _Gpu(NamedTuple):
    name: str
    used_mib: int
    compute_capability: float


def _query() -> list[_Gpu]:
    """Every GPU of the host, by nvidia-smi; empty where that is not to be had."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        output = subprocess.run(
            [program, "--query-gpu=name,memory.used,compute_cap", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.rsplit(",", 2)] for line in output.splitlines() if line.count(",") >= 2]
    return [_Gpu(name.removeprefix("NVIDIA ").strip(), int(used), _number(capability)) for name, used, capability in rows if used.isdigit()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return 0.0


def visible_devices() -> str:
    """Tells whether two kernels number the GPUs alike, without the value of CUDA_VISIBLE_DEVICES, which is not for the disk."""
    return hashlib.blake2b(os.environ.get("CUDA_VISIBLE_DEVICES", "all").encode(), digest_size=8).hexdigest()


def check_devices(plan: Plan, root: Path) -> list[str]:
    """Refuse GPUs that a live run of ours holds; warn of memory that others hold.

    Raises:
        ConfigError: names the run, and the GPUs that are free.
    """
    if plan.device != "cuda":
        return []
    held: dict[int, str] = {}
    for run in run_dirs(root):
        spec = run.read_spec() or {}
        other = spec.get("plan", {})
        same = spec.get("host") == socket.gethostname() and spec.get("visible_devices") == visible_devices()
        if same and other.get("device") == "cuda" and run.live():
            held.update(dict.fromkeys(other["device_indices"], run.id))
    taken = [index for index in plan.device_indices if index in held]
    if taken:
        free = [str(index) for index in range(torch.cuda.device_count()) if index not in held]
        offer = f"free are --devices {','.join(free)}" if free else "none is free: %ddp_stop ends a run"
        message = f"GPU {', '.join(map(str, taken))} held by run {held[taken[0]]}; {offer}"
        raise ConfigError(message)
    used = _query()
    foreign = (
        [(i, used[i][1]) for i in plan.device_indices if i < len(used) and used[i][1] > _FOREIGN_MIB] if not os.environ.get("CUDA_VISIBLE_DEVICES") else []
    )
    return [f"GPU {index} already has {mib / 1024:.1f} GiB in use, by this kernel or another process" for index, mib in foreign]
