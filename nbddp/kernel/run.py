"""A run as the notebook sees it: its state, its figures, its checkpoints, and what can be asked of it.

Runs in the kernel. Everything is read from the run directory, so a run of another kernel, or of the past, is the same object.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, NbddpError, RunFailed, WorkerLost
from nbddp.failure import Failure
from nbddp.kernel import collection
from nbddp.kernel.ancestry import Ancestry
from nbddp.kernel.follow import Follower
from nbddp.kernel.history import History
from nbddp.kernel.tail import Tail
from nbddp.kernel.trained import Trained
from nbddp.kernel.view import in_kernel
from nbddp.launch import local
from nbddp.launch.stacks import stacks

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from nbddp.kernel.advice_list import AdviceList
    from nbddp.kernel.card import Card
    from nbddp.launch.local import Supervised
    from nbddp.rundir import RunDir
    from nbddp.state import RunState

LOG_TAIL = 20
CATCH_UP_S = 10.0
"""How long opening a run waits for its events to be read; a long run of the past has many."""


class Run(Trained):
    """One training run; made by `%%ddp_train`, `nbddp.train` and `nbddp.attach`.

    Attributes:
        id: name of the run directory.
        dir: the run directory.
        config: the options of the run.
        parent: id of the run that this one goes on from; None where it began anew.
    """

    def __init__(self, run_dir: RunDir, *, supervised: Supervised | None = None, model: nn.Module | None = None, blocking: bool = False) -> None:
        spec = run_dir.opened_spec()
        super().__init__(run_dir, spec, model)
        self._supervised = supervised
        self.id, self.dir = run_dir.id, run_dir.path
        self.config = _config(run_dir, spec)
        self.parent: str | None = spec.get("parent")
        self._joined: History | None = None
        self._follower = Follower(run_dir, self._settle, None if supervised is None else supervised.alive, niced=blocking)
        self._result: dict[str, Any] | None = None
        self._follower.add_listener(self._remember_end)
        if in_kernel():
            collection.ahead()
        self._follower.start()
        self._follower.caught_up.wait(CATCH_UP_S)

    def __repr__(self) -> str:
        state = self._follower.state
        return f"<nbddp run {self.id}: {self.state}, step {state.step}>"

    # -- where it is

    @property
    def state(self) -> str:
        """starting, running, finished, stopped or failed."""
        result = self._read_result()
        if result is not None:
            return str(result["state"])
        state = self._follower.state
        lost = self._follower.done.is_set() and not state.done and (not self.dir.is_dir() or self._files.ended)
        return "failed" if lost else state.state

    @property
    def error(self) -> NbddpError | None:
        """Why the run failed; None where it did not."""
        result = self._read_result()
        error: NbddpError
        if result is None and self.state == "failed" and not self.dir.is_dir():
            error = WorkerLost(f"the run directory {self.dir} was deleted while the run went on")
        elif result is None and self._files.ended:
            return self._files.unreadable(self._files.damage or "result.json changed while it was read")
        elif result is None or not result.get("error"):
            return None
        else:
            failure = Failure.from_json(result["error"])
            error = failure.to_exception([] if failure.rank is None else self._last_lines(failure.rank))
        if isinstance(error, RunFailed):
            error.run = self
        return error

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the cell to the end of the run, or until now."""
        line = self.timeline
        return max(0.0, float(line["finished"] or time.time()) - float(line["requested"]))

    @property
    def timeline(self) -> dict[str, Any]:
        """Unix seconds: requested (the cell started), bundled, launched, first_step (rank 0 finished it), finished; None for what is still to come."""
        state, result = self._follower.state, self._read_result()
        times = self._spec["times"]
        return {
            "requested": times["requested"],
            "bundled": times.get("bundled"),
            "launched": state.launched_time,
            "first_step": state.first_step_time,
            "finished": None if result is None else result["time"],
        }

    @property
    def history(self) -> dict[str, np.ndarray]:
        """One entry per optimizer step, those of the runs that it goes on from first; times in seconds.

        A dict of arrays: step, epoch, stage, loss, lr, samples, phases, and the step's own scalars.
        """
        return self._history.steps

    @property
    def epochs(self) -> dict[str, np.ndarray]:
        """One entry per epoch: epoch, step, stage, loss, duration_s, val_loss and whatever else was recorded of it."""
        return self._history.epochs

    @property
    def advice(self) -> AdviceList:
        """What would make a run like this one quicker, or better, by its steps so far; each with the option to write, if one helps."""
        from nbddp.advice import advise
        from nbddp.kernel.advice_list import AdviceList

        return AdviceList(advise(self._follower.state, self.config))

    def log(self, rank: int | None = 0) -> str:
        """Everything that a rank printed; `rank=None` is the supervisor.

        Raises:
            ConfigError: for a rank that there is none of.
        """
        ranks = self._ranks()
        if rank is not None and (isinstance(rank, bool) or rank not in ranks):
            known = f"0 to {max(ranks)}" if len(ranks) > 2 and ranks == list(range(len(ranks))) else " and ".join(map(str, ranks))
            message = f"run {self.id} has no rank {rank!r}: there {'is' if len(ranks) == 1 else 'are'} {known}; None is the supervisor"
            raise ConfigError(message)
        path = self._files.log(rank)
        try:
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
            why = "it is no file" if path.exists() else ""
        except OSError as error:
            why = str(error.strerror)
        if why:
            damage = f"logs/{path.name} can't be read: {why}"
            raise self._files.unreadable(damage)
        return ""

    def stacks(self) -> Stacks:
        """Where each live rank is right now: its Python stacks, by rank."""
        return Stacks(stacks(self._files))

    # -- what can be asked of it

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end, then load the weights by the rules of `load` if that is still to be done.

        Raises:
            RunFailed: where the run failed.
            TimeoutError: after `timeout` seconds.
        """
        if not self._follower.done.wait(timeout):
            assert timeout is not None
            message = f"run {self.id} goes on after {timeout:g} s"
            raise TimeoutError(message)
        if (error := self.error) is not None:
            raise error
        if (line := self.take_weights()) is not None:
            print(line)  # noqa: T201 - says what was written into the user's model
        return self

    def stop(self) -> None:
        """Ask all ranks to stop at the same step, with a checkpoint. Returns at once; `wait` waits."""
        if not self._files.ended:
            with contextlib.suppress(FileNotFoundError):  # the directory was deleted, upon which the supervisor ends the run
                self._files.ask("stop")

    def terminate(self) -> None:
        """End the ranks without waiting for a common step; the last checkpoint stays."""
        self.stop()
        if self._supervised is not None:
            self._supervised.terminate()
        else:
            local.terminate_run(self._files)

    def kill(self) -> None:
        """Kill every process of the run; the last complete checkpoint stays."""
        self.stop()
        if self._supervised is not None:
            self._supervised.kill()
        else:
            local.kill_run(self._files)

    # -- how it looks

    def view(self) -> Card | None:
        """Show the run: live while it goes on, in a view that follows it to its end; its card afterwards."""
        from nbddp.kernel.stopping import stopping_of
        from nbddp.kernel.view import open_view

        if self._files.ended:
            self._follower.done.wait()  # it has only to read what is there
        if self._follower.done.is_set():
            return self.card()
        controls = stopping_of(self._files, self)
        view = open_view(self._files, self._follower.state, plan_line=self._spec["plan_line"], controls=controls, config=self.config)

        def follow(state: RunState) -> None:
            if state.done or not self.dir.is_dir():  # a run whose directory was deleted has no end of its own
                view.finish(self.card())
            else:
                view.update(state)

        self._follower.add_listener(follow)
        return None

    def card(self) -> Card:
        """The static card of the run as it is now."""
        from nbddp.kernel.card import make_card

        error = self.error
        text = None if error is None else str(error)
        return make_card(self._files, self._follower.state, plan_line=self._spec["plan_line"], holds=self._holds, error=text)

    def plot(self) -> Any:
        """The loss curves as a matplotlib Figure."""
        from nbddp.kernel.figure import loss_figure

        return loss_figure(self._follower.state)

    # -- inside

    @property
    def _history(self) -> History:
        """Made when it is asked for: the parents are looked for then."""
        if self._joined is None:
            ancestry = Ancestry.of(self._files, self._spec)
            if ancestry.missing is not None:
                said = f"the directory of run {ancestry.missing} is gone, and with it what came before: the history of run {self.id} begins later"
                warnings.warn(said, stacklevel=3)
            self._joined = History(self._files.events, [(parent.run.events, parent.until) for parent in ancestry.parents])
        return self._joined

    @property
    def follower(self) -> Follower:
        return self._follower

    def _ranks(self) -> list[int]:
        """Those that were planned, or have printed something."""
        nproc = self._spec.get("plan", {}).get("nproc") or max(self._follower.state.ranks, default=0) + 1
        return sorted({*range(nproc), *(int(path.stem[5:]) for path in self._files.logs.glob("rank-?????.log") if path.stem[5:].isdecimal())})

    def _last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank printed, as a terminal would show them."""
        return Tail(self._files.log(rank), LOG_TAIL, omit=()).lines()

    def _remember_end(self, state: RunState) -> None:
        if state.done:
            self._read_result()

    def _read_result(self) -> dict[str, Any] | None:
        """The run's result, also after its directory was deleted."""
        if self._result is None:
            self._result = self._files.read_result()
        return self._result

    def _settle(self) -> None:
        if self._supervised is not None:
            self._supervised.settle()
        else:
            local.settle(self._files)


def _config(run_dir: RunDir, spec: dict[str, Any]) -> TrainConfig:
    try:
        return TrainConfig(**spec["config"])
    except ConfigError as error:
        damage = f"spec.json: config: {error}, and may be of another version of nbddp"
        raise run_dir.unreadable(damage) from None


class Stacks(dict[int, str]):
    """The Python stacks of each rank, shown one after the other."""

    def __repr__(self) -> str:
        if not self:
            return "no rank of this run is alive on this host"
        return "\n".join(f"rank {rank}\n{text.rstrip()}\n" for rank, text in sorted(self.items()))

    __str__ = __repr__
