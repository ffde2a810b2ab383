"""What the fork server imports before it forks a rank. Runs in the fork server only: importing it ties the process to its parent.

The imports are niced where the run at hand should not feel them, in a thread of their own: only a privileged process may take niceness back, and the
ranks inherit that of the fork server's main thread.
"""

from __future__ import annotations

import os
import signal
import threading
from importlib import import_module

from nbddp.deathguard import die_with_parent

PARENT = "NBDDP_SUPERVISOR"
NICED = "NBDDP_NICED"
ENTRY_MODULE = "NBDDP_ENTRY_MODULE"
NICENESS = 10


def import_all(entry_module: str, *, niced: bool) -> None:
    """Import what supervisor and ranks need."""
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
    for name in ("torch.distributed", "torch.nn.parallel", "nbddp.config", "nbddp.supervisor.group", "nbddp.supervisor.watch", entry_module):
        import_module(name)


if PARENT in os.environ:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    die_with_parent(int(os.environ.pop(PARENT)))
    for name in ("PYTHONPATH", "NBDDP_SYS_PATH"):  # the supervisor's, and no business of a rank's children
        os.environ.pop(name, None)
    import_all(os.environ.pop(ENTRY_MODULE), niced=os.environ.pop(NICED, "") == "1")
