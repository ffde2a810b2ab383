"""The body of a cell under %%ddp_train: run on a copy of the notebook's names, and read for hooks.

Runs in the kernel and in terminal IPython; imports neither torch nor ipykernel.
"""

from __future__ import annotations
import __future__

import ast
import difflib
import linecache
import re
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from nbddp.errors import ConfigError
from nbddp.kernel.cells import unix_lines
from nbddp.kernel.request import HOOKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.kernel.cells import Origin

_FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag

# What people call these things elsewhere.
_OTHER_NAMES = {
    "criterion": "loss",
    "loss_fn": "loss",
    "loss_func": "loss",
    "loss_function": "loss",
    "train_step": "training_step",
    "val_step": "validation_step",
    "valid_step": "validation_step",
    "eval_step": "validation_step",
    "configure_optimizers": "optimizer",
    "lr_scheduler": "scheduler",
    "collate": "collate_fn",
}

EXAMPLE = "loss = nn.CrossEntropyLoss()"


class _CellSyntaxError(Exception):
    """A SyntaxError of the cell, shown as IPython shows those that it finds itself: without the frames between the cell and its body."""

    def __init__(self, error: SyntaxError, shown: list[str]) -> None:
        super().__init__(str(error))
        self._shown = shown

    def _render_traceback_(self) -> list[str]:
        return self._shown


def _shown_as_the_cells_own(shell: InteractiveShell, error: SyntaxError) -> Exception:
    """Front ends and papermill name an error by its class; a real SyntaxError would be shown with IPython's frames and ours."""
    named: type[_CellSyntaxError] = type(type(error).__name__, (_CellSyntaxError,), {})
    return named(error, shell.SyntaxTB.structured_traceback(type(error), error, None))


class _Scope(MutableMapping[str, Any]):
    """The names of the body's top level: stored in the globals of its functions, with a note of which ones the body bound."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self.bound: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._names[name] = value
        self.bound[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self.bound.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def run_body(shell: InteractiveShell, body: str, origin: Origin, names: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a body on a copy of `names` and return what it bound at its top level.

    Code objects have the cell's file name and count lines from the cell's first one. What the body raises goes through.

    Raises:
        ConfigError: for a cell magic inside the body, which would run outside the copy.
    """
    __tracebackhide__ = True
    body = unix_lines(body)
    lines = body.split("\n")
    blank = next((index for index, line in enumerate(lines) if line.strip()), len(lines))  # IPython's transformation drops them
    if re.match(r"\s*%%\w", lines[blank] if blank < len(lines) else ""):
        message = f"{lines[blank].split()[0]} inside the cell of a magic: put it on a line above the magic"
        raise ConfigError(message)
    filename = str(origin.cell.filename)
    before = origin.offset + blank
    try:
        text = shell.transform_cell(body)
        _show_source(filename, origin, body, "\n" * blank + text)
        flags = shell.compile.flags & _FUTURE_FLAGS  # `from __future__` of earlier cells holds, as in any cell
        tree = compile("\n" * before + text, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        code = compile(shell.transform_ast(tree), filename, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        raise _shown_as_the_cells_own(shell, error) from None
    scope = dict(names)
    if "__annotations__" in scope:
        scope["__annotations__"] = dict(scope["__annotations__"])
    recorded = _Scope(scope)
    exec(code, scope, recorded)
    return {name: scope[name] for name in recorded.bound if name in scope}


def _show_source(filename: str, origin: Origin, body: str, transformed: str) -> None:
    """Let tracebacks and `inspect.getsource` see the cell as it was typed; as IPython translated it, where that moved lines."""
    typed, run = body.rstrip("\n").split("\n"), transformed.rstrip("\n").split("\n")
    head = origin.cell.source.split("\n")[: origin.offset]
    text = "\n".join([*head, *(typed if len(typed) == len(run) else run)]) + "\n"
    linecache.cache[filename] = (len(text), None, [line + "\n" for line in text.split("\n")[:-1]], filename)


def hooks_of(bound: Mapping[str, Any]) -> dict[str, Any]:
    """The hooks among the names that a body bound; one that is None counts as left out."""
    return {name: bound[name] for name in HOOKS if bound.get(name) is not None}


def near_misses(bound: Mapping[str, Any]) -> dict[str, str]:
    """Callables of a body whose name looks as if a hook was meant, with that hook."""
    meant = {}
    for name, value in bound.items():
        if name in HOOKS or name.startswith("_") or not callable(value):
            continue
        if name in _OTHER_NAMES:
            hook = _OTHER_NAMES[name]
            taken = hook in bound or (hook == "loss" and "training_step" in bound)  # a helper of the step then
        else:
            hook = next(iter(difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)), "")
            taken = hook in bound
        if hook and not taken:
            meant[name] = hook
    return meant


def require_loss(hooks: Mapping[str, Any], bound: Mapping[str, Any], notebook: Mapping[str, Any], *, has_body: bool) -> None:
    """Check that something says what to minimise.

    Raises:
        ConfigError: where neither `loss` nor `training_step` does, with what the cell or the notebook seems to have for it.
    """
    if "loss" in hooks or "training_step" in hooks:
        return
    meant = {name: hook for name, hook in near_misses(bound).items() if hook in ("loss", "training_step")}
    if meant:
        remedy = " ".join(f"Is {name} the {hook}? Then call it {hook}." for name, hook in meant.items())
    elif there := next((name for name in ("loss", *_OTHER_NAMES) if callable(notebook.get(name)) and _OTHER_NAMES.get(name, "loss") == "loss"), None):
        ways = f"write `loss = {there}` in the cell, or --loss {there}" if has_body else f"write --loss {there}"
        remedy = f"The notebook has {there}, which is not taken by itself: {ways}."
    elif has_body:
        remedy = f"Write for instance `{EXAMPLE}` in the cell, or --loss EXPR."
    else:
        remedy = f'Write --loss EXPR, such as --loss "{EXAMPLE.removeprefix("loss = ")}", or use %%ddp_train with `{EXAMPLE}` below it.'
    message = f"neither loss nor training_step is given: nothing says what to minimise. {remedy}"
    raise ConfigError(message)
