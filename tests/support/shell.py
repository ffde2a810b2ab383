"""An IPython shell in this process, for what needs a shell and no kernel."""

from __future__ import annotations

import atexit
import contextlib
import io
import linecache
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbddp.kernel.cells import RunningCells
from nbddp.kernel.config_magic import ConfigMagics
from nbddp.kernel.magics import TrainMagics
from nbddp.kernel.run_magics import RunMagics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbddp.kernel.request import Bind, Request

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class StandInRun:
    """What the recording magics bind in place of a run."""


class Shell:
    """A shell whose %%ddp_train keeps the requests in `requests`, binds a `StandInRun` and starts nothing; plans are kept in `plans`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.ip = shell
        self.requests: list[Request] = []
        self.plans: list[Request] = []
        self.output = ""
        self.error: BaseException | None = None
        cells = RunningCells(shell)
        shell.events.register("pre_run_cell", cells.started)
        shell.events.register("post_run_cell", cells.ended)
        shell.register_magics(TrainMagics(shell, cells, train=self._train, dry_run=self.plans.append), RunMagics(shell), ConfigMagics(shell))

    def _train(self, request: Request, bind: Bind) -> None:
        self.requests.append(request)
        bind(StandInRun())

    def run(self, source: str, *, check: bool = True) -> Request | None:
        """Run a cell and return what was asked for last; with `check`, an error of the cell is raised."""
        asked = len(self.requests) + len(self.plans)
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            result = self.ip.run_cell(source, store_history=True)
        self.output = ANSI.sub("", shown.getvalue())
        self.error = result.error_before_exec or result.error_in_exec
        if check and self.error is not None:
            raise AssertionError(self.output) from self.error
        return (self.requests or self.plans)[-1] if len(self.requests) + len(self.plans) > asked else None


@contextmanager
def running(folder: Path) -> Iterator[Shell]:
    """Open a shell and put everything back that it changes in this process."""
    main, displayhook, path = sys.modules["__main__"], sys.displayhook, list(sys.path)
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.ipython_dir = str(folder)
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    atexit.unregister(shell.atexit_operations)  # else each of hundreds of shells collects all garbage when the tests are over
    try:
        yield Shell(shell)
    finally:
        for filename in shell.compile._filename_map:
            linecache.cache.pop(filename, None)
        shell.restore_sys_module_state()
        InteractiveShell.clear_instance()
        sys.modules["__main__"], sys.displayhook, sys.path[:] = main, displayhook, path
