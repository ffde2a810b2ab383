"""What a person sees while a run goes on: widgets in a notebook, one line in a terminal.

Runs in the kernel: opened in the thread that asked, updated by the follower's. ipywidgets and IPython are imported only where there is a front end.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbddp.config import TrainConfig
    from nbddp.kernel.card import Card
    from nbddp.kernel.stopping import Stopping
    from nbddp.rundir import RunDir
    from nbddp.state import RunState


class View(Protocol):
    """Something that shows a run, from its opening to its card."""

    def update(self, state: RunState) -> None:
        """Show a newer state; from any thread, at most 4 times a second. After `finish` nothing happens."""

    def finish(self, card: Card) -> None:
        """Put the card in the view's place, for good."""


def in_kernel() -> bool:
    """Whether this process is an IPython kernel, which has a front end that shows displays."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def open_view(
    run_dir: RunDir,
    state: RunState,
    *,
    plan_line: str,
    title: str | None = None,
    controls: Stopping | None = None,
    config: TrainConfig | None = None,
    blocking: bool = False,
) -> View:
    """Open the view that suits the front end. In a terminal the interrupt is the control, and advice comes with the card.

    Args:
        run_dir: the run.
        state: what to show first.
        plan_line: heads the view.
        title: what the run is called; default: the end of its id.
        controls: what a button of the view advances; None shows no button.
        config: the run's options, for advice; None shows none.
        blocking: whether a cell waits for the run.
    """
    if in_kernel():
        from nbddp.kernel.widget import WidgetView

        return WidgetView(run_dir, state, plan_line=plan_line, title=title, controls=controls, config=config, blocking=blocking)
    from nbddp.kernel.terminal import TerminalView

    return TerminalView(run_dir, state, plan_line=plan_line, title=title)
