"""How a page that is opened while a cell blocks gets the widgets of the view.

Such a page asks what the kernel is, and for the widgets, before it knows of subshells: its messages go to the main thread, which runs the cell, and the page
says "Loading widget..." until that ends. While a blocking view is open they are answered by the thread that ipykernel receives messages in.

Runs in the kernel, in ipykernel's thread for the shell channel. Where ipykernel has no such thread, or another one than is known here, nothing is done.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from IPython import get_ipython

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

CONTROL = "jupyter.widget.control"
"""The comm target at which a page asks for the states of all widgets."""
_NEEDED = (
    "shell_channel_thread.io_loop",
    "shell_stream.on_recv",
    "shell_channel_thread_main",
    "comm_manager.comms",
    "session.feed_identities",
    "_publish_status",
)
"""What of ipykernel is used here besides the handlers of its own protocol."""


class Restoring:
    """Answers from `begin` to `end`, which may be called from any thread."""

    def __init__(self) -> None:
        self._kernel: Any = getattr(get_ipython(), "kernel", None)
        self._known = all(_has(self._kernel, path) for path in _NEEDED)

    def begin(self) -> None:
        if self._known:
            self._receive_by(self._received)

    def end(self) -> None:
        if self._known:
            self._receive_by(self._kernel.shell_channel_thread_main)

    def _receive_by(self, receiver: Callable[[Any], Awaitable[None]]) -> None:
        """A stream is set up in its own thread only."""
        self._kernel.shell_channel_thread.io_loop.add_callback(self._kernel.shell_stream.on_recv, receiver, copy=False)

    async def _received(self, frames: Sequence[Any]) -> None:
        """Answer what a page asks that was just opened; all else goes its usual way."""
        kernel, session = self._kernel, self._kernel.session
        idents, rest = session.feed_identities(frames, copy=False)
        handle = None
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a message that can't be read, about which ipykernel has its own words
            peeked = session.deserialize(rest, content=False, copy=False)
            if peeked["header"].get("subshell_id") is None:
                handle = self._handler(peeked["header"]["msg_type"], session.unpack(peeked["content"]))
        if handle is None:
            await kernel.shell_channel_thread_main(frames)
            return
        message = session.deserialize(rest, content=True, copy=False)
        kernel._publish_status("busy", "shell", parent=message)
        try:
            answer = handle(kernel.shell_stream, idents, message)
            if answer is not None:
                await answer
        finally:
            kernel._publish_status("idle", "shell", parent=message)
            kernel._publish_status("busy", "shell")  # the cell goes on, and the page is not to say that the kernel is idle

    def _handler(self, kind: str, content: dict[str, Any]) -> Any:
        kernel, comms = self._kernel, self._kernel.comm_manager
        if kind == "kernel_info_request":
            return kernel.kernel_info_request
        if kind == "comm_info_request":
            return kernel.comm_info_request
        if kind == "comm_open" and content.get("target_name") == CONTROL:
            return comms.comm_open
        if kind == "comm_msg" and getattr(comms.comms.get(content.get("comm_id")), "target_name", None) == CONTROL:
            return comms.comm_msg
        return None


def _has(thing: Any, path: str) -> bool:
    """Whether a thing has this attribute of an attribute, and neither is None."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing is not None
