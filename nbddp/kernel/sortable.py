"""Sorting a table where it is shown, without a kernel: in a trusted notebook, also a saved one, and in nbconvert's pages.

The table itself is plain HTML. A script beside it, which front ends run in outputs that they trust, makes a button of each name in the headers that sorts;
where a front end takes scripts away, as JupyterLab does from outputs of notebooks that it does not trust, nothing pretends to sort, and the rows stay in the
order in which they were displayed. All comparing is done here: the script only arranges rows in orders that it is given.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SCRIPT = """
(() => {
  const root = document.currentScript && document.currentScript.parentNode, body = root && root.querySelector("tbody");
  if (!body) return;
  const orders = ORDERS, shown = SHOWN, rows = [...body.rows], buttons = {};
  const mark = (name, up) => {
    Object.values(buttons).forEach(button => {
      button.lastChild.textContent = "";
      button.closest("th").setAttribute("aria-sort", "none");
    });
    if (!buttons[name]) return;
    buttons[name].lastChild.textContent = up ? " \\u25b2" : " \\u25bc";
    buttons[name].closest("th").setAttribute("aria-sort", up ? "ascending" : "descending");
  };
  let now = shown;
  root.querySelectorAll("thead [data-order]").forEach(label => {
    const name = label.dataset.order;
    if (!(name in orders)) return;
    const [order, rest, first] = orders[name], button = document.createElement("button"), arrow = document.createElement("span");
    arrow.setAttribute("aria-hidden", "true");
    button.type = "button";
    button.title = "sort by " + name;
    button.style.cssText = "all:unset;cursor:pointer;outline:revert";
    button.append(...label.childNodes, arrow);
    label.append(button);
    buttons[name] = button;
    button.addEventListener("click", () => {
      now = [name, now[0] === name ? !now[1] : first];
      body.append(...(now[1] === first ? order : [...order].reverse()).map(row => rows[row]), ...rest.map(row => rows[row]));
      mark(...now);
    });
  });
  mark(...shown);
})();
"""


def sorting(orders: Mapping[str, tuple[Sequence[int | None], bool]], shown: tuple[str, bool] | None) -> str:
    """Return the script element for a table; it stands beside the table, within the element that holds both.

    Args:
        orders: by the names that the headers bear as `data-order`, the place of each row in an order, None for one that stays at the end, and whether that
            order ascends.
        shown: the order in which the rows are, and whether they ascend.
    """
    lists = {}
    for name, (places, ascends) in orders.items():
        placed = sorted((place, row) for row, place in enumerate(places) if place is not None)
        lists[name] = [[row for _, row in placed], [row for row, place in enumerate(places) if place is None], ascends]
    filled = _SCRIPT.replace("ORDERS", json.dumps(lists, separators=(",", ":"))).replace("SHOWN", json.dumps(shown or ["", True]))
    return f"<script>{filled}</script>"
