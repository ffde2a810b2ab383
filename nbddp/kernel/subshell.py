"""How clicks and changes in the browser reach the kernel while a cell blocks its main thread.

JupyterLab sends the messages of widgets to a subshell, which has a thread of its own. ipykernel 7.4 sends them on to the shell that published on the
comm last, which for a widget that a cell or a thread of ours sets is the main one. Runs in the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython import get_ipython

if TYPE_CHECKING:
    from ipywidgets import Widget


def hear(widget: Widget) -> None:
    """Let messages to this widget go where the front end addressed them, whoever published on its comm last.

    Deleting `_reply_subshell_id` after each change of a trait has the same effect, except for a click that arrives in between.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = _as_addressed


def _as_addressed(_data: object, addressed: str | None) -> str | None:
    return addressed


def has_subshell() -> bool:
    """Whether a front end has opened a subshell: without one, messages wait until the main thread is free."""
    kernel: Any = getattr(get_ipython(), "kernel", None)
    manager = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
    return manager is not None and bool(manager.list_subshell())
