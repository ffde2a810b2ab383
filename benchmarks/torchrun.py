"""Starts a peer's script under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"


def torchrun(script: str, *arguments: str, nproc: int) -> tuple[float, dict[str, Any]]:
    """Run a script to its end; return the unix time of the start, and what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(PEERS / script), str(result), *arguments]
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return started, json.loads(result.read_text())
