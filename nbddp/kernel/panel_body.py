"""What is known of a cell's body without running it: the names that it binds, and what could stand in it.

A panel is looked at many times before it is run, and the body is the user's code. Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import ast
from inspect import isclass, isfunction
from typing import TYPE_CHECKING, Any

from nbddp.kernel.completion import losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbddp.stage import Stage

_LOSSES = ("loss", "criterion", "loss_fn", "loss_func", "loss_function")

STAND_INS: dict[str, Callable[..., Any]] = {
    "loss": lambda output, target: None,
    "training_step": lambda model, batch: None,
    "validation_step": lambda model, batch: None,
    "optimizer": lambda model: None,
    "scheduler": lambda optimizer: None,
    "collate_fn": lambda samples: None,
    "on_epoch_end": lambda state: None,
}
"""For the hooks of a body that is not run: that they are there is what a plan depends on."""


def bound_names(body: str) -> set[str]:
    """Names that a body binds at its top level; none where it is no Python.

    Raises nothing: what is wrong with a body is said when it runs.
    """
    try:
        statements = ast.parse(body).body
    except SyntaxError:
        return set()
    return {name for statement in statements for name in _bound(statement)}


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def stand_ins(body: str) -> dict[str, Callable[..., Any]]:
    """A hook for each that a body seems to bind.

    Metrics may record any name, which is what a function for the end of an epoch says of itself; samplers and stages are not known before the body runs.
    """
    bound = bound_names(body)
    hooks = {name: stand_in for name, stand_in in STAND_INS.items() if name in bound}
    if "metrics" in bound:
        hooks.setdefault("on_epoch_end", STAND_INS["on_epoch_end"])
    return hooks


def found_loss(names: Mapping[str, Any]) -> str:
    """A body that takes the step, or the loss, that the notebook has; empty where it has none."""
    step = names.get("training_step")
    if callable(step) and not isclass(step):
        return "training_step = training_step"
    fit = [name for name in losses(names) if not isclass(names[name])]
    ranked = [*(name for name in _LOSSES if name in fit), *(name for name in fit if not isfunction(names[name])), *fit]
    return f"loss = {ranked[0]}" if ranked else ""


def stages_text(stages: Sequence[Stage]) -> str:
    """Stages of a settings file, for which there are no controls, as code."""
    lines = "".join(f"    nbddp.{stage!r},\n" for stage in stages)
    return f"import nbddp\nstages = [\n{lines}]"
