"""The widgets of a configuration panel's options: a control with its name as label, and beside it the help or what is wrong with it.

Runs in the kernel's main thread. Layouts and styles are shared: a panel has some seventy options, and each widget is a message to the browser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import HTMLStyle, TextStyle

from nbddp.kernel.panel_fields import Control, controls, entered, shown
from nbddp.kernel.panel_style import LABEL_WIDTH, alert, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

WRONG = "\u2717"
"""Stands in the name of a tab before the number of its options that are wrong: short, so that the tabs stay in their rows."""


class Shared:
    """Layout and styles that many widgets have, and what is made with them. What they look like is in the style sheet, by class."""

    def __init__(self) -> None:
        self._layout = ipywidgets.Layout()
        self._styles = {
            ipywidgets.Checkbox: CheckboxStyle(description_width=LABEL_WIDTH),
            ipywidgets.Dropdown: DescriptionStyle(description_width=LABEL_WIDTH),
            ipywidgets.HTML: HTMLStyle(),
        }
        self._text = TextStyle(description_width=LABEL_WIDTH)

    def control(self, kind: type[Any], name: str, help_: str, **traits: object) -> Any:
        """A control whose label is its name."""
        return kind(description=name, tooltip=help_, layout=self._layout, style=self._styles.get(kind, self._text), **traits)

    def html(self, *names: str, value: str = "") -> Any:
        return ipywidgets.HTML(value, layout=self._layout, style=self._styles[ipywidgets.HTML], _dom_classes=names)

    def box(self, children: Iterable[Any], *names: str) -> Any:
        return ipywidgets.Box(tuple(children), layout=self._layout, _dom_classes=names)

    def button(self, name: str, tooltip: str, style: str = "") -> Any:
        return ipywidgets.Button(description=name, tooltip=tooltip, button_style=style, layout=self._layout)


class Note:
    """What stands beside a control: its help, below what is wrong with it."""

    def __init__(self, help_: str, shared: Shared, *names: str) -> None:
        self._help, self.error = help_, ""
        self.widget = shared.html(*names, value=self._text())

    def say(self, error: str) -> None:
        """Show what is wrong; nothing is, where it is empty."""
        if error != self.error:
            self.error = error
            self.widget.value = self._text()

    def _text(self) -> str:
        return f'<div class="nb-note">{alert(self.error)}{quiet(self._help)}</div>'


class Field:
    """One option: its control and the note beside it."""

    def __init__(self, control: Control, suggestions: Iterable[str], shared: Shared) -> None:
        self.control = control
        self.widget = _widget(control, tuple(suggestions), shared)
        self.note = Note(control.help, shared)

    @property
    def value(self) -> str | bool | None:
        """What it says for its option; None where it leaves it out."""
        return entered(self.control, self.widget.value)

    def fill(self, value: str | bool | None) -> None:
        """Show a value; None leaves the option out."""
        self.widget.value = shown(self.control, value)


def _widget(control: Control, suggestions: tuple[str, ...], shared: Shared) -> Any:
    name, help_, disabled = control.name, control.help, not control.available
    if control.kind == "switch":
        return shared.control(ipywidgets.Checkbox, name, help_, disabled=disabled, value=control.default, indent=True)
    if control.kind == "choice":
        return shared.control(ipywidgets.Dropdown, name, help_, disabled=disabled, options=control.choices, value="")
    hint = str(control.default) or "default"
    if control.kind == "suggested":
        return shared.control(ipywidgets.Combobox, name, help_, disabled=disabled, options=suggestions, placeholder=hint, continuous_update=True)
    return shared.control(ipywidgets.Text, name, help_, disabled=disabled, placeholder=hint, continuous_update=True)


class Options:
    """The controls of all options, a tab for each group.

    Args:
        brought: options that a DataLoader sets where they are left out.
        suggest: words to offer for an option.
    """

    def __init__(self, brought: Mapping[str, object], suggest: Callable[[str], Iterable[str]], shared: Shared) -> None:
        self.fields: dict[str, Field] = {}
        self._groups: dict[str, list[Field]] = {}
        boxes = []
        for group, members in controls(brought).items():
            fields = [Field(control, suggest(control.name) if control.kind == "suggested" else (), shared) for control in members]
            self._groups[group] = fields
            self.fields |= {field.control.name: field for field in fields}
            boxes.append(shared.box([part for field in fields for part in (field.widget, field.note.widget)], "nb-grid"))
        self.widget = ipywidgets.Tab(boxes, titles=tuple(self._groups), selected_index=0)

    def values(self) -> dict[str, str | bool]:
        """What the controls say, by option; those that are left out are not there."""
        return {name: value for name, field in self.fields.items() if (value := field.value) is not None}

    def fill(self, values: Mapping[str, str | bool]) -> None:
        """Show these values and leave the other options out."""
        for name, field in self.fields.items():
            field.fill(values.get(name))

    def say(self, errors: Mapping[str, str]) -> None:
        """Show what is wrong beside its control, and how much of it is in which tab."""
        for name, field in self.fields.items():
            field.note.say(errors.get(name, ""))
        counts = {group: sum(field.control.name in errors for field in fields) for group, fields in self._groups.items()}
        self.widget.titles = tuple(f"{group} {WRONG}{count}" if count else group for group, count in counts.items())
