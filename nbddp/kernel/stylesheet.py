"""The style sheet of the live view: its logs' colours in both themes, and how it folds when it is narrow.

What stays in a saved notebook, the card, has inline styles instead. Runs in the kernel.
"""

from __future__ import annotations

# Each readable on the ground of JupyterLab's light and of its dark theme.
_LIGHT = (
    *("#3b3f44", "#b3261e", "#1a6b2f", "#7a5600", "#1f5fbf", "#8b3fb5", "#0b6577", "#5a6068"),
    *("#646c76", "#c01f2a", "#13702b", "#805400", "#2158d6", "#9b2fc0", "#0e6a80", "#24292f"),
)
_DARK = (
    *("#9aa0a6", "#ff8078", "#6fdd8b", "#e3b341", "#79b8ff", "#d2a8ff", "#6fd6e2", "#d0d7de"),
    *("#9aa4ae", "#ffa198", "#7ee787", "#f2cc60", "#a5d6ff", "#e2c5ff", "#a0f0f8", "#ffffff"),
)
_LAYOUT = """
.nbddp-view.widget-box { container-type: inline-size; display: block; width: 100%; max-width: 1080px; margin: 0; padding: 2px 0; overflow: hidden; }
.nbddp-view .nb-hidden { display: none !important; }
.nbddp-view .nb-grid { display: grid; gap: 6px 28px; width: 100%; margin: 0; overflow: hidden; align-items: start;
  grid-template: "head" "stop" "said" "curve" "figures" "timings" "logs" / minmax(0, 1fr); }
.nbddp-view .nb-text, .nbddp-view .nb-text > .widget-html-content { display: contents; }
.nbddp-view .nb-head { grid-area: head; } .nbddp-view .nb-figures { grid-area: figures; } .nbddp-view .nb-timings { grid-area: timings; }
.nbddp-view .nb-stop { grid-area: stop; } .nbddp-view .nb-said { grid-area: said; }
.nbddp-view .nb-curve { grid-area: curve; } .nbddp-view .nb-logs { grid-area: logs; }
@container (min-width: 500px) {
  .nbddp-view .nb-grid { grid-template: "head stop" "said said" "curve curve" "figures figures" "timings timings" "logs logs" / minmax(0, 1fr) auto; }
}
@container (min-width: 720px) {
  .nbddp-view .nb-grid { grid-template: "head head stop" "said said said" "curve figures figures" "timings timings timings" "logs logs logs"
    / minmax(0, 3fr) minmax(0, 2fr) auto; }
}
.nbddp-view .nb-head, .nbddp-view .nb-figures, .nbddp-view .nb-timings, .nbddp-view .nb-said, .nbddp-view .nb-picture { width: auto; min-width: 0; margin: 0; }
.nbddp-view .nb-curve { display: flex; flex-direction: column; min-width: 0; width: auto; max-width: 760px; margin: 0; overflow: hidden; }
.nbddp-view .nb-row { display: flex; flex-flow: row wrap; align-items: center; gap: 4px 20px; width: 100%; margin: 0; overflow: hidden; }
.nbddp-view .nb-fit { width: auto; margin: 0; }
.nbddp-view .nb-stop { justify-self: end; width: auto; max-width: 100%; margin: 0; padding: 0 12px; }
.nbddp-view .widget-html, .nbddp-view .widget-html-content { min-width: 0; max-width: 100%; }
.nbddp-view .widget-checkbox label { display: flex; align-items: center; }
.nbddp-view .widget-checkbox input { margin: 0 6px 0 0; }
.nbddp-view .nb-logs { width: auto; min-width: 0; margin: 6px 0 0; }
.nbddp-view .widget-tab .lm-TabBar-content { flex-wrap: wrap; }
.nbddp-view .widget-tab .lm-TabBar-tab { flex: 0 1 auto !important; min-width: 0; padding: 0 12px; color: var(--jp-ui-font-color1) !important; }
.nbddp-view .widget-tab .widget-tab-contents { padding: 4px 8px; min-height: 0; }
.nbddp-view .nb-log { display: flex; flex-direction: column-reverse; width: auto; height: auto; max-height: 210px; overflow-y: auto; margin: 0; }
.nbddp-view pre { font-family: var(--jp-code-font-family, monospace); font-size: 12px; line-height: 1.4; margin: 0; padding: 0; background: none;
  color: var(--jp-ui-font-color1, inherit); white-space: pre-wrap; overflow-wrap: anywhere; }
.nbddp-view .nb-bold { font-weight: 700; } .nbddp-view .nb-dim { opacity: .8; } .nbddp-view .nb-italic { font-style: italic; }
.nbddp-view .nb-under { text-decoration: underline; } .nbddp-view .nb-struck { text-decoration: line-through; }
.nbddp-view .nb-inverse { background: var(--jp-ui-font-color1, #222); color: var(--jp-layout-color0, #fff); }
"""


def stylesheet() -> str:
    """The sheet, as an element."""
    rules = [_LAYOUT]
    for number, (light, dark) in enumerate(zip(_LIGHT, _DARK, strict=True)):
        rules.append(f".nbddp-view .nb-back{number}{{background:{light};color:#fff}}")
        rules.append(f".nbddp-view .nb-fore{number}{{color:{light}}}")
        rules.append(f'[data-jp-theme-light="false"] .nbddp-view .nb-fore{number}{{color:{dark}}}')
    return f"<style>{''.join(rules)}</style>"
