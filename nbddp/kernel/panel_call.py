"""The controls of what belongs to a call of the magic, beside the options: validation data, loss, name, note, background, and the body of the cell.

Not among them: --config and --freeze-rb-layer fill the panel, --no-load is `load none`, --dry-run is what a panel shows. Runs in the kernel's main thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ipywidgets

from nbddp.kernel.body import EXAMPLE
from nbddp.kernel.options import train_options
from nbddp.kernel.panel_check import BODY, EXPRESSIONS
from nbddp.kernel.panel_controls import Note, Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nbddp.kernel.panel_fill import Draft

BODY_LABEL = "body of the cell"
_HINTS = {"val": "none", "loss": "in the body", "as": "run", "note": "none"}
_BODY_HELP = "Python below the line of %%ddp_train: loss, or training_step(model, batch), and other hooks; it runs when the cell does"
_BACKGROUND_HELP = "the written cell returns at once, as Run always does; run.wait() or run.load() brings the weights"


class CallControls:
    """The controls, of which `widget` holds all.

    Args:
        suggest: words to offer for an option.
    """

    def __init__(self, suggest: Callable[[str], Iterable[str]], shared: Shared) -> None:
        self.controls: dict[str, Any] = {}
        self._notes: dict[str, Note] = {}
        for name, hint in _HINTS.items():
            if name in EXPRESSIONS:  # looked at by running it: not before it is complete
                kind, traits = ipywidgets.Combobox, {"options": tuple(suggest(name)), "continuous_update": False}
            else:
                kind, traits = ipywidgets.Text, {}
            self._add(name, train_options()[name].help, shared, kind, placeholder=hint, **traits)
        self._add("background", _BACKGROUND_HELP, shared, ipywidgets.Checkbox, value=False, indent=True)
        rows = shared.box([part for name in self.controls for part in (self.controls[name], self._notes[name].widget)], "nb-grid")
        self.controls[BODY] = shared.control(ipywidgets.Textarea, BODY_LABEL, _BODY_HELP, placeholder=EXAMPLE, rows=5)
        self._notes[BODY] = Note(_BODY_HELP, shared, "nb-below")
        self.widget = ipywidgets.VBox([shared.html(value="<b>This call</b>"), rows, self.controls[BODY], self._notes[BODY].widget], _dom_classes=("nb-call",))

    def _add(self, name: str, help_: str, shared: Shared, kind: type[Any], **traits: object) -> None:
        self.controls[name] = shared.control(kind, name, help_, **traits)
        self._notes[name] = Note(help_, shared)

    def fill(self, draft: Draft) -> None:
        """Show what belongs to the call of a draft."""
        call = draft.call
        for name, text in (("val", call.val), ("loss", call.loss), ("as", call.bind), ("note", call.note), (BODY, draft.body)):
            self.controls[name].value = text or ""
        self.controls["background"].value = call.background

    def put_into(self, draft: Draft) -> Draft:
        """A draft with what the controls say."""
        val, loss, bind, note = (self.controls[name].value.strip() or None for name in _HINTS)
        call = replace(draft.call, val=val, loss=loss, bind=bind, note=note, background=self.controls["background"].value)
        return replace(draft, call=call, body=self.controls[BODY].value)

    def say(self, errors: Mapping[str, str]) -> None:
        """Show what is wrong beside its control."""
        for name, note in self._notes.items():
            note.say(errors.get(name, ""))

    def say_of(self, name: str, error: str) -> None:
        """Show what is wrong with one of them."""
        self._notes[name].say(error)
