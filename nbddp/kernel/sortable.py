"""Sorting a table where it is shown, without a kernel: in a trusted notebook, also a saved one, and in nbconvert's pages.

The table itself is plain HTML. A script beside it, which front ends run in outputs that they trust, puts a button into each header; where it does not run
nothing pretends to sort. All comparing is done here: the script only arranges rows in orders that it is given.
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
  const orders = ORDERS, shown = SHOWN, heads = [...root.querySelectorAll("thead th")], rows = [...body.rows], marks = {};
  const mark = (column, up) => heads.forEach((head, index) => {
    if (!(index in orders)) return;
    head.setAttribute("aria-sort", index !== column ? "none" : up ? "ascending" : "descending");
    marks[index].textContent = index !== column ? "" : up ? " \\u25b2" : " \\u25bc";
  });
  Object.entries(orders).forEach(([key, [order, rest, first]]) => {
    const column = Number(key), head = heads[column], button = document.createElement("button");
    marks[column] = document.createElement("span");
    marks[column].setAttribute("aria-hidden", "true");
    button.type = "button";
    button.title = "sort by " + head.textContent;
    button.style.cssText = "all:unset;cursor:pointer;outline:revert";
    button.append(...head.childNodes, marks[column]);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort"), up = now === "none" ? first : now === "descending";
      body.append(...(up === first ? order : [...order].reverse()).map(row => rows[row]), ...rest.map(row => rows[row]));
      mark(column, up);
    });
  });
  mark(shown[0], shown[1]);
})();
"""


def sorting(orders: Mapping[int, tuple[Sequence[int | None], bool]], shown: tuple[int, bool] | None) -> str:
    """Return the script element for a table; it stands beside the table, within the element that holds both.

    Args:
        orders: for each column that sorts, the place of each row in the column's own order, None for one that stays at the end, and whether that order
            ascends.
        shown: the column by which the rows are in order, and whether they ascend.
    """
    columns = {}
    for column, (places, ascends) in orders.items():
        placed = sorted((place, row) for row, place in enumerate(places) if place is not None)
        columns[column] = [[row for _, row in placed], [row for row, place in enumerate(places) if place is None], ascends]
    filled = _SCRIPT.replace("ORDERS", json.dumps(columns, separators=(",", ":"))).replace("SHOWN", json.dumps(shown or [-1, True]))
    return f"<script>{filled}</script>"
