"""What is wrong with a hook, found where it is called. The kernel shows it as one of the public errors of `nbddp.errors`."""

from __future__ import annotations


class StepError(ValueError):
    """What a hook returned breaks its rule."""
