"""The order: the one line that a kernel writes to the standard input of a supervisor.

Made in the kernel, read in the supervisor; never written to a file, since it holds the kernel's environment. Imports neither torch nor Jupyter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from nbddp.process import ProcessId

OnKernelExit = Literal["stop", "continue"]


@dataclass(frozen=True, slots=True)
class Order:
    """Run this run directory for this kernel; `cwd` is the kernel's."""

    run_dir: str
    environment: dict[str, str]
    cwd: str
    kernel: ProcessId
    on_kernel_exit: OnKernelExit

    def to_line(self) -> bytes:
        """One line of ASCII, also for names and values that are not UTF-8."""
        record = {
            "run_dir": self.run_dir,
            "environment": self.environment,
            "cwd": self.cwd,
            "kernel": self.kernel.to_json(),
            "on_kernel_exit": self.on_kernel_exit,
        }
        return json.dumps(record).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """Read `to_line`'s line.

        Raises:
            ValueError: where it is not an order.
        """
        record: dict[str, Any] = json.loads(line)
        kernel = ProcessId.from_json(record.get("kernel"))
        if kernel is None or record.get("on_kernel_exit") not in ("stop", "continue"):
            message = "not an order: kernel must be [pid, start] and on_kernel_exit stop or continue"
            raise ValueError(message)
        return cls(str(record["run_dir"]), dict(record["environment"]), str(record["cwd"]), kernel, record["on_kernel_exit"])
