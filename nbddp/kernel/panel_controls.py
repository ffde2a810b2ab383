"""The widgets of a configuration panel's options: a control with its name as label, and beside it the help or what is wrong with it.

Runs in the kernel's main thread. Layouts and styles are shared: a panel has some seventy options, and each widget is a message to the browser.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import HTMLStyle, TextStyle

from nbddp.kernel import markup
from nbddp.kernel.panel_fields import Control, controls, entered, shown
from nbddp.tabular import FONT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LABEL_WIDTH = "170px"
STYLE = """<style>
.nbddp-panel .lm-TabBar-content {flex-wrap: wrap}
.nbddp-panel.jupyter-widgets .lm-TabPanel-tabBar, .nbddp-panel .jupyter-widget-tab > .lm-TabBar {min-height: 0; max-height: none; overflow: visible}
.nbddp-panel .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab {flex: 0 1 auto; min-width: 0; max-width: none; padding: 0 8px}
.nbddp-panel .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab:focus-visible {outline: 2px solid var(--jp-brand-color1, #4285f4); outline-offset: -2px}
.nbddp-panel .widget-tab-contents, .nbddp-panel .jupyter-widget-tab-contents {padding: 8px; overflow: hidden}
.nbddp-panel textarea {font-family: var(--jp-code-font-family, monospace); font-size: 12px}
.nbddp-panel .widget-html-content {line-height: 1.4}
.nbddp-panel input:disabled, .nbddp-panel select:disabled {opacity: .55}
</style>"""


class Shared:
    """Layouts and styles that many widgets have."""

    def __init__(self) -> None:
        self.control = ipywidgets.Layout(width="100%", min_width="0", margin="0")
        self.wide = ipywidgets.Layout(width="100%", min_width="0", margin="6px 0 0")
        self.note = ipywidgets.Layout(width="100%", min_width="0", margin="0", align_self="center", overflow="hidden")
        self.text_style = TextStyle(description_width=LABEL_WIDTH)
        self.style = DescriptionStyle(description_width=LABEL_WIDTH)
        self.switch_style = CheckboxStyle(description_width=LABEL_WIDTH)
        self.html_style = HTMLStyle()
        self.grid = ipywidgets.Layout(
            grid_template_columns="minmax(330px, 5fr) minmax(0, 6fr)", grid_gap="5px 14px", align_items="center", width="100%", overflow="hidden"
        )


class Note:
    """What stands beside a control: its help, below what is wrong with it."""

    def __init__(self, help_: str, shared: Shared) -> None:
        self._help, self._error = help_, ""
        self.widget = ipywidgets.HTML(self._text(), layout=shared.note, style=shared.html_style)

    def say(self, error: str) -> None:
        """Show what is wrong; nothing is, where it is empty."""
        if error != self._error:
            self._error = error
            self.widget.value = self._text()

    def _text(self) -> str:
        return markup.div(alert(self._error) + markup.quiet(self._help), f"{FONT};font-size:12px;line-height:1.35")


def alert(error: str) -> str:
    """An error that screen readers speak; nothing where it is empty."""
    style = f"color:var(--jp-error-color1,{markup.ERROR});overflow-wrap:anywhere;white-space:pre-line"
    return markup.tag("div", escape(error), style, role="alert") if error else ""


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
    name: dict[str, Any] = {"description": control.name, "tooltip": control.help, "disabled": not control.available, "layout": shared.control}
    if control.kind == "switch":
        return ipywidgets.Checkbox(value=control.default, indent=True, style=shared.switch_style, **name)
    if control.kind == "choice":
        return ipywidgets.Dropdown(options=control.choices, value="", style=shared.style, **name)
    hint = str(control.default) or "default"
    if control.kind == "suggested":
        return ipywidgets.Combobox(options=suggestions, placeholder=hint, continuous_update=True, style=shared.text_style, **name)
    return ipywidgets.Text(placeholder=hint, continuous_update=True, style=shared.text_style, **name)


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
            boxes.append(ipywidgets.GridBox([part for field in fields for part in (field.widget, field.note.widget)], layout=shared.grid))
        self.widget = ipywidgets.Tab(boxes, titles=tuple(self._groups), selected_index=0, layout=ipywidgets.Layout(width="100%", margin="6px 0"))

    @property
    def controls(self) -> list[Any]:
        """The widgets that an option is set with."""
        return [field.widget for field in self.fields.values()]

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
        self.widget.titles = tuple(f"{group} ({count} wrong)" if count else group for group, count in counts.items())
