"""Watches the ranks, the kernel and the signals of a run, and ends the ranks when it has to. The work of the supervisor's main thread.

It waits for nothing that a rank may hold, and is the only one that signals ranks: whatever their exit codes are after that, they are its doing.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Literal

from nbddp.events import EventReader
from nbddp.failure import Failure, RankEnd, exit_code_as_logged, signal_name, verdict
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
"""From a rank's end until the others are told to: those that failed with it say so meanwhile, and the one that was first among them is reported."""
LEAVE_S = 0.5
"""A rank that has written why it failed is given this long to leave."""
TERM_S = 1.5
"""From SIGTERM to SIGKILL."""
STOP_S = 5.0
"""A run whose kernel has ended is given this long to stop in order."""
TEARDOWN_S = 5.0
"""Ranks that have finished are given this long to exit."""
LATE_S = 4.0
"""The agent is given this long to see the end of ranks that are gone or were killed; it may wait for ever for one that took a lock with it."""
DELETED_S = 1.0
"""A run directory is missing for this long before it counts as deleted: a network file system may be slow to tell."""
_LAST_WORDS = 65536
"""Bytes at the end of a rank's log: enough for the stacks of its threads and what a communication library printed before them."""
_COLLECTIVE = re.compile("gloo::|ProcessGroup|NCCL")
_KERNEL_EVERY_S = 0.2
_MEMORY_EVERY_S = 1.0

Cause = Literal["failure", "terminated", "kernel", "hang", "teardown", "fork server", "deleted"]


class Watch:
    """Start the group, let it `follow` that to its end, then ask for its `outcome`."""

    def __init__(self, run: RunDir, order: Order, group: Group, signals: Signals, fork_server: ProcessId, config: TrainConfig) -> None:
        self.progress = Progress()
        self._run_dir, self._order, self._group, self._signals, self._fork_server = run, order, group, signals, fork_server
        self._reader = EventReader(run.events)
        now = time.monotonic()
        self._hang = HangWatch(config.hang_after_s, now, compile_timeout_s=config.compile_timeout_s)
        self._memory = MemoryWatch()
        self._gone: dict[int, float] = {}
        self._told: set[int] = set()
        self._cause: Cause | None = None
        self._ending = 0.0
        self._kernel_gone: float | None = None
        self._finished: float | None = None
        self._missing: float | None = None
        self._next_kernel = self._next_memory = now
        self._hang_failure: Failure | None = None

    def follow(self) -> None:
        """Tick until the ranks have ended, whether or not the agent has seen that. A run that can't be watched is ended."""
        try:
            while not (self._group.wait(TICK_S) or self._overdue(time.monotonic())):
                self._tick(time.monotonic())
            self._read(time.monotonic())
            self._heed_signals()  # that ended the ranks as well, before there was a tick
        except BaseException:
            for process in [*self._group.processes().values(), self._fork_server]:
                process.send(signal.SIGKILL)
            raise
        error = self._group.error
        if error is not None and self._cause is None and self._fork_server.alive() and not self.progress.all_finished(self._group.nproc):
            raise error

    def _overdue(self, now: float) -> bool:
        """Whether the agent has had its time since the last rank was gone, or should be."""
        if len(self._gone) == self._group.nproc:
            return now - max(self._gone.values()) > LATE_S
        return self._cause is not None and now - self._ending > TERM_S + LATE_S

    def outcome(self, exits: dict[int, int | None]) -> tuple[str, Failure | None]:
        """State and failure of the run, once the ranks are gone."""
        if self.progress.all_finished(self._group.nproc):
            last = self.progress.ranks[0].finished or {}
            return ("stopped" if last.get("stopped") else "finished"), None
        orphaned = self._cause in (None, "fork server") and not self._fork_server.alive()
        if orphaned:  # nobody was left to tell exit codes, and 255 is what multiprocessing makes of that
            exits = {rank: None if code == 255 else code for rank, code in exits.items()}
        failure = verdict(self._ends(exits), memory_hint=self._memory.hint())
        if orphaned and (failure is None or failure.signal is None):
            failure = Failure("WorkerLost", "the process that starts the ranks was killed; the ranks ended with it")
        if failure is not None:
            return "failed", failure
        if self._run_dir.asked() == "stop":
            self.progress.stop_reason = "terminated" if self._kernel_gone is None else "the kernel ended"
            return "stopped", None
        return "failed", self._hang_failure or self._unexplained()

    def _unexplained(self) -> Failure:
        number = self._signals.received
        if number is not None:
            message = f"the supervisor was told to end by signal {number} ({signal_name(number)})"
            return Failure("WorkerLost", message, signal=number)
        return Failure("WorkerLost", "the ranks ended before they had finished, without a word")

    def _ends(self, exits: dict[int, int | None]) -> list[RankEnd]:
        """What is known of each rank's end. Once they are told to end, nothing is a rank's own failure any more: neither what it writes nor how it leaves."""
        ends = []
        for rank in range(self._group.nproc):
            row = self.progress.ranks.get(rank)
            failed = None if row is None else row.failed
            gone = self._gone.get(rank, time.monotonic())
            when = row.failed_time if row is not None and failed is not None else gone
            if self._cause is not None and when > self._ending:
                failed = None
            ours = self._cause is not None and gone > self._ending
            finished = row is not None and row.finished is not None
            phase = "" if row is None else row.phase
            words = self._last_words(rank)
            code = exit_code_as_logged(exits.get(rank), words)
            in_collective = code == -signal.SIGABRT and (phase in ("sync", "backward") or _COLLECTIVE.search(words[-4096:]) is not None)
            ends.append(RankEnd(rank, when, code, failed, finished, ours, in_collective))
        return ends

    def _last_words(self, rank: int) -> str:
        """The end of what a rank printed."""
        try:
            with self._run_dir.log(rank).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_WORDS))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _tick(self, now: float) -> None:
        moved = self._read(now)
        processes = self._group.processes()
        if now >= self._next_kernel:
            self._next_kernel = now + _KERNEL_EVERY_S
            self._watch_kernel(now)
            self._watch_directory(now)
        self._heed_signals()
        if processes and now >= self._next_memory:
            self._next_memory = now + _MEMORY_EVERY_S
            self._memory.sample({rank: process.pid for rank, process in processes.items()})
        self._watch_ranks(processes, now)
        compiling = any(row.phase == "compiling" for row in self.progress.ranks.values())
        if processes and self._cause is None and self._hang.tick(now, moved=moved, first_step=self.progress.first_step, compiling=compiling):
            self._hung(now)
        if self._cause is not None:
            self._press(processes, now)

    def _read(self, now: float) -> bool:
        moved = False
        for event in self._reader.poll():
            moved = self.progress.fold(event) or moved
        if self._finished is None and self.progress.all_finished(self._group.nproc):
            self._finished = now
        return moved

    def _heed_signals(self) -> None:
        if self._signals.received is not None:
            self._end("terminated", self._signals.time)

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
        """The ranks are to end from now on; the first cause counts."""
        if self._cause is None:
            self._cause, self._ending = cause, now

    def _press(self, processes: dict[int, ProcessId], now: float) -> None:
        """SIGTERM for those who were not told yet; SIGKILL for those who did not follow it."""
        late = now - self._ending >= TERM_S
        if late and not processes:  # they are being started: those who are there end with the process that does so
            self._fork_server.send(signal.SIGKILL)
        for rank, process in processes.items():
            if rank not in self._gone and (late or rank not in self._told):
                self._told.add(rank)
                process.send(signal.SIGKILL if late else signal.SIGTERM)
