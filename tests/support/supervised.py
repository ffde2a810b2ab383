"""Runs under a real supervisor, with ranks whose whole program is a function of this module.

What a rank does is named in the environment of the order, as `DO`; the worker proper is not involved. This module is imported by the test, by the
supervisor and its fork server, and by the ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.events import EventWriter
from nbddp.launch.order import OnKernelExit, Order
from nbddp.process import ProcessId
from nbddp.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY = "support.supervised:entry"


def make_run(root: Path, *, nproc: int = 2, kernel: ProcessId | None = None, **config: Any) -> RunDir:
    """Make a run directory with the parts of a spec that a supervisor reads."""
    run = RunDir.create(root / "nbddp_runs", "supervised")
    kernel = kernel or ProcessId.current()
    run.bundle.write_bytes(b"payload")
    run.write_spec({"plan": {"nproc": nproc, "threads": 1}, "config": config, "host": os.uname().nodename, "kernel": kernel.to_json(), "data": []})
    return run


def make_order(run: RunDir, do: str, *, on_kernel_exit: OnKernelExit = "stop", **environment: str) -> Order:
    """Make an order whose ranks do what the function of that name says."""
    return Order(str(run.path), {**os.environ, "DO": do, **environment}, str(Path.cwd()), ProcessId.current(), on_kernel_exit)


# -- in the rank


class Rank:
    """What the functions below work with."""

    def __init__(self, run: RunDir, events: EventWriter) -> None:
        self.run, self.events = run, events
        self.rank, self.nproc = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.step = 0
        self.phase = "starting"

    def join(self) -> None:
        """Form the process group."""
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def all_reduce(self) -> None:
        """One step: a collective of all ranks."""
        import torch
        import torch.distributed as dist

        value = torch.ones(1)
        self.phase = "sync"
        dist.all_reduce(value)
        assert value.item() == self.nproc
        if self.step == 0 and self.rank == 0:
            self.events.emit("phase", phase="training", first_step=True)
        self.step += 1
        self.phase = "forward"

    def beat(self) -> None:
        """Tell where this rank is, ten times a second."""
        while True:
            self.events.emit("heartbeat", step=self.step, phase=self.phase, position=[0, self.step])
            time.sleep(0.1)


def entry(run_dir: str, environment: dict[str, str], attempt: int) -> None:
    """Do what the order says, and write the events that a worker writes."""
    run, number = RunDir(Path(run_dir)), int(environment["RANK"])
    log = os.open(run.log(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    stacks = (run.logs / f"rank-{number:05d}.stacks").open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    events = EventWriter(run.rank_events(number, attempt), run=run.id, rank=number, attempt=attempt)
    events.emit("started", process=ProcessId.current().to_json())
    rank = Rank(run, events)
    threading.Thread(target=rank.beat, daemon=True).start()
    work: Callable[[Rank], dict[str, Any] | None] = globals()[f"do_{environment['DO']}"]
    try:
        result = work(rank) or {}
    except BaseException as error:  # noqa: BLE001 - written down, as a worker does
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        code = (error.code if isinstance(error.code, int) else 1) if isinstance(error, SystemExit) else None
        text = str(error)
        collective = "peer" in text or "gloo" in text
        traceback.print_exc()
        sys.stderr.flush()
        events.emit("failed", type=type(error).__name__, message=text, cell=7, line=line, file="", collective=collective, exit_code=code, phase=rank.phase)
        os._exit(1)
    events.emit("finished", step=rank.step, epoch=1, **{"stopped": False, "reason": None, "duration_s": 0.0, **result})
    events.close()


def do_finish(rank: Rank) -> None:
    """Three steps."""
    rank.join()
    for _ in range(3):
        rank.all_reduce()


def do_first_reduce(rank: Rank) -> None:
    """Note when the first collective was done."""
    rank.join()
    rank.all_reduce()
    rank.events.emit("message", reduced=time.time())


def do_go_on(rank: Rank) -> dict[str, Any]:
    """Step until a stop is asked for, on which the ranks agree."""
    import torch
    import torch.distributed as dist

    rank.join()
    while True:
        rank.all_reduce()
        stop = torch.tensor(float(rank.run.asked() == "stop"))
        dist.all_reduce(stop)
        if stop.item():
            return {"stopped": True, "reason": "asked"}
        time.sleep(0.01)


def do_describe(rank: Rank) -> dict[str, Any]:
    """Say what this process is like, then go on until told to stop."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    record = {"env": dict(os.environ), "nice": nice, "argv": sys.argv, "random": sys.modules["random"].__file__ or "", "ppid": os.getppid()}
    (rank.run.path / f"described-{rank.rank}.json").write_text(json.dumps(record), encoding="utf-8")
    return do_go_on(rank)


