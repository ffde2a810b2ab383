"""What the standby imports before it forks: everything that supervisors and ranks need. Runs in the standby.

The imports are niced where the work at hand should not feel them, in a thread of their own: only a privileged process may take niceness back, and what
is forked inherits that of the main thread.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module

NICENESS = 10


def import_all(entry_module: str, *, niced: bool) -> None:
    """Import what supervisor and ranks need; afterwards this process has no thread of ours but the main one."""
    if not niced:
        _import(entry_module)
        return
    failures: list[BaseException] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            _import(entry_module)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _import(entry_module: str) -> None:
    ours = ("nbddp.config", "nbddp.supervisor.group", "nbddp.supervisor.watch", "nbddp.supervisor.main")
    for name in ("torch.distributed", "torch.nn.parallel", *ours, entry_module):
        import_module(name)
