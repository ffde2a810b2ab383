"""Whether memory was short when a process was killed, with figures. Runs in the supervisor. Linux only; imports neither torch nor Jupyter."""

from __future__ import annotations

from pathlib import Path

from nbddp.failure import SHORT_OF_MEMORY

_GIB = 2**30


def _fields(path: Path) -> dict[str, int]:
    """Numbers of a file of ``name value`` lines, such as /proc/meminfo; empty where it can't be read."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def _cgroup() -> Path | None:
    """This process's control group (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    return None if path is None else Path("/sys/fs/cgroup") / path.lstrip("/")


def _limit(group: Path | None) -> int | None:
    """Bytes that the control group may use; None without a limit."""
    try:
        text = "" if group is None else (group / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class MemoryWatch:
    """Counts the out-of-memory killer's work since it was made, and remembers how large each rank was."""

    def __init__(self) -> None:
        self._group = _cgroup()
        self.kills = self._count()
        self._resident: dict[int, int] = {}
        self._available = 0

    def _count(self) -> int:
        group = 0 if self._group is None else _fields(self._group / "memory.events").get("oom_kill", 0)
        return max(group, _fields(Path("/proc/vmstat")).get("oom_kill", 0))

    def sample(self, pids: dict[int, int]) -> None:
        """Note the ranks' resident memory and what is left on the machine."""
        self._available = _fields(Path("/proc/meminfo")).get("MemAvailable", 0) * 1024
        for rank, pid in pids.items():
            resident = _fields(Path(f"/proc/{pid}/status")).get("VmRSS", 0) * 1024
            if resident:
                self._resident[rank] = resident

    def hint(self) -> str:
        """A clause for the message about a rank that got SIGKILL."""
        total = _fields(Path("/proc/meminfo")).get("MemTotal", 0) * 1024
        limit = _limit(self._group)
        figures = [f"rank {rank} held {size / _GIB:.1f} GiB" for rank, size in sorted(self._resident.items())]
        figures.append(f"{self._available / _GIB:.1f} of {total / _GIB:.1f} GiB were free" + (f", limit {limit / _GIB:.1f} GiB" if limit else ""))
        cause = "the kernel's out-of-memory killer was at work" if self._count() > self.kills else SHORT_OF_MEMORY
        return f"{cause} ({', '.join(figures)}): use fewer ranks, smaller batches or fewer loader workers"
