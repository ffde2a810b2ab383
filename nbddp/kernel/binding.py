"""What a magic takes from the notebook's names and puts among them, and how it speaks.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nbddp.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.request import Bind

DEFAULT_NAME = "run"


def say(line: str) -> None:
    """Tell the user of a cell something in one line."""
    print(visible(line))  # noqa: T201 - the output of a magic


def names_of(shell: InteractiveShell, local_ns: Mapping[str, Any] | None) -> dict[str, Any]:
    """Names that a line may use: the notebook's, and the local ones where a function holds the magic."""
    return {**shell.user_ns, **(local_ns or {})}


def is_bound(name: str, value: object) -> bool:
    """Whether a name of the notebook, where there is one, still stands for an object, or for what wraps it."""
    from nbddp.wrappers import inside

    ipython = sys.modules.get("IPython")  # a script has none, and is not to import it
    shell = None if ipython is None else ipython.get_ipython()
    there = value if shell is None else shell.user_ns.get(name, value)
    while there is not value and (inner := inside(there)) is not None:
        there = inner[1]
    return there is value


def binder(shell: InteractiveShell, name: str | None) -> Bind:
    """Return what binds a run to a name of the notebook (`run` where none was asked for); a variable that is no run stays, and that is said."""
    target = name or DEFAULT_NAME

    def bind(run: object) -> None:
        there = shell.user_ns.get(target, run)
        if isinstance(there, type(run)):
            shell.user_ns[target] = run
            run.called = target  # type: ignore[attr-defined]  # a Run, which this module does not import
        else:
            say(f"{target} is a variable of yours ({type(there).__name__}) and stays; --as NAME names the run, nbddp.last_run is it")

    return bind
