"""Watches the ranks, the kernel and the signals of a run, and ends the ranks when it has to. A thread of the supervisor, beside the agent's main thread.

The agent alone would wait 30 s for a rank that ignores SIGTERM, take `os._exit(0)` for success, and know nothing of kernels and hangs.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Literal

from nbddp.events import EventReader
from nbddp.failure import Failure, RankEnd, signal_name, verdict
from nbddp.launch.progress import Progress
from nbddp.launch.stacks import stacks
from nbddp.rundir import write_atomically
from nbddp.supervisor.hang import HangWatch, culprit
from nbddp.supervisor.memory import MemoryWatch

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.launch.order import Order
    from nbddp.process import ProcessId
    from nbddp.rundir import RunDir
    from nbddp.supervisor.group import Group
    from nbddp.supervisor.signals import Signals

TICK_S = 0.1
NOTICE_S = 0.3
"""The agent is given this long to notice a rank's end by itself, since it knows which came first."""
LEAVE_S = 0.5
"""A rank that has written why it failed is given this long to leave."""
TERM_S = 1.5
"""From SIGTERM to SIGKILL."""
STOP_S = 5.0
"""A run whose kernel has ended is given this long to stop in order."""
TEARDOWN_S = 5.0
"""Ranks that have finished are given this long to exit."""
DELETED_S = 1.0
"""A run directory is missing for this long before it counts as deleted: a network file system may be slow to tell."""
_KERNEL_EVERY_S = 0.2
_MEMORY_EVERY_S = 1.0

Cause = Literal["failure", "terminated", "kernel", "hang", "teardown", "fork server", "deleted"]


