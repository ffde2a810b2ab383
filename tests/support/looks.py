"""What an element of a page looks like to those who see little of it: whether it fits, whether its text can be read, what its controls are called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator

# Elements that reach beyond the right edge, those apart that lie in a part that scrolls by itself.
_OVERFLOWING = """root => {
  const right = root.getBoundingClientRect().right + 1;
  const scrolls = e => e !== root && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth;
  const clipped = e => { for (let up = e.parentElement; up && up !== root; up = up.parentElement) if (scrolls(up)) return true; return false; };
  return [...root.querySelectorAll('*')].filter(e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > right && !clipped(e))
    .map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40));
}"""
# WCAG 2.1, success criterion 1.4.3: 4.5 to 1, and 3 to 1 for large text. Text of disabled controls is exempt.
_FAINT = """root => {
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const ground = e => {
    const layers = [];
    for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); layers.push(c); if (c[3] === 1) break; }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, style = getComputedStyle(element);
    const text = node.textContent.replace(/[\\u200b\\s]+/g, ' ').trim();
    if (!text || !element.getClientRects().length || style.visibility === 'hidden' || element.closest('option, style, :disabled')) continue;
    const below = ground(element), top = over(parse(style.color), below);
    const [light, dark] = [luminance(top), luminance(below)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)} (${style.color} on ${below.map(Math.round)})`);
  }
  return found;
}"""
CONTROLS = ["button", "checkbox", "combobox", "link", "listbox", "radio", "searchbox", "slider", "spinbutton", "switch", "tab", "textbox"]
_CONTROL = re.compile(rf"^\s*- '?({'|'.join(CONTROLS)})\b(.*)$", re.MULTILINE)


def overflowing(element: Locator) -> list[str]:
    """Describe what reaches beyond the element's right edge and can't be scrolled to by itself."""
    found: list[str] = element.evaluate(_OVERFLOWING)
    return found


def faint(element: Locator) -> list[str]:
    """Describe the texts whose contrast to their ground is too low."""
    found: list[str] = element.evaluate(_FAINT)
    return found


def controls(element: Locator) -> list[tuple[str, str]]:
    """Role and accessible name of each control; the name is empty where it has none."""
    return [(role, rest.split('"')[1] if '"' in rest else "") for role, rest in _CONTROL.findall(element.aria_snapshot())]
