"""The advice about a run as a list that displays what to write.

Runs in the kernel, in a terminal as in a notebook. Imports no Jupyter.
"""

from __future__ import annotations

from nbddp.advice import Advice
from nbddp.kernel import markup
from nbddp.tabular import FONT

NOTHING = "no advice: nothing is to be gained that the timings of the steps would show"


class AdviceList(list[Advice]):
    """Most important first; each has `rule`, `text` and `option`."""

    def __repr__(self) -> str:
        return "\n".join(part.text + ("" if part.option is None else f"\n  write: {part.option}") for part in self) or NOTHING

    def _repr_html_(self) -> str:
        return markup.div(markup.advice(self) if self else markup.quiet(NOTHING), f"{FONT};max-width:680px")