class Watch(threading.Thread):
    """Start it before `Group.run` and `close` it after; then ask for its `outcome`."""

    def __init__(self, run: RunDir, order: Order, group: Group, signals: Signals, fork_server: ProcessId, config: TrainConfig) -> None:
        super().__init__(name="watch", daemon=True)
        self.progress = Progress()
        self.crash: BaseException | None = None
        self._run_dir, self._order, self._group, self._signals, self._fork_server = run, order, group, signals, fork_server
        self._reader = EventReader(run.events)
        now = time.monotonic()
        self._hang = HangWatch(config.hang_after_s, now, compile_timeout_s=config.compile_timeout_s)
        self._memory = MemoryWatch()
        self._closed = threading.Event()
        self._gone: dict[int, float] = {}
        self._ours: set[int] = set()
        self._cause: Cause | None = None
        self._ending = 0.0
        self._kernel_gone: float | None = None
        self._finished: float | None = None
        self._missing: float | None = None
        self._next_kernel = self._next_memory = now
        self._hang_failure: Failure | None = None

    def run(self) -> None:
        """Tick until closed; a run that can't be watched is ended."""
        try:
            while not self._closed.wait(TICK_S):
                self._tick(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - reported by the main thread, which goes on when the ranks are gone
            self.crash = error
            for process in [*self._group.processes().values(), self._fork_server]:
                process.send(signal.SIGKILL)
            self._group.over.set()

    def close(self) -> None:
        """Stop watching, and read the last events."""
        self._closed.set()
        self.join()
        self._read(time.monotonic())

    def outcome(self, exits: dict[int, int | None], first: int | None) -> tuple[str, Failure | None]:
        """State and failure of the run, once the ranks are gone; `first` is the rank whose end the agent saw first."""
        if self.progress.all_finished(self._group.nproc):
            last = self.progress.ranks[0].finished or {}
            return ("stopped" if last.get("stopped") else "finished"), None
        orphaned = not self._fork_server.alive()
        if orphaned:  # nobody was left to tell exit codes, and 255 is what multiprocessing makes of that
            exits = {rank: None if code == 255 else code for rank, code in exits.items()}
        failure = verdict(self._ends(exits, first), memory_hint=self._memory.hint())
        if orphaned and (failure is None or failure.signal is None):
            failure = Failure("WorkerLost", "the process that starts the ranks was killed; the ranks ended with it")
        if failure is not None:
            return "failed", failure
        if self._run_dir.asked() == "stop":
            self.progress.stop_reason = self.progress.stop_reason or ("the kernel ended" if self._kernel_gone is not None else "terminated")
            return "stopped", None
        return "failed", self._hang_failure or self._unexplained()

    def _unexplained(self) -> Failure:
        number = self._signals.received
        if number is not None:
            message = f"the supervisor was told to end by signal {number} ({signal_name(number)})"
            return Failure("WorkerLost", message, signal=number)
        return Failure("WorkerLost", "the ranks ended before they had finished, without a word")

    def _ends(self, exits: dict[int, int | None], first: int | None) -> list[RankEnd]:
        """What is known of each rank's end; what a rank wrote after it was told to end is not its own failure."""
        ends = []
        for rank in range(self._group.nproc):
            row = self.progress.ranks.get(rank)
            failed = None if row is None else row.failed
            gone = self._gone.get(rank, time.monotonic())
            when = row.failed_time if row is not None and failed is not None else gone
            if failed is not None and self._cause is not None and when > self._ending:
                failed = None
            code = exits.get(rank)
            by_agent = code == -signal.SIGTERM and rank != first and rank not in self._group.gone_first
            told = rank in self._ours or by_agent or (code == -signal.SIGTERM and self._signals.received is not None)
            finished = row is not None and row.finished is not None
            phase = "" if row is None else row.phase
            in_collective = code == -signal.SIGABRT and (phase in ("sync", "backward") or self._logged_collective(rank))
            if rank == first and failed is None:  # of ranks that were killed at once, the agent's first comes first
                when -= 2 * TICK_S
            ends.append(RankEnd(rank, when, code, failed, finished, told, in_collective))
        return ends

    def _logged_collective(self, rank: int) -> bool:
        """Whether the last words of a rank are those of a communication library."""
        try:
            tail = self._run_dir.log(rank).read_bytes()[-4096:].decode("utf-8", "replace")
        except OSError:
            return False
        return any(word in tail for word in ("gloo::", "ProcessGroup", "NCCL"))

    def _tick(self, now: float) -> None:
        moved = self._read(now)
        processes = self._group.processes()
        if now >= self._next_kernel:
            self._next_kernel = now + _KERNEL_EVERY_S
            self._watch_kernel(now)
            self._watch_directory(now)
        if self._signals.received is not None:
            self._end("terminated", now)
        if not processes:
            return
        if now >= self._next_memory:
            self._next_memory = now + _MEMORY_EVERY_S
            self._memory.sample({rank: process.pid for rank, process in processes.items()})
        self._watch_ranks(processes, now)
        compiling = any(row.phase == "compiling" for row in self.progress.ranks.values())
        if self._cause is None and self._hang.tick(now, moved=moved, first_step=self.progress.first_step, compiling=compiling):
            self._hung(now)
        if self._cause is not None:
            self._press(processes, now)
        if len(self._gone) == self._group.nproc and now - max(self._gone.values()) > NOTICE_S:
            self._group.over.set()

    def _read(self, now: float) -> bool:
        moved = False
        for event in self._reader.poll():
            moved = self.progress.fold(event) or moved
        if self._finished is None and self.progress.all_finished(self._group.nproc):
            self._finished = now
        return moved

    def _watch_kernel(self, now: float) -> None:
        if self._order.on_kernel_exit == "continue":
            return
        if self._kernel_gone is None and not self._order.kernel.alive():
            self._kernel_gone = now
            if self._run_dir.asked() is None:
                self._run_dir.ask("stop")
        if self._kernel_gone is not None and now - self._kernel_gone > STOP_S:
            self._end("kernel", now)

    def _watch_directory(self, now: float) -> None:
        """Without its directory a run can be neither watched nor stopped."""
        try:
            self._run_dir.path.stat()
        except FileNotFoundError:
            self._missing = self._missing or now
            if now - self._missing > DELETED_S:
                self._end("deleted", now)
        except OSError:  # not there at the moment, which is not gone
            return
        else:
            self._missing = None

    def _watch_ranks(self, processes: dict[int, ProcessId], now: float) -> None:
        newly_gone = [rank for rank, process in processes.items() if rank not in self._gone and not process.alive()]
        if newly_gone:
            self._read(now)  # its last words, written between the last look and its end
            self._gone.update(dict.fromkeys(newly_gone, now))
        if not self._fork_server.alive():
            self._end("fork server", now)
        for rank in processes:
            row = self.progress.ranks.get(rank)
            if rank in self._gone and (row is None or row.finished is None):
                if now - self._gone[rank] > NOTICE_S:
                    self._end("failure", now)
            elif row is not None and row.failed is not None and now - row.failed_time > LEAVE_S:
                self._end("failure", now)
        if self._finished is not None and now - self._finished > TEARDOWN_S:
            self._end("teardown", now)

    def _hung(self, now: float) -> None:
        path = self._run_dir.logs / "hang.txt"
        write_atomically(path, "\n".join(f"rank {rank}\n{text}" for rank, text in stacks(self._run_dir).items()).encode())
        row = culprit(self.progress.ranks)
        who = "all ranks wait" if row is None else f"rank {row.rank} is in the phase {row.phase} and the others wait for it"
        if self._group.nproc == 1 and self.progress.ranks:
            row = self.progress.ranks[0]
            who = f"rank 0 is in the phase {row.phase}"
        message = f"no rank made progress for {self._hang.quiet_s:.0f} s: {who}; all stacks are in {path}; raise --hang-after-s if this is how long it takes"
        self._hang_failure = Failure("HangDetected", message, None if row is None else row.rank)
        self._end("hang", now)

    def _end(self, cause: Cause, now: float) -> None:
        """Begin to end the ranks; the first cause counts."""
        if self._cause is not None:
            return
        self._cause, self._ending = cause, now
        for rank, process in self._group.processes().items():
            if rank not in self._gone and process.send(signal.SIGTERM):
                self._ours.add(rank)

    def _press(self, processes: dict[int, ProcessId], now: float) -> None:
        """SIGKILL for those who did not follow SIGTERM."""
        if now - self._ending < TERM_S:
            return
        for rank, process in processes.items():
            if rank not in self._gone and process.send(signal.SIGKILL):
                self._ours.add(rank)
