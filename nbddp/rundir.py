"""The run directory: the whole truth about a run, and the only thing that kernel and ranks share.

Used in every process; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import time
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbddp.contents import OPENED, RESULT, SPEC, USED
from nbddp.errors import ConfigError, UnreadableRun
from nbddp.events import dumps, parse
from nbddp.process import ProcessId
from nbddp.runname import is_id, new_folder
from nbddp.shapes import Misfit

if TYPE_CHECKING:
    from nbddp.shapes import Record

ROOT_NAME = "nbddp_runs"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new content, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where the file is missing or unreadable."""
    try:
        return _json_object(path)
    except (OSError, ValueError):
        return None


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file; a pipe would be waited for.

    Raises:
        OSError: where there is no such file, or it can't be read.
        ValueError: where it holds something else.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            message = "is no regular file"
            raise ValueError(message)
        data = file.read()
    try:
        value = json.loads(data)
    except RecursionError:
        message = "is nested too deeply"
        raise ValueError(message) from None
    except ValueError as error:
        at = f": {error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        message = f"is not JSON{at}" if data.strip() else "is empty"
        raise ValueError(message) from None
    if not isinstance(value, dict):
        message = "must hold an object, and holds something else"
        raise ValueError(message)  # noqa: TRY004 - of a file, not of an argument
    return value


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can open, whatever the umask; one that is there already is left as it is."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        return path
    path.chmod(0o700)  # the umask may have taken more
    return path


