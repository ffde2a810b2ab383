"""Trackers beside rank 0: wandb and TensorBoard, each in a process of its own that follows this rank's event file.

Training never waits for them, whatever they do: a tracker that is slow lags behind, one that hangs or crashes does so by itself, and one whose rank is
killed still reads what the rank wrote. Only at the end the rank waits, for a limited time, until everything has arrived.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbddp.launch
from nbddp.worker.tracker import SWITCHED_OFF

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.events import EventWriter
    from nbddp.rundir import RunDir
    from nbddp.worker.position import Position

FINISH_S = 30.0
"""Trackers are given this long to pass on what they have, once training is over."""
NAMES = ("wandb", "tensorboard")
PHASE = "trackers"
_TICK_S = 0.5
_BOOT = Path(nbddp.launch.__file__).parent / "boot"


class Trackers:
    """The processes of the trackers that the configuration asks for; made on rank 0 only."""

    def __init__(self, run: RunDir, config: TrainConfig, events: EventWriter, attempt: int) -> None:
        self._run, self._events = run, events
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in NAMES:
            if getattr(config, name) is None:
                continue
            try:
                self._processes[name] = _start(name, run, attempt)
            except OSError as error:
                self._warn(f"{name} is switched off: its process can't be started: {error}")

    def finish(self, position: Position, *, stopped: bool, reason: str | None) -> None:
        """Tell the trackers that training is over, and wait until they are done or the time is up."""
        if not self._processes:
            return
        position.phase = PHASE
        self._events.emit("phase", phase=PHASE, stopped=stopped, reason=reason)
        deadline = time.monotonic() + FINISH_S
        for name, process in self._processes.items():
            self._wait(name, process, deadline, position)

    def _wait(self, name: str, process: subprocess.Popen[bytes], deadline: float, position: Position) -> None:
        while True:
            try:
                code = process.wait(min(_TICK_S, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                position.ticks += 1  # the rank has not hung, and the heartbeat says so
                if time.monotonic() < deadline:
                    continue
                process.kill()
                process.wait()
                self._warn(f"{name} did not finish within {FINISH_S:g} s and is left behind: the last values may be missing there{self._remedy(name)}")
                return
            if code not in (0, SWITCHED_OFF):
                how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
                self._warn(f"{name} {how}: values may be missing there; see {self._run.logs / _log_name(name)}{self._remedy(name)}")
            return

    def _remedy(self, name: str) -> str:
        folder = self._run.path / "wandb"
        return f"; `wandb sync` of {folder} sends the rest" if name == "wandb" and folder.is_dir() else ""

    def _warn(self, text: str) -> None:
        self._events.emit("message", level="warning", text=text)


def _log_name(name: str) -> str:
    return f"tracker-{name}.log"


def _start(name: str, run: RunDir, attempt: int) -> subprocess.Popen[bytes]:
    """Start the process of one tracker; it ends by itself soon after this rank, however that ends."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(_BOOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["NBDDP_SYS_PATH"] = os.pathsep.join(path for path in sys.path if Path(path).is_absolute())
    environment.pop("WANDB_SERVICE", None)  # the service of a wandb run in the notebook, which ends with the kernel
    log = os.open(run.logs / _log_name(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        # -P: no file beside the notebook may shadow a module.
        command = [sys.executable, "-P", "-m", "nbddp.worker.tracker", name, str(run.path), str(attempt), str(os.getpid())]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    finally:
        os.close(log)
