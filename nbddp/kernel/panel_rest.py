"""What a notebook keeps of a configuration panel: its widgets live in the kernel, and are gone with it.

An output of its own above the widgets says what stood there, with the cell that it stood for. Where the widgets are, a style sheet hides it; where they
are not (a saved notebook in a fresh kernel, a kernel that was restarted, a file made of the notebook), it hides what the front end puts in their place.
Runs in the kernel's main thread.
"""

from __future__ import annotations

import secrets
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

from nbddp.errors import ConfigError
from nbddp.kernel import markup
from nbddp.kernel.panel_fill import cell_of
from nbddp.tabular import FONT

if TYPE_CHECKING:
    from nbddp.kernel.panel_fill import Draft

_ALIVE = ".nbddp-panel:not(.jupyter-widgets-disconnected)"
_STYLE = f"""<style>
.jp-OutputArea-child:has(.nbddp-rest):has(+ .jp-OutputArea-child {_ALIVE}) {{display: none}}
.jp-OutputArea-child:has(.nbddp-rest) + .jp-OutputArea-child:not(:has({_ALIVE})) {{display: none}}
</style>"""

_CODE = f"{markup.MONO};margin:4px 0;padding:2px 0 2px 9px;border-left:3px solid {markup.LINE};white-space:pre;overflow-x:auto;background:none;color:inherit"


class Rest:
    """The output above the widgets of a panel."""

    def __init__(self) -> None:
        self._display_id = secrets.token_hex(8)
        self._said: dict[str, str] = {}

    def show(self, draft: Draft) -> None:
        """Display it below the running cell."""
        self._said = _said(draft)
        display(self._said, raw=True, display_id=self._display_id)

    def update(self, draft: Draft) -> None:
        """Say what a later draft asks for; the last one that asked for something stays where this does not."""
        said = _said(draft)
        if said != self._said and _cell(draft):
            self._said = said
            update_display(said, raw=True, display_id=self._display_id)


def beside(bundle: dict[str, Any]) -> dict[str, Any]:
    """The widgets' own output, which says nothing where there are none."""
    return {**bundle, "text/html": "", "text/plain": ""}


def _said(draft: Draft) -> dict[str, str]:
    title = f"configuration panel of {draft.call.model} and {draft.call.data}"
    how = "lives in the kernel that opened it: run this cell to open it again. The same as a cell:"
    cell = _cell(draft)
    parts = [markup.div(f"{markup.tag('b', escape(title))} {markup.quiet(how)}"), markup.tag("pre", escape(cell), _CODE)]
    html = markup.div("".join(parts), FONT, **{"class": "nbddp-rest"})
    return {"text/html": _STYLE + html, "text/plain": "\n".join([title, *cell.splitlines()])}


def _cell(draft: Draft) -> str:
    try:
        return cell_of(draft)
    except ConfigError:
        return ""