class RunDir:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def root(self) -> Path:
        return self.path.parent

    @property
    def data(self) -> Path:
        """Staged datasets, shared by the runs of one root."""
        return self.root / "data"

    @property
    def bundle(self) -> Path:
        return self.path / "bundle.pt"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def card(self) -> Path:
        return self.path / "card.html"

    def log(self, rank: int | None) -> Path:
        """Everything that a rank printed; None is the supervisor."""
        return self.logs / ("supervisor.log" if rank is None else f"rank-{rank:05d}.log")

    def rank_events(self, rank: int, attempt: int) -> Path:
        return self.events / f"rank-{rank:05d}.{attempt}.jsonl"

    @property
    def supervisor_events(self) -> Path:
        return self.events / "supervisor.jsonl"

    @classmethod
    def create(cls, root: Path, name: str) -> RunDir:
        """Make the folder of a new run, readable by its owner only."""
        try:
            ours = not root.exists() or root.name == ROOT_NAME  # in a folder of the user's it would hide files that are not ours
            private_folder(root)
            if ours and not (root / ".gitignore").exists():
                write_atomically(root / ".gitignore", b"*\n")
            path = new_folder(root, name)
            run = cls(path)
            try:
                path.chmod(0o700)  # the umask may have taken more
                for folder in (run.events, run.logs, run.checkpoints):
                    private_folder(folder)
            except BaseException:  # an interrupt included
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            message = f"run directories can't be written to {root}: {error.strerror}; choose another folder with --run-root"
            raise ConfigError(message) from error
        return run

    def write_spec(self, spec: dict[str, Any]) -> None:
        write_atomically(self.path / "spec.json", dumps(spec).encode())

    def read_spec(self) -> dict[str, Any] | None:
        """What the run was asked for, every field that is there of its shape; None where that is missing or unreadable: `damage` says why."""
        return self._read("spec.json", SPEC)

    def opened_spec(self) -> dict[str, Any]:
        """The same, with all that a run can't be shown without.

        Raises:
            UnreadableRun: says what is wrong with which file, and what can be done.
        """
        if not self.path.is_dir():
            message = f"the directory of run {self.id} is gone: {self.path}"
            raise UnreadableRun(message)
        damage = self.damage or self._misread("spec.json", OPENED, needed=True)
        spec = self._read("spec.json", OPENED)
        if damage is not None or spec is None:
            raise self.unreadable(damage or "spec.json changed while it was read")
        return spec

    def used_spec(self, spec: dict[str, Any]) -> dict[str, Any]:
        """A spec that was opened, with all that the run's weights can't be used without.

        Raises:
            UnreadableRun: as `opened_spec`.
        """
        try:
            return USED.take(spec)
        except Misfit as misfit:
            damage = f"spec.json: {misfit}"
            raise self.unreadable(damage) from None

    @property
    def damage(self) -> str | None:
        """What is wrong with spec.json or result.json, such as "spec.json is empty"; None where nothing is."""
        if not self.path.is_dir():  # deleted meanwhile, which is no damage
            return None
        for name, shape, needed in (("spec.json", SPEC, True), ("result.json", RESULT, False)):
            if (why := self._misread(name, shape, needed=needed)) is not None:
                return why
        return None

    def unreadable(self, damage: str) -> UnreadableRun:
        """The error for what can't be done with a run of this damage."""
        weights = next((path for name in ("last", "best") if (path := self.checkpoints / f"{name}.pt").is_file()), None)
        rescue = "" if weights is None else f"; %ddp_load MODEL {weights} loads its weights"
        return UnreadableRun(f"run {self.id} can't be read: {damage}; %ddp_runs --prune {self.id} --no-dry-run deletes it{rescue}")

    def _read(self, name: str, shape: Record) -> dict[str, Any] | None:
        try:
            return shape.take(_json_object(self.path / name))
        except (OSError, ValueError):
            return None

    def _misread(self, name: str, shape: Record, *, needed: bool) -> str | None:
        """Why a file can't be read as what it should be."""
        try:
            shape.take(_json_object(self.path / name))
        except FileNotFoundError:
            return f"it has no {name}" if needed else None
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
        except Misfit as misfit:
            return f"{name}: {misfit}"
        except ValueError as error:
            return f"{name} {error}"
        return None

    def ask(self, action: str) -> None:
        """Leave a request for the ranks, who agree on it at their next common step."""
        write_atomically(self.path / "control.json", dumps({"action": action, "time": time.time()}).encode())

    def asked(self) -> str | None:
        """The pending request; costs one `stat` where there is none."""
        path = self.path / "control.json"
        try:
            path.stat()
        except FileNotFoundError:
            return None
        control = read_json(path)
        return None if control is None else str(control.get("action"))

    def write_result(self, result: dict[str, Any]) -> bool:
        """Write the terminal state; the first writer wins, and False is returned to the others."""
        temporary = self.path / f".result.{os.getpid()}.{secrets.token_hex(4)}"
        write_atomically(temporary, dumps(result).encode())
        try:
            os.link(temporary, self.path / "result.json")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def read_result(self) -> dict[str, Any] | None:
        """The terminal state; None where there is none, or where it is unreadable, which `ended` tells apart."""
        return self._read("result.json", RESULT)

    @property
    def ended(self) -> bool:
        """Whether somebody wrote down that the run is over."""
        return (self.path / "result.json").exists()

    def write_supervisor(self, process: ProcessId) -> None:
        write_atomically(self.path / "supervisor.json", dumps({"host": socket.gethostname(), "process": process.to_json()}).encode())

    def supervisor(self) -> tuple[str, ProcessId] | None:
        """Host and process of the supervisor, once it took the run over."""
        record = read_json(self.path / "supervisor.json")
        process = None if record is None else ProcessId.from_json(record.get("process"))
        return None if record is None or process is None else (str(record.get("host")), process)

    def live(self) -> bool:
        """Whether a process still works on this run, as far as this host can tell."""
        if self.ended:
            return False
        owner = self.supervisor()
        if owner is None:  # still being bundled, or its kernel died before the launch
            spec = self.read_spec() or {}
            kernel = ProcessId.from_json(spec.get("kernel"))
            return kernel is not None and spec.get("host") == socket.gethostname() and kernel.alive()
        host, process = owner
        return host != socket.gethostname() or process.alive()

    def processes(self) -> list[tuple[int, ProcessId]]:
        """Rank and process of every rank that has said that it started."""
        found = []
        for path in sorted(path for path in self.events.glob("rank-*.jsonl") if path.is_file()):
            with contextlib.suppress(OSError), path.open("rb") as file:
                event = parse(file.readline())
                process = None if event is None else ProcessId.from_json(event.data.get("process"))
                if event is not None and process is not None:
                    found.append((event.rank, process))
        return found

    def bytes(self) -> int:
        """Size of the run's own files."""
        return sum(path.lstat().st_size for path in self.path.rglob("*") if path.is_file())

    def drop_payload(self) -> None:
        """Keep the record of a run that failed before its first step, not its payload."""
        self.bundle.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def run_dirs(root: Path) -> list[RunDir]:
    """The runs of a root, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if is_id(path.name) and path.is_dir()]
    return [RunDir(path) for path in sorted(found, key=lambda path: (path.name[:15], path.name[-4:]))]


def find_run(name: str | Path, root: Path) -> RunDir:
    """A run by its directory, its id or a unique part of its id.

    Raises:
        ConfigError: where none or several match.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a text that can't be a path, too long or of a home that there is not
        path = Path(name).expanduser()
        if (path / "spec.json").is_file() or (path.is_dir() and is_id(path.resolve().name)):
            return RunDir(path.resolve())
    part = unicodedata.normalize("NFC", str(name))
    found = [run for run in run_dirs(root) if part in unicodedata.normalize("NFC", run.id)] if part else []
    exact = [run for run in found if run.id == part or run.id.endswith(f"-{part}")]
    if len(exact or found) == 1:
        return (exact or found)[0]
    what = f"{len(found)} runs match {name}: {', '.join(run.id for run in found[-5:])}" if found else f"no run {name} in {root}"
    message = f"{what}; %ddp_runs lists them"
    raise ConfigError(message)
