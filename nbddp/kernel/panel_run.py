"""What the Run button of a configuration panel does: the written cell in the background, as if it stood in the panel's own, and how that run goes on.

Runs in the kernel's main thread; what is said of the run comes from its follower's.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from nbddp.errors import NbddpError
from nbddp.kernel.cell_writer import write_line
from nbddp.kernel.panel_fill import told_only
from nbddp.kernel.panel_style import alert, quiet
from nbddp.kernel.runs import last_run
from nbddp.kernel.sections import progress_text
from nbddp.kernel.text import short_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.panel_fill import Draft
    from nbddp.kernel.panel_loop import MainLoop
    from nbddp.kernel.run import Run
    from nbddp.state import RunState

PERIOD_S = 2.0
"""How often it is said how far the run is, beside the view."""


class Starter:
    """Starts runs.

    Args:
        shell: the notebook's.
        loop: the main thread, and the cell below which a run's view appears.
        say: shows HTML below the buttons.
        ended: called from the follower's thread at the end of a run.
    """

    def __init__(self, shell: InteractiveShell, loop: MainLoop, say: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._shell, self._loop, self._say, self._ended = shell, loop, say, ended
        self._run: Run | None = None

    def start(self, draft: Draft) -> None:
        """Run a draft as the magic would, with the notebook's objects as they are now."""
        try:
            written = told_only(draft)
            with self._loop.in_cell():
                self._shell.run_cell_magic("ddp_train", write_line(replace(written.call, background=True)), written.body)
        except NbddpError as error:
            self._say(alert(str(error)))
        except Exception as error:  # noqa: BLE001 - the body is the user's code
            with self._loop.in_cell():
                self._shell.showtraceback()
            self._say(alert(f"the body of the cell raised {type(error).__name__}: {error}"))
        else:
            run = last_run()
            assert run is not None
            self._follow(run)

    def _follow(self, run: Run) -> None:
        self._run = run
        told = (run.state, monotonic())
        self._say(self._said(run, run.follower.state))

        def listen(state: RunState) -> None:
            nonlocal told
            if self._run is run and (state.state != told[0] or monotonic() - told[1] >= PERIOD_S):
                told = (state.state, monotonic())
                self._say(self._said(run, state))
            if state.done:
                self._ended()

        run.follower.add_listener(listen)

    def _said(self, run: Run, state: RunState) -> str:
        """How far the run is, and where to find it; a page that was loaded later has no view of it below."""
        short = short_id(run.id)
        bound = next((name for name, value in list(self._shell.user_ns.items()) if value is run and not name.startswith("_")), "")
        if state.done:
            text = f"run {run.id} has {state.state if state.state != 'stopped' else 'been stopped'}"
            where = f"its card is below, %ddp_attach {short} shows it anywhere" if self._loop.page_is_there else f"%ddp_attach {short} shows its card"
            loads = f"; {bound}.load() brings its weights" if bound and state.state != "failed" else ""
            return quiet(f"{text}: {where}{loads}")
        text = f"run {run.id} goes on in the background ({progress_text(state)})"
        if self._loop.page_is_there:
            return quiet(f"{text}: its view is below, %ddp_attach {short} opens it anywhere, %ddp_stop {short} stops it")
        return quiet(f"{text}: this page was loaded after the panel and has no view of it; %ddp_attach {short} opens one, %ddp_stop {short} stops it")
