"""Outlet: how much of a view goes to the browser, and when.

At most 4 messages and 60 kB in any second, however fast the run goes and however many parts the view has: the part that is overdue most goes first.
Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import math
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbddp.state import RunState

MESSAGES_PER_S = 4
BYTES_PER_S = 60_000
EARLY_S = 0.15
"""The follower looks for news every 0.3 s: a part that is due between two looks is sent at the nearer one, or a second would become 1.2 s."""
OVERHEAD_BYTES = 1_000
"""Of a message: header, parent header and the envelope of the trait."""


class Part(Protocol):
    """A part of the view whose content is one trait of one widget."""

    @property
    def period_s(self) -> float:
        """Seconds from one look at it to the next, at least."""

    def render(self, state: RunState) -> str | None:
        """The content now; None where it is the same as before."""

    def show(self, content: str) -> None:
        """Set the trait."""


class Outlet:
    """Sends the parts of a view that are due, within the limits."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._due: dict[Part, float] = dict.fromkeys(parts, -math.inf)
        self._sent: deque[tuple[float, int]] = deque()

    def hurry(self, part: Part) -> None:
        """Let a part be the next: the user waits for it."""
        self._due[part] = -math.inf

    def send(self, state: RunState) -> None:
        """Show what is due."""
        now = monotonic()
        while self._sent and now - self._sent[0][0] >= 1:
            self._sent.popleft()
        for part, due in sorted(((part, due) for part, due in self._due.items() if due <= now + EARLY_S), key=lambda entry: entry[1]):
            if len(self._sent) >= MESSAGES_PER_S:
                return
            self._due[part] = now + part.period_s  # before it is rendered: it may be hurried meanwhile
            content = part.render(state)
            if content is not None:
                size = len(content.encode()) + content.count('"') + content.count("\n") + OVERHEAD_BYTES  # the last two are escaped
                if self._sent and sum(sent for _, sent in self._sent) + size > BYTES_PER_S:
                    self._due[part] = due
                    return  # smaller parts would keep the room from it
                part.show(content)
                self._sent.append((monotonic(), size))
