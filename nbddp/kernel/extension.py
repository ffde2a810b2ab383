"""`%load_ext nbddp`: registers magics and completion and has a supervisor warm itself up; `%unload_ext` takes all of it back.

Runs in the kernel. Loading must be quick and silent: imports neither torch nor matplotlib nor the widgets.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nbddp.kernel.cells import RunningCells
from nbddp.kernel.completion import matcher
from nbddp.kernel.config_magic import ConfigMagics
from nbddp.kernel.magics import TrainMagics
from nbddp.kernel.run_magics import RunMagics
from nbddp.launch import local

if TYPE_CHECKING:
    from IPython.core.completer import Matcher
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics


@dataclass(frozen=True, slots=True)
class _Loaded:
    cells: RunningCells
    matcher: Matcher
    magics: tuple[Magics, ...]


_loaded: WeakKeyDictionary[InteractiveShell, _Loaded] = WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Register everything with a shell; a second time, anew."""
    unload(shell)
    cells = RunningCells(shell)
    loaded = _Loaded(cells, matcher(shell), (TrainMagics(shell, cells), RunMagics(shell), ConfigMagics(shell)))
    shell.events.register("pre_run_cell", cells.started)
    shell.events.register("post_run_cell", cells.ended)
    shell.register_magics(*loaded.magics)
    shell.Completer.custom_matchers.append(loaded.matcher)
    shell.input_transformers_cleanup.insert(0, without_body)
    _loaded[shell] = loaded
    with contextlib.suppress(OSError):  # no process can be started: the first run will say so
        local.standby.warm()


def unload(shell: InteractiveShell) -> None:
    """Take back what `load` registered; nothing where it wasn't. A standby supervisor stays until the kernel ends."""
    loaded = _loaded.pop(shell, None)
    if loaded is None:
        return
    shell.events.unregister("pre_run_cell", loaded.cells.started)
    shell.events.unregister("post_run_cell", loaded.cells.ended)
    manager = shell.magics_manager
    for magics in loaded.magics:
        for kind, names in magics.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
        manager.registry.pop(type(magics).__name__, None)
    if without_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(without_body)
    if loaded.matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(loaded.matcher)


def without_body(lines: list[str]) -> list[str]:
    """Make a line magic of ``%%ddp_train`` with nothing below it, which IPython would refuse before we could show the help or say what is missing."""
    text = "".join(lines).strip()
    if "\n" in text or not text.startswith(("%%ddp_train", "%%ddp_plan")):
        return lines
    return [text.removeprefix("%") + "\n"]
