"""How a configuration panel looks: the style sheet, and text in which options and magics do not break. Runs in the kernel; imports no widgets."""

from __future__ import annotations

import re
from html import escape

from nbddp.kernel import markup

LABEL_WIDTH = "182px"
EDGE = "9px"
"""From the edge of a panel to its controls: border and padding of a tab."""
INDENT = f"calc({LABEL_WIDTH} + 8px)"
"""From the begin of a label to the begin of its control."""

STYLE = f"""<style>
.nbddp-panel.widget-vbox {{width: 100%; max-width: 1080px; padding: 2px 0; overflow: hidden; container-type: inline-size}}
.nbddp-panel .widget-html, .nbddp-panel .widget-html-content {{margin: 0; min-width: 0; width: 100%; font-size: 13px; line-height: 1.45;
  color: var(--jp-ui-font-color1, inherit)}}
.nbddp-panel .nb-head {{margin: 0 0 6px}}
.nbddp-panel .nb-quiet, .nbddp-panel .nb-tiles span, .nbddp-panel .nb-ranks thead th {{color: var(--jp-ui-font-color2, inherit)}}
.nbddp-panel .nb-code {{white-space: nowrap}}
.nbddp-panel .nb-wrap {{overflow-wrap: anywhere; white-space: pre-line}}
.nbddp-panel .nb-alert {{color: var(--jp-error-color1, {markup.ERROR})}}
.nbddp-panel .nb-note {{font-size: 12px; line-height: 1.35; overflow-wrap: anywhere}}
.nbddp-panel .nb-grid {{display: grid; grid-template-columns: minmax(346px, 5fr) minmax(0, 6fr); gap: 5px 14px; align-items: center; overflow: hidden}}
.nbddp-panel .nb-grid > *, .nbddp-panel .nb-call > * {{min-width: 0; width: auto; margin: 0}}
.nbddp-panel .nb-call {{display: flex; flex-direction: column; gap: 5px; padding: 0 {EDGE}; margin: 4px 0 0; overflow: hidden}}
.nbddp-panel .nb-call > .nb-below, .nbddp-panel .nb-buttons, .nbddp-panel .nb-said {{padding-left: {INDENT}}}
.nbddp-panel .nb-call > .widget-html:first-child {{margin-left: -{EDGE}}}
.nbddp-panel .nb-said, .nbddp-panel .nb-buttons {{margin: 8px {EDGE}; width: auto; overflow: hidden}}
.nbddp-panel .nb-said:has(.widget-html-content:empty) {{display: none}}
.nbddp-panel .nb-buttons {{display: flex; flex-flow: row wrap; gap: 8px}}
.nbddp-panel .nb-buttons > button {{margin: 0; width: 148px}}
.nbddp-panel .nb-figures {{margin: 0}}
.nbddp-panel .widget-tab {{width: 100%; margin: 0 0 8px}}
.nbddp-panel .lm-TabBar-content {{flex-wrap: wrap}}
.nbddp-panel.jupyter-widgets .lm-TabPanel-tabBar, .nbddp-panel .jupyter-widget-tab > .lm-TabBar {{min-height: 0; max-height: none; overflow: visible}}
.nbddp-panel .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab {{flex: 1 1 auto; min-width: 0; max-width: none; padding: 0 6px; font-size: 12px;
  text-align: center; color: var(--jp-ui-font-color1, inherit)}}
.nbddp-panel .jupyter-widget-tab > .lm-TabBar .lm-TabBar-tab:focus-visible {{outline: 2px solid var(--jp-brand-color1, #4285f4); outline-offset: -2px}}
.nbddp-panel.widget-vbox .jupyter-widget-tab > .widget-tab-contents {{padding: 8px; overflow: hidden}}
.nbddp-panel textarea {{font-family: var(--jp-code-font-family, monospace); font-size: 12px; white-space: pre; overflow-x: auto; margin: 0}}
.nbddp-panel .widget-checkbox .widget-label-basic {{flex: 1 1 auto; max-width: none; width: auto; overflow: visible}}
.nbddp-panel .widget-checkbox .widget-label-basic span {{white-space: nowrap}}
.nbddp-panel input:disabled, .nbddp-panel select:disabled {{opacity: .55}}
.nbddp-panel .nb-tiles {{display: grid; grid-template-columns: repeat(auto-fill, minmax(min(170px, 45%), 1fr)); gap: 8px 16px; margin: 4px 0 10px;
  font-variant-numeric: tabular-nums}}
.nbddp-panel .nb-tiles > div {{display: flex; flex-direction: column; min-width: 0; font-size: 11px; line-height: 1.4}}
.nbddp-panel .nb-tiles b {{font-size: 17px; font-weight: 600; overflow-wrap: anywhere}}
.nbddp-panel .nb-ranks {{border-collapse: collapse; border: 0; margin: 2px 0 8px; font-size: 12px; font-variant-numeric: tabular-nums; table-layout: auto}}
.nbddp-panel .nb-ranks th, .nbddp-panel .nb-ranks td {{padding: 1px 14px 1px 0; border: 0; background: none; text-align: right; vertical-align: top;
  font-weight: 400; white-space: nowrap; max-width: none}}
.nbddp-panel .nb-ranks thead th {{font-size: 11px}}
.nbddp-panel .nb-ranks tr {{background: none}}
.nbddp-panel .nb-ranks td:last-child {{text-align: left; white-space: normal; overflow-wrap: anywhere}}
.nbddp-panel .nb-these th, .nbddp-panel .nb-these td:not(:last-child) {{font-weight: 600}}
.nbddp-panel .nb-none {{display: none}}
@container (max-width: 680px) {{
  .nbddp-panel .nb-grid {{grid-template-columns: minmax(0, 1fr)}}
  .nbddp-panel .nb-grid > .widget-html {{padding-left: {INDENT}; margin: -3px 0 4px}}
}}
@container (max-width: 460px) {{
  .nbddp-panel .nb-grid .widget-checkbox > label:first-child {{width: 60px !important}}
}}
</style>"""

_CODE = re.compile(r"(?<![\w-])(?:--[a-z][\w-]*|%{1,2}ddp_\w+(?: (?:--\w[\w-]*|\w+-\w[\w-]*))?|\d{8}-\d{6}-[\w-]+)")


def coded(text: str) -> str:
    """A text, escaped, whose options, magics and runs do not break at the end of a line."""
    return _CODE.sub(lambda match: f'<span class="nb-code">{match[0]}</span>', escape(text))


def quiet(text: str) -> str:
    """Secondary text, escaped."""
    return f'<span class="nb-quiet">{coded(text)}</span>'


def line(html: str) -> str:
    """A line of HTML that may wrap anywhere."""
    return f'<div class="nb-wrap">{html}</div>'


def error_line(error: str) -> str:
    """An error, as a line."""
    return f'<div class="nb-alert nb-wrap">{coded(error)}</div>'


def alert(error: str) -> str:
    """An error that screen readers speak; nothing where it is empty."""
    return f'<div role="alert" class="nb-alert nb-wrap">{coded(error)}</div>' if error else ""
