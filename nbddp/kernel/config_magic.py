"""%ddp_config: the configuration panel, and the cell that it stands for.

Runs in the kernel or in terminal IPython. Loading the extension imports this module, so that whatever is large is imported where the magic is called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand

from nbddp.errors import ConfigError
from nbddp.kernel.binding import names_of, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.panel import Panel
    from nbddp.kernel.panel_fill import Draft, Source

USAGE = """\
%ddp_config MODEL DATA [options]          the panel: every option, what the options come to, Run and Write cell
%ddp_config --from RUN [MODEL DATA]       filled from a run (a variable, its id or directory, latest) or from a settings file
%ddp_config MODEL DATA [options] --cell   put the %%ddp_train cell of these options into the next cell
%ddp_config [--cell]                      the last panel as it is: opened again, or as the next cell
The options are those of %%ddp_train; %%ddp_train -h lists them."""

NO_PANEL = (
    "the panel needs a notebook, with widgets. Here: %ddp_config MODEL DATA [options] --cell writes the cell, "
    "%ddp_plan MODEL DATA [options] says what it would do, %%ddp_train -h lists the options"
)


@magics_class
class ConfigMagics(Magics):
    """%ddp_config."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._panel: Panel | None = None
        self._panels: dict[str, list[Panel]] = {}

    @line_magic
    @no_var_expand
    @needs_local_scope
    def ddp_config(self, line: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """%ddp_config MODEL DATA [options of %%ddp_train]: a panel with every option, what the options come to, Run and Write cell.

        --from RUN fills it from a run (a variable that holds one, its id or its directory) or from a settings file; MODEL and DATA are the run's then.
        --cell puts the %%ddp_train cell that it stands for into the next cell: of this line, or without MODEL and DATA of the last panel.
        """
        __tracebackhide__ = True
        from nbddp.kernel.line import parse, uncommented
        from nbddp.kernel.names import expand
        from nbddp.kernel.panel_fill import draft

        names = names_of(self._shell, local_ns)
        rest, cell, from_ = _taken_out(expand(uncommented(line), names))
        source, names_of_source = self._source(from_, rest, names)
        rest = f"{names_of_source} {rest}"
        invocation = parse(rest, "%ddp_config")
        if invocation is None:
            say(USAGE)
            return
        if invocation.dry_run:
            message = "--dry-run: a panel shows the plan and starts nothing by itself; leave it out"
            raise ConfigError(message)
        if invocation.config is not None:
            if from_ is not None:
                message = f"--from {from_} and --config {invocation.config}: keep one of the two"
                raise ConfigError(message)
            source = replace(source, options=invocation.config)
        filled = draft(source, invocation, names)
        if cell:
            from nbddp.kernel.panel_fill import cell_of

            self._shell.set_next_input(cell_of(filled))
            return
        self._open(filled, local_ns)

    def _source(self, from_: str | None, line: str, names: Mapping[str, Any]) -> tuple[Source, str]:
        """What the panel is filled from, and MODEL and DATA of that where the line has none: what --from names, or without both the last panel."""
        from nbddp.kernel.cell_writer import Call, write_line
        from nbddp.kernel.line import split
        from nbddp.kernel.names import expand
        from nbddp.kernel.options import train_options
        from nbddp.kernel.panel_fill import Source, source_of

        found = split(line, train_options(), "%ddp_config")
        source = Source() if from_ is None else source_of(from_, names)
        if found.words or found.help:
            return source, ""
        if from_ is None and self._panel is not None:
            source = Source.of(self._panel.draft())
        call = source.call
        return source, expand(write_line(Call(call.model, call.data)), {}) if call.model and call.data else ""

    def _open(self, filled: Draft, local_ns: Mapping[str, Any] | None) -> None:
        from nbddp.kernel.view import in_kernel

        if not in_kernel():
            say(NO_PANEL)
            return
        from nbddp.kernel.panel import Panel

        panel = Panel(self._shell, filled, lambda: names_of(self._shell, local_ns))
        cell, _ = panel.place
        panels = self._panels.setdefault(cell, []) if cell else []
        for gone in [other for other in panels if other.place != panel.place]:  # the output of a cell that runs again is gone
            gone.close()
            panels.remove(gone)
        panels.append(panel)
        panel.show()
        self._panel = panel


def _taken_out(line: str) -> tuple[str, bool, str | None]:
    """The line without --cell and --from, whether --cell was there, and the value of --from.

    Raises:
        ConfigError: where the value is missing, or --from is given twice.
    """
    from nbddp.kernel.line import scan

    words, end, _ = scan(line)
    rest, cell, from_ = "", False, None
    queue = list(zip(words, [*(word.start for word in words[1:]), end], strict=False))
    while queue:
        word, word_end = queue.pop(0)
        flag, equals, value = word.text.partition("=")
        if word.is_option and word.text == "--cell":
            cell = True
        elif word.is_option and flag == "--from":
            if from_ is not None:
                message = "--from is given twice: keep one"
                raise ConfigError(message)
            if not equals and queue and not queue[0][0].is_option:
                value = queue.pop(0)[0].text
            if not value:
                message = "--from needs a value (RUN or FILE): a variable that holds a run, its id or directory, or a settings file"
                raise ConfigError(message)
            from_ = value
        else:
            rest += line[word.start : word_end]
    return rest, cell, from_
