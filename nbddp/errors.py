"""Every error that nbddp raises, with the tree first.

NbddpError
  ConfigError(ValueError)      a wrong value, the rule and the remedy; nothing was started
    UnreadableRun              a file of a run directory that does not hold what it should
  BundleError                  something that cannot travel to the ranks, by name
  LaunchError                  the process group did not form
  RunFailed                    a run ended in the state "failed"
    WorkerError                user code raised on a rank
      OutOfMemory              device memory ran out
    WorkerLost                 a rank or the supervisor was killed or vanished
    ReplicaMismatch            the replicas of the model differ between ranks
    HangDetected               no rank made progress for ``hang_after_s``
  CheckpointError              a checkpoint file is incomplete or does not fit the model

Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from nbddp.visible import excerpt, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class NbddpError(Exception):
    """Base class of all errors raised by nbddp."""


def _headline(error: object) -> str:
    """What a notebook shows of an error: it names what the user, or a file, called something."""
    return visible(excerpt(f"{type(error).__name__}: {error}", letters=8_000, lines=80))


class _OneLine:
    """Errors that a notebook shows without a traceback: the remedy is in the message, the frames are ours."""

    def _render_traceback_(self) -> list[str]:
        return [_headline(self)]


class ConfigError(_OneLine, NbddpError, ValueError):
    """A wrong value, the rule that it breaks and the remedy. Nothing was started."""


class UnreadableRun(ConfigError):
    """A file of a run directory that does not hold what it should: which, what is wrong with it, and what can be done."""


class BundleError(_OneLine, NbddpError):
    """Something that cannot be sent to another process, by name. Nothing was started."""


class CheckpointError(_OneLine, NbddpError):
    """A checkpoint file that is incomplete, foreign or does not fit the model."""


class LaunchError(_OneLine, NbddpError):
    """The process group did not form."""


class RunFailed(NbddpError):
    """A run ended in the state ``"failed"``.

    Attributes:
        run: the `Run`, or None where the error was made outside a kernel.
        rank: the rank that failed first; None where no single rank did.
        log_tail: the last lines which that rank printed.
    """

    def __init__(self, message: str, *, rank: int | None = None, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.run: object | None = None
        self.rank = rank
        self.log_tail = tuple(log_tail)

    def _render_traceback_(self) -> list[str]:
        lines = [_headline(self)]
        if self.log_tail:
            where = f"rank {self.rank}" if self.rank is not None else "the supervisor"
            lines += ["", f"last lines of {where}:", *(f"    {line}" for line in self.log_tail)]
        return lines


class WorkerError(RunFailed):
    """User code raised on a rank.

    Attributes:
        type_name: the class name of the exception on the rank.
        cell: execution count of the notebook cell that the failing line stands in, or None.
        line: line of that cell, counted from 1 at the cell's first line (the magic included); without a cell, the line in its file.
        remote_traceback: the traceback as the rank wrote it, its frames trimmed to the user's own.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        log_tail: Sequence[str] = (),
        type_name: str = "",
        cell: int | None = None,
        line: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, rank=rank, log_tail=log_tail)
        self.type_name = type_name
        self.cell = cell
        self.line = line
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(remote_traceback)  # shown where no notebook renders it, as in a script

    def _render_traceback_(self) -> list[str]:
        return [*self.remote_traceback.rstrip().splitlines(), _headline(self)]


class OutOfMemory(WorkerError):
    """Device memory ran out on a rank; the message says how much was free and what to change."""


class WorkerLost(RunFailed):
    """A rank, or the supervisor (``rank`` is None), was killed or vanished.

    Attributes:
        signal: number of the signal that ended it; None where it exited by itself.
        exit_code: its exit code where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        log_tail: Sequence[str] = (),
        signal: int | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, log_tail=log_tail)
        self.signal = signal
        self.exit_code = exit_code


class ReplicaMismatch(RunFailed):
    """The replicas of the model differ between ranks."""


class HangDetected(RunFailed):
    """No rank made progress for ``hang_after_s``."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean X?"`` for the known words nearest to ``word``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
