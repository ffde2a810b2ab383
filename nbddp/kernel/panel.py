"""The configuration panel: every option with its control, what the options come to, and the cell that asks for them.

Runs in the kernel's main thread, but for what a change says at once, which comes from where it arrives. The options are checked a moment after a change,
with whatever else was changed by then; nothing is printed and no Output widget is entered.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import display

from nbddp.errors import ConfigError
from nbddp.kernel import panel_figures
from nbddp.kernel.completion import suggestions
from nbddp.kernel.inputs import take_data, take_model
from nbddp.kernel.options import train_options
from nbddp.kernel.panel_call import CallControls
from nbddp.kernel.panel_check import BODY, Checked, Checker
from nbddp.kernel.panel_controls import Options, Shared
from nbddp.kernel.panel_fill import Draft, cell_of
from nbddp.kernel.panel_loop import MainLoop
from nbddp.kernel.panel_rest import Rest, beside
from nbddp.kernel.panel_run import Starter
from nbddp.kernel.panel_style import STYLE, alert, coded, error_line, line, quiet
from nbddp.kernel.subshell import hear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from IPython.core.interactiveshell import InteractiveShell

CHECK_S = 0.1
"""The least time between two checks while one types; a few kilobytes each time."""
SOON_S = 0.02
"""How long after the first change they begin: what is typed together is checked together."""

_WRITTEN = "The same as a cell, to copy; %ddp_config --cell in a cell puts it into the next one"
_BUSY_CHECK = "a cell is running: what you change is checked when it has ended"
_BUSY_RUN = "a cell is running: the run starts when it has ended"


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
        self._loop, self._rest = MainLoop(shell), Rest()
        self._loop.remember_cell()
        self._checker = Checker(names, lambda: self._loop.call(self._changed))
        take_model(self._checker.look_up("MODEL", draft.call.model))
        data = take_data(self._checker.look_up("DATA", draft.call.data), training=True)
        self._sample: tuple[int, int | None] = (0, None)
        self._checking, self._begun, self._took_s = False, 0.0, 0.0
        self._shown = False
        self._make(data.options)
        self._options.fill(draft.call.values)
        self._call.fill(draft)
        self._starter = Starter(shell, self._loop, self._say, lambda: self._loop.call(self._changed))
        self.check()
        self._observe()

    def _make(self, brought: Mapping[str, object]) -> None:
        shared = Shared()
        self._head, self._figures, self._said = shared.html("nb-head"), shared.html("nb-figures"), shared.html("nb-said")
        self._options = Options(brought, self._suggested, shared)
        self._call = CallControls(self._suggested, shared)
        self._run = shared.button("Run", "Train in the background; the view opens below", "primary")
        self._write = shared.button("Write cell", "Show the %%ddp_train cell that asks for these options")
        self._cell = shared.control(ipywidgets.Textarea, "cell", _WRITTEN, rows=3)
        self._cell_note = shared.html("nb-below")
        self._written = shared.box([self._cell, self._cell_note], "nb-call", "nb-none")
        rows = [
            shared.html("nb-none", value=STYLE),
            self._head,
            self._options.widget,
            self._figures,
            self._call.widget,
            shared.box([self._run, self._write], "nb-buttons"),
            self._said,
            self._written,
        ]
        self._widget = ipywidgets.VBox(rows, _dom_classes=("nbddp-panel",))

    def _suggested(self, name: str) -> list[str]:
        return suggestions(train_options()[name], self._names())

    def _observe(self) -> None:
        for name, field in self._options.fields.items():
            field.widget.observe(lambda change, name=name: self._typed(name, change["new"]), "value")
        for name, control in self._call.controls.items():
            control.observe(lambda change, name=name: self._typed(name, change["new"]), "value")
        self._run.on_click(lambda _button: self._pressed())
        self._write.on_click(lambda _button: self._loop.call(self._show_cell, lambda: self._say(quiet(_BUSY_CHECK))))
        for widget in _below(self._widget):
            if isinstance(widget, ipywidgets.ValueWidget | ipywidgets.Button | ipywidgets.Tab) and not isinstance(widget, ipywidgets.HTML):
                hear(widget)
        self._shell.events.register("post_run_cell", self._after_cell)

    def show(self) -> None:
        """Display it below the running cell, where its runs will appear as well."""
        self._rest.show(self.draft())
        display(beside(self._widget._repr_mimebundle_()), raw=True)
        self._shown = True

    def close(self) -> None:
        """Close its widgets: its output is gone."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)
        for widget in dict.fromkeys(_below(self._widget)):
            widget.close()

    @property
    def place(self) -> tuple[str, str]:
        """The cell of the notebook that it stands in, empty where the front end does not say so, and the execution of it."""
        return self._loop.place

    def draft(self) -> Draft:
        """What it shows now."""
        return self._call.put_into(replace(self._draft, call=replace(self._draft.call, values=self._options.values())))

    # -- what the options come to

    def _typed(self, name: str, value: str | bool) -> None:
        """A change, in the thread that it arrives in: what is wrong with it by itself is said at once, also while a cell runs."""
        if name in self._options.fields:
            field = self._options.fields[name]
            said = field.value
            if said is not None and (error := self._checker.error_of(name, said)):
                field.note.say(error)
        elif name == "as" and str(value).strip() and (error := self._checker.error_of(name, str(value).strip())):
            self._call.say_of(name, error)
        self._changed()

    def _changed(self) -> None:
        if not self._checking:
            self._checking = True
            since_s = time.monotonic() - self._begun
            self._loop.call(self.check, lambda: self._say(quiet(_BUSY_CHECK)), after_s=max(SOON_S, CHECK_S - since_s, 3 * self._took_s - since_s))

    def _after_cell(self, _result: object) -> None:
        """Names may stand for other objects now, and objects may have changed."""
        self._checker.decisions.forget()
        self._changed()

    def check(self) -> None:
        """Check what it shows now, and show what comes of it."""
        self._checking, self._begun = False, time.monotonic()
        if self._said.value == _said(quiet(_BUSY_CHECK)):
            self._say("")
        draft = self.draft()
        self._checked = checked = self._checker.check(draft)
        self._options.say(checked.errors)
        self._call.say(checked.errors)
        self._head.value = self._head_text(checked)
        self._figures.value = self._figures_text(checked)
        if "nb-none" not in self._written._dom_classes:
            self._write_cell(draft)
        if self._shown and not checked.errors:
            with self._loop.in_cell():
                self._rest.update(draft)
        self._took_s = time.monotonic() - self._begun

    def _figures_text(self, checked: Checked) -> str:
        parts = []
        if (prepared := checked.prepared) is not None:
            parts.append(panel_figures.tiles(prepared, self._checker.decisions.layers(prepared.model), self._sample_bytes(checked), checked.wrong))
        if checked.outlined is not None:
            nproc = None if checked.prepared is None else checked.prepared.plan.nproc
            parts.append(panel_figures.table(panel_figures.what_if(checked.outlined, self._checker.machine), nproc, checked.unread))
        return "".join(parts) or quiet("no figures: what is wrong stands above")

    def _sample_bytes(self, checked: Checked) -> int | None:
        """Size of a sample, looked at once for each dataset, and only where loader workers would hold some: making one may take long."""
        assert checked.prepared is not None
        if not checked.prepared.plan.workers_per_rank:
            return None
        dataset = checked.prepared.datasets["train"][1]
        if self._sample[0] != id(dataset):
            self._sample = (id(dataset), panel_figures.sample_bytes(dataset))
        return self._sample[1]

    def _head_text(self, checked: Checked) -> str:
        call, prepared = self._draft.call, checked.plan
        title = f"<div><b>{coded(call.model)}</b> {quiet(f'trained on {call.data}')}</div>"
        if prepared is None:
            return title + "".join(error_line(error) for name, error in checked.errors.items() if name != BODY)
        remarks = [*prepared.remarks, *checked.remarks]
        return "".join([title, line(coded(prepared.plan_line())), *(line(quiet(remark)) for remark in remarks)])

    # -- what the buttons do

    def _show_cell(self) -> None:
        self._write_cell(self.draft())
        self._written.remove_class("nb-none")

    def _write_cell(self, draft: Draft) -> None:
        try:
            text = cell_of(draft)
        except ConfigError:  # which stands beside its control
            text = ""
        self._cell.rows = max(3, text.count("\n") + 2)
        self._cell.value = text
        refused = next(iter(self._checked.errors.values()), "")
        wrong = "" if text and not refused else f"as it stands, it is refused: {refused}" if text else "there is no cell: an option is wrong"
        self._cell_note.value = f'<div class="nb-note">{alert(wrong) or quiet(_WRITTEN)}</div>'

    def _pressed(self) -> None:
        """Run was pressed; a second press would start a second run."""
        self._run.disabled = True
        self._loop.call(self._start, lambda: self._say(quiet(_BUSY_RUN)))

    def _start(self) -> None:
        try:
            self._starter.start(self.draft())
        finally:
            self._run.disabled = False
        self._changed()

    def _say(self, html: str) -> None:
        self._said.value = _said(html)


def _said(html: str) -> str:
    return f'<div class="nb-wrap">{html}</div>' if html else ""


def _below(widget: Any) -> Iterator[Any]:
    """A widget and everything that it is made of."""
    yield widget
    yield from (part for name in ("layout", "style") if (part := getattr(widget, name, None)) is not None)
    for child in getattr(widget, "children", ()):
        yield from _below(child)
