"""The group of ranks, started and joined by torch elastic's agent. Runs in the supervisor, but for `_rank`, which is where a rank begins.

The agent has a thread of its own, and nothing depends on its return: of what it shares with the ranks, one that is killed may have kept a part.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from nbddp import deathguard
from nbddp.process import ProcessId
from nbddp.supervisor.rendezvous import LoopbackRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

MONITOR_INTERVAL_S = 0.1
# It warns that it can't handle signals beside the main thread; those of the supervisor are `Signals`' to handle.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)

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


def _rank(job: Job) -> NoReturn:
    """Enter the worker with the environment that it is to install: the kernel's, and in it the rank's place in the group.

    It leaves in order, but does not return to torch, which would have it wait for the other ranks under a lock that the agent takes as well: a rank that
    is terminated there keeps the lock for ever. (Exit code 0 written out would be caught on the way, and waited with.)
    """
    deathguard.die_with_parent()
    place = {name: os.environ[name] for name in _PLACE}
    try:
        job.entry(job.run_dir, {**job.environment, **place}, job.attempt)
    except Exception:  # noqa: BLE001 - torch would write the traceback to a file in the temporary folder
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
    raise SystemExit


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
    """The elastic agent of one run on this machine. `work` runs it; the rest is for the thread that watches.

    It notices ends, and ends no rank itself: torch's own way, upon the first failure, is to wait 30 s for the others.
    """

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
        self.error: BaseException | None = None
        """What kept the agent from starting or joining the ranks."""
        self._done = threading.Event()
        self._processes: dict[int, ProcessId] = {}
        self._exits: dict[int, int] = {}

    def start(self) -> None:
        """Start the ranks, in a thread."""
        threading.Thread(target=self._work, name="agent", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of all ranks, as the agent sees it; return whether it has come."""
        return self._done.wait(timeout_s)

    def processes(self) -> dict[int, ProcessId]:
        """The ranks' processes, by rank; empty until all are started."""
        if not self._processes and self._pcontext is not None:
            # A rank that is gone before it was looked at has no start time any more; no living process has start time -1.
            self._processes = {rank: ProcessId.of(pid) or ProcessId(pid, -1) for rank, pid in self._pcontext.pids().items()}
        return self._processes

    def exits(self) -> dict[int, int | None]:
        """Exit code of each rank, negative for a signal; None where the agent has not seen its end."""
        known = dict(self._exits)
        return {rank: known.get(rank) for rank in range(self.nproc)}

    def _work(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - reported by the thread that watches
            self.error = error
        finally:
            self._done.set()

    def _monitor_workers(self, _worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext  # it has the processes, but no public way to look at them without waiting
        for rank, process in enumerate(context._pc.processes):
            if rank not in self._exits and (code := process.exitcode) is not None:
                self._exits[rank] = code
        if len(self._exits) < self.nproc:
            return RunResult(state=WorkerState.HEALTHY)
        if any(self._exits.values()):
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._exits))

    def _exit_barrier(self) -> None:
        """There is no other agent to wait for."""

    def _get_fq_hostname(self) -> str:
        return "localhost"  # the agent puts it into its metrics; asking a name server that does not answer takes seconds
