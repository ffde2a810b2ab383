"""The configuration panel: every option with its control, what the options come to, and the cell that asks for them.

Runs in the kernel's main thread. A change is checked a moment after it, with whatever else was changed by then; nothing is printed and no Output widget is
entered. **Run** runs the written cell in the background, as if it stood in the panel's own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import display

from nbddp.errors import ConfigError, NbddpError
from nbddp.kernel import markup, panel_figures
from nbddp.kernel.body import EXAMPLE
from nbddp.kernel.cell_writer import write_line
from nbddp.kernel.completion import suggestions
from nbddp.kernel.inputs import take_data, take_model
from nbddp.kernel.options import train_options
from nbddp.kernel.panel_check import BODY, EXPRESSIONS, Checked, Checker
from nbddp.kernel.panel_controls import STYLE, Note, Options, Shared, alert
from nbddp.kernel.panel_fill import Draft, cell_of, told_only
from nbddp.kernel.panel_loop import MainLoop
from nbddp.kernel.runs import last_run
from nbddp.tabular import FONT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from IPython.core.interactiveshell import InteractiveShell

CHECK_AFTER_S = 0.3
"""How long after a change the options are checked, at most three times a second: a dozen kilobytes each time."""

_BODY_HELP = "Python below the line of %%ddp_train: loss, or training_step(model, batch), and other hooks; it runs when the cell does"
_WRITTEN = "The same as a cell, to copy; %ddp_config --cell in a cell puts it into the next one"


class Panel:
    """A panel for a model and its data.

    Args:
        shell: the notebook's.
        draft: what it shows first.
        names: the notebook's names now.

    Raises:
        ConfigError, BundleError: where MODEL or DATA are nothing that can be trained, or trained on.
    """

    def __init__(self, shell: InteractiveShell, draft: Draft, names: Callable[[], Mapping[str, Any]]) -> None:
        self._shell, self._draft, self._names = shell, draft, names
        self._loop = MainLoop(shell)
        self._checker = Checker(names)
        take_model(self._checker.look_up("MODEL", draft.call.model))
        data = take_data(self._checker.look_up("DATA", draft.call.data), training=True)
        self._sample = panel_figures.sample_bytes(data.dataset)
        self._checking, self._check_s = False, 0.0
        self._tiles = self._table = ""
        self._make(data.options)
        self._options.fill(draft.call.values)
        for name, text in (("val", draft.call.val), ("loss", draft.call.loss), (BODY, draft.body)):
            self._texts[name].value = text or ""
        self._observe()
        self.check()

    def _make(self, brought: Mapping[str, object]) -> None:
        shared = Shared()
        full = ipywidgets.Layout(width="100%", margin="0")

        def html(value: str = "", **layout: str) -> Any:
            return ipywidgets.HTML(value, layout=ipywidgets.Layout(**layout) if layout else full, style=shared.html_style)

        self._head, self._figures, self._said = html(), html(), html()
        self._options = Options(brought, self._suggested, shared)
        self._texts = {name: self._expression(name, hint, shared) for name, hint in zip(EXPRESSIONS, ("none", "in the body"), strict=True)}
        self._texts[BODY] = ipywidgets.Textarea(
            description="body of the cell", placeholder=EXAMPLE, rows=5, layout=shared.wide, style=shared.text_style, tooltip=_BODY_HELP
        )
        self._notes = {name: Note(_BODY_HELP if name == BODY else train_options()[name].help, shared) for name in self._texts}
        self._run = ipywidgets.Button(description="Run", tooltip="Train in the background; the view opens below", button_style="primary")
        self._write = ipywidgets.Button(description="Write cell", tooltip="Show the %%ddp_train cell that asks for these options")
        hidden = ipywidgets.Layout(width="100%", margin="4px 0", display="none")
        self._cell = ipywidgets.Textarea(description="cell", rows=6, layout=hidden, style=shared.text_style, tooltip=_WRITTEN)
        expressions = [part for name in EXPRESSIONS for part in (self._texts[name], self._notes[name].widget)]
        rows = [
            html(STYLE, margin="0", height="0"),
            self._head,
            self._options.widget,
            self._figures,
            ipywidgets.GridBox(expressions, layout=shared.grid),
            self._texts[BODY],
            self._notes[BODY].widget,
            ipywidgets.HBox([self._run, self._write], layout=ipywidgets.Layout(margin="6px 0", flex_flow="row wrap")),
            self._said,
            self._cell,
        ]
        self._widget = ipywidgets.VBox(rows, layout=ipywidgets.Layout(width="100%", max_width="1080px", padding="2px 0", overflow="hidden"))
        self._widget.add_class("nbddp-panel")

    def _expression(self, name: str, hint: str, shared: Shared) -> Any:
        """A text for an expression of the notebook, which is run to look at it: not before it is complete."""
        return ipywidgets.Combobox(
            description=name,
            options=self._suggested(name),
            placeholder=hint,
            tooltip=train_options()[name].help,
            continuous_update=False,
            layout=shared.control,
            style=shared.text_style,
        )

    def _suggested(self, name: str) -> list[str]:
        return suggestions(train_options()[name], self._names())

    def _observe(self) -> None:
        for widget in (*self._options.controls, *self._texts.values()):
            widget.observe(lambda _change: self._changed(), "value")
        self._run.on_click(lambda _button: self._loop.call(self._start))
        self._write.on_click(lambda _button: self._loop.call(self._show_cell))

    def show(self) -> None:
        """Display it below the running cell, where its runs will appear as well."""
        self._loop.remember_cell()
        plain = f"configuration panel of {self._draft.call.model} and {self._draft.call.data}"
        display({**self._widget._repr_mimebundle_(), "text/plain": plain, "text/html": markup.div(markup.quiet(plain), FONT)}, raw=True)

    def draft(self) -> Draft:
        """What it shows now."""
        val, loss = (self._texts[name].value.strip() or None for name in EXPRESSIONS)
        return replace(self._draft, call=replace(self._draft.call, values=self._options.values(), val=val, loss=loss), body=self._texts[BODY].value)

    # -- what the options come to

    def _changed(self) -> None:
        if not self._checking:
            self._checking = True
            self._loop.call_later(max(CHECK_AFTER_S, 2 * self._check_s), self.check)  # typing goes on where a check takes long

    def check(self) -> None:
        """Check what it shows now, and show what comes of it."""
        self._checking = False
        begun = time.monotonic()
        checked = self._checker.check(self.draft())
        self._options.say(checked.errors)
        for name, note in self._notes.items():
            note.say(checked.errors.get(name, ""))
        self._head.value = self._head_text(checked)
        self._show_figures(checked)
        if self._cell.layout.display is None:
            self._show_cell()
        self._check_s = time.monotonic() - begun

    def _show_figures(self, checked: Checked) -> None:
        """Show the figures; where there are none, those of the last options that came to something stay, dimmed."""
        if checked.prepared is not None:
            self._tiles = panel_figures.tiles(checked.prepared, self._sample)
        if checked.outlined is not None:
            nproc = None if checked.prepared is None else checked.prepared.plan.nproc
            self._table = panel_figures.table(panel_figures.what_if(checked.outlined, self._checker.machine), nproc)
        parts = [(self._tiles, checked.prepared), (self._table, checked.outlined)]
        self._figures.value = "".join(html if fresh is not None else markup.tag("div", html, "opacity:.5") for html, fresh in parts)

    def _head_text(self, checked: Checked) -> str:
        call, prepared = self._draft.call, checked.prepared
        title = markup.div(f"{markup.tag('b', escape(call.model))} {markup.quiet(f'trained on {call.data}')}")
        if prepared is None:
            wrong = [markup.note(error, markup.ERROR) for name, error in checked.errors.items() if name != BODY]
            return markup.div(title + "".join(wrong), FONT)
        lines = [markup.div(escape(prepared.plan_line()), "margin-top:3px;overflow-wrap:anywhere")]
        lines += [markup.div(markup.quiet(remark), "overflow-wrap:anywhere") for remark in prepared.remarks]
        return markup.div(title + "".join(lines), FONT)

    # -- what the buttons do

    def _show_cell(self) -> None:
        try:
            text, said = cell_of(self.draft()), markup.quiet(_WRITTEN)
        except ConfigError as error:
            text, said = "", alert(str(error))
        self._cell.value = text
        self._cell.layout.display = None
        self._say(said)

    def _start(self) -> None:
        self._run.disabled = True  # a second press would start a second run
        try:
            draft = told_only(self.draft())
            with self._loop.in_cell():
                self._shell.run_cell_magic("ddp_train", write_line(replace(draft.call, background=True)), draft.body)
            run = last_run()
            assert run is not None
            short = run.id.rpartition("-")[2]
            said = markup.quiet(f"run {run.id} goes on in the background: its view is below, %ddp_attach {short} opens it anywhere, %ddp_stop {short} stops it")
        except NbddpError as error:
            said = alert(str(error))
        except Exception as error:  # noqa: BLE001 - the body is the user's code
            with self._loop.in_cell():
                self._shell.showtraceback()
            said = alert(f"the body of the cell raised {type(error).__name__}: {error}")
        finally:
            self._run.disabled = False
        self._say(said)

    def _say(self, html: str) -> None:
        self._said.value = markup.div(html, FONT)