def _on_rank_1(rank: Rank, act: Callable[[], object]) -> None:
    """Rank 1 acts after its second step, rank 0 waits for it in a collective."""
    rank.join()
    rank.all_reduce()
    rank.all_reduce()
    if rank.rank == 1:
        act()
    while True:
        rank.all_reduce()


def do_raise(rank: Rank) -> None:
    """Rank 1 raises."""

    def act() -> None:
        message = "boom"
        raise ValueError(message)

    _on_rank_1(rank, act)


def do_exit_0(rank: Rank) -> None:
    """Rank 1 leaves with success."""
    _on_rank_1(rank, lambda: sys.exit(0))


def do_exit_3(rank: Rank) -> None:
    """Rank 1 leaves with an exit code."""
    _on_rank_1(rank, lambda: sys.exit(3))


def do_leave_0(rank: Rank) -> None:
    """Rank 1 leaves without a word."""
    _on_rank_1(rank, lambda: os._exit(0))


def do_leave_alone(rank: Rank) -> None:
    """The only rank leaves with success before it has finished."""
    rank.events.emit("phase", phase="training", first_step=True)
    os._exit(0)


def do_segfault(rank: Rank) -> None:
    """Rank 1 crashes."""
    _on_rank_1(rank, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def do_fail_at_once(rank: Rank) -> None:
    """Every rank raises before it has joined."""
    message = "before the first step"
    raise RuntimeError(message)


def do_die_silently(rank: Rank) -> None:
    """A rank that ends before it said that it started."""
    rank.events.close()
    for path in rank.run.events.glob("rank-*"):
        path.unlink(missing_ok=True)
    os._exit(4)


def do_hang(rank: Rank) -> None:
    """Rank 1 computes for ever while the other waits for it."""

    def act() -> None:
        rank.phase = "data"
        while True:
            time.sleep(0.05)

    _on_rank_1(rank, act)


def do_ignore(rank: Rank) -> None:
    """Both go on, and rank 1 takes no notice of SIGTERM."""
    if rank.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    do_go_on_deaf(rank)


def do_go_on_deaf(rank: Rank) -> None:
    """Step for ever, whatever is asked for."""
    rank.join()
    while True:
        rank.all_reduce()
        time.sleep(0.01)


def do_stay(rank: Rank) -> None:
    """Finish, but with a thread that keeps the process."""
    do_finish(rank)
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()


def do_keep_lock(rank: Rank) -> None:
    """Finish, and where torch would have a rank wait for the others under a lock that they share with the agent, keep that for ever."""
    from multiprocessing import synchronize

    def wait(self: Any, _timeout: float | None = None) -> None:
        self._cond.acquire()
        time.sleep(600)

    synchronize.Event.wait = wait  # type: ignore[method-assign, assignment]
    do_finish(rank)


def do_leave_when_told(rank: Rank) -> None:
    """Step for ever, and upon SIGTERM leave with an exit code and without a word."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    do_go_on_deaf(rank)


# -- a kernel's stand-in, which a test can kill: python -m support.supervised ROOT DO ON_KERNEL_EXIT [fork]


def kernel_main(root: str, do: str, on_kernel_exit: OnKernelExit, *, fork: bool) -> None:
    """Launch a run, name it, and live until killed; with `fork`, a child that holds the pipe lives on for a while."""
    from nbddp.launch.local import launch
    from nbddp.launch.standby import Standby

    standby = Standby(entry=ENTRY)
    run = make_run(Path(root))
    supervised = launch(run, make_order(run, do, on_kernel_exit=on_kernel_exit), standby)
    standby.warm()
    waiting = standby.template
    assert waiting is not None
    if fork and os.fork() == 0:
        time.sleep(15)
        os._exit(0)
    sys.stdout.write(json.dumps({"run": str(run.path), "supervisor": _supervisor(supervised), "standby": waiting.process.pid}) + "\n")
    sys.stdout.flush()
    signal.pause()


def _supervisor(supervised: Any) -> int:
    while supervised.process is None:
        time.sleep(0.02)
    return int(supervised.process.pid)


if __name__ == "__main__":
    kernel_main(sys.argv[1], sys.argv[2], "continue" if sys.argv[3] == "continue" else "stop", fork="fork" in sys.argv[4:])
