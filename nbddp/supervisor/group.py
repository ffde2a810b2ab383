"""The group of ranks, started and joined by torch elastic's agent. Runs in the supervisor, but for `_rank`, which is where a rank begins."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from nbddp import deathguard
from nbddp.process import ProcessId
from nbddp.supervisor.rendezvous import LoopbackRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

MONITOR_INTERVAL_S = 0.1

_PLACE = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""What the agent tells a rank in its environment."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is started with; it travels through a pipe. `entry` is called with run directory, environment and attempt."""

    entry: Callable[[str, dict[str, str], int], None]
    run_dir: str
    environment: dict[str, str]
    attempt: int = 0


def _rank(job: Job) -> None:
    """Enter the worker with the environment that it is to install: the kernel's, and in it the rank's place in the group."""
    deathguard.die_with_parent()
    place = {name: os.environ[name] for name in _PLACE}
    try:
        job.entry(job.run_dir, {**job.environment, **place}, job.attempt)
    except Exception:  # noqa: BLE001 - torch would write the traceback to a file in the temporary folder
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None


class _NoLogs(LogsSpecs):
    """No files of the agent's own, neither logs nor error files: ranks write to the run directory themselves."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""
        console = dict.fromkeys(envs, "")
        return LogsDest(console, console, {}, {}, dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class Group(LocalElasticAgent):
    """The elastic agent of one run on this machine. Call `run` in the main thread."""

    def __init__(self, job: Job, *, run_id: str, nproc: int) -> None:
        spec = WorkerSpec(
            role="nbddp",
            local_world_size=nproc,
            rdzv_handler=LoopbackRendezvous(run_id),
            entrypoint=_rank,
            args=(job,),
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
        )
        super().__init__(spec, _NoLogs(), start_method="forkserver")
        self.nproc = nproc
        self.over = threading.Event()
        """Set when all ranks are gone: the agent waits for ever for one that left with exit code 0 before it returned."""
        self.gone_first: set[int] = set()
        """Ranks that had ended before the agent sent SIGTERM to any."""
        self._processes: dict[int, ProcessId] = {}

    def processes(self) -> dict[int, ProcessId]:
        """The ranks' processes, by rank; empty until all are started. From any thread."""
        if not self._processes and self._pcontext is not None:
            # A rank that is gone before it was looked at has no start time any more; no living process has start time -1.
            self._processes = {rank: ProcessId.of(pid) or ProcessId(pid, -1) for rank, pid in self._pcontext.pids().items()}
        return self._processes

    def exits(self) -> dict[int, int | None]:
        """Exit code of each rank, negative for a signal. In the main thread, once `run` is over."""
        context = getattr(self._pcontext, "_pc", None)  # the agent itself reports the first failure only
        return {} if context is None else {rank: process.exitcode for rank, process in enumerate(context.processes)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.over.is_set():
            return RunResult(state=WorkerState.FAILED)
        self.gone_first.update(rank for rank, process in self.processes().items() if not process.alive())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _get_fq_hostname(self) -> str:
        return "localhost"  # the agent puts it into its metrics; asking a name server that does not answer takes seconds
