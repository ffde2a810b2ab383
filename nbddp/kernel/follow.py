"""The follower: a thread that folds a run's events into a RunState while the run goes on.

Runs in the kernel, one thread per run that is watched. It never prints, and it imports no Jupyter: views listen to it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from nbddp.events import SUPERVISOR, Event, EventReader
from nbddp.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.rundir import RunDir

    Listener = Callable[[RunState], None]

POLL_S = 0.1
NICENESS = 10
LISTEN_S = 0.25
IDLE_S = 1.0
SETTLE_S = 1.0
FOREIGN_S = 10.0
PIECE = 1 << 20
"""Bytes of a file that are read at once: parsed, they take ten times as much memory."""
BACKLOG = 20
"""Events of one poll that say that there is more to read."""


def _fold(state: RunState, events: list[Event]) -> None:
    for event in events:
        # What a damaged line, or one of another version, says is left out; a run is not lost for it.
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
            state.fold(event)


def _conclude(state: RunState, run_dir: RunDir) -> None:
    """Take the terminal state from result.json where no supervisor was left to say it."""
    result = run_dir.read_result()
    if result is not None and not state.done:
        last = Event(run_dir.id, SUPERVISOR, 0, 0, float(result.get("time", time.time())), time.monotonic(), "exited", result)
        _fold(state, [last])


def fold_all(run_dir: RunDir) -> RunState:
    """Fold everything that is in a run's files now."""
    state, reader = RunState(), EventReader(run_dir.events)
    while events := reader.poll():
        _fold(state, events)
    _conclude(state, run_dir)
    return state


class Follower(threading.Thread):
    """Follow a run to its end.

    Ends by itself when the run has a result and all its events are folded, or when the run directory is gone (`state.done` is False then).

    Args:
        run_dir: the run.
        settle: called once when nothing works on the run any more and nobody wrote a result; writes it.
        niced: whether to give way to the ranks, where the kernel's main thread only waits: one that works would wait for this thread's lock, too.
        live: whether something works on the run; default: what the run directory says, which knows a supervisor only once that has taken the run over.

    Attributes:
        caught_up: set when what was in the files at the start is folded.
        done: set at the end; `state` then contains every event that is in the files.
        view_error: the first exception of a listener. A view that breaks does not end the run.
    """

    def __init__(self, run_dir: RunDir, settle: Callable[[], None], live: Callable[[], bool] | None = None, *, niced: bool = False) -> None:
        super().__init__(name=f"nbddp-follow-{run_dir.id}", daemon=True)
        self.run_dir = run_dir
        self.done = threading.Event()
        self.caught_up = threading.Event()
        self.view_error: Exception | None = None
        self._settle = settle
        self._niced = niced
        self._live = live or run_dir.live
        self._reader = EventReader(run_dir.events)
        self._fold_lock = threading.Lock()
        self._state = RunState()
        self._snapshot: RunState | None = None
        self._listeners: list[Listener] = []
        self._listening = threading.Lock()
        self._told_end = False
        self._stop_asked = threading.Event()
        self._result_seen: float | None = None

    @property
    def state(self) -> RunState:
        """What the run looks like now; what is returned never changes."""
        with self._fold_lock:
            if self._snapshot is None:
                self._snapshot = self._state.snapshot()
            return self._snapshot

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(state)` from the follower's thread: at most 4 times a second, once a second where nothing changed, and at the end.

        Only in the last call is `state.done` true, and that state is complete. Where it has been made already, `listener` is called from this thread.
        """
        with self._listening:
            late = self._told_end
            self._listeners.append(listener)
        if late:
            self._tell(listener, self.state)

    def stop(self) -> None:
        """Stop following, whatever the run does; `join` waits for the thread."""
        self._stop_asked.set()

    def run(self) -> None:
        """Follow; called by `start`."""
        if self._niced:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._follow()
        finally:
            self._notify(last=True)
            self.done.set()
            self.caught_up.set()

    def _follow(self) -> None:
        notified, changed = -math.inf, True
        idle_since: float | None = None
        while not self._stop_asked.is_set():
            ended = self._ended()
            changed = self._read() or changed
            if ended:
                self._drain()
                return
            now = time.monotonic()
            idle_since = None if self._has_result() or self._live() else idle_since or now
            if idle_since is not None and now - idle_since >= SETTLE_S:
                self._settle_once()
                return
            # A terminal state is told at the end, when everything is folded.
            if not self._state.done and now - notified >= (LISTEN_S if changed else IDLE_S):
                self._notify()
                changed, notified = False, now
            self._stop_asked.wait(POLL_S)

    def _ended(self) -> bool:
        """Whether everything that the run will ever write is in its files."""
        return self._has_result() and (self._state.done or not self._supervised())

    def _has_result(self) -> bool:
        return (self.run_dir.path / "result.json").exists()

    def _supervised(self) -> bool:
        """Whether the supervisor may still write its last event; one on another host has a while for it."""
        owner = self.run_dir.supervisor()
        if owner is None:
            return False
        host, process = owner
        if host == socket.gethostname():
            return process.alive()
        self._result_seen = self._result_seen or time.monotonic()
        return time.monotonic() - self._result_seen < FOREIGN_S

    def _settle_once(self) -> None:
        if self.run_dir.path.is_dir():
            with contextlib.suppress(OSError):  # a full or vanished disk: there is no better place to say so
                self._settle()
        self._drain()

    def _read(self) -> bool:
        """Fold what is new; a backlog is worked off at once, a part at a time."""
        until = time.monotonic() + LISTEN_S
        read = False
        while events := self._poll():
            read = True
            with self._fold_lock:
                _fold(self._state, events)
                self._snapshot = None
            if len(events) < BACKLOG:
                break
            if time.monotonic() > until:
                return read
        self.caught_up.set()  # a run of many ranks writes something between any two looks at it
        return read

    def _poll(self) -> list[Event]:
        try:
            return self._reader.poll(PIECE)
        except OSError:  # the disk may be back at the next poll; a run that is gone ends as one that nobody works on
            return []

    def _drain(self) -> None:
        while self._read():
            pass
        with self._fold_lock:
            _conclude(self._state, self.run_dir)
            self._snapshot = None

    def _notify(self, *, last: bool = False) -> None:
        state = self.state
        with self._listening:
            self._told_end = last
            listeners = list(self._listeners)
        for listener in listeners:
            self._tell(listener, state)

    def _tell(self, listener: Listener, state: RunState) -> None:
        try:
            listener(state)
        except Exception as error:  # noqa: BLE001 - a view that breaks must not end the run that it shows
            self.view_error = self.view_error or error
            self._listeners.remove(listener)
