"""What is known of a cell's body without running it: the names that it binds, and what could stand in it.

A panel is looked at many times before it is run, and the body is the user's code. Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import ast
from inspect import isclass, isfunction
from typing import TYPE_CHECKING, Any

from nbddp.errors import ConfigError
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
    return {name for statement in _statements(body) for name in _bound(statement)}


def _statements(body: str) -> list[ast.stmt]:
    try:
        return _parsed(body)
    except SyntaxError:
        return []


def _parsed(body: str) -> list[ast.stmt]:
    """The statements, magics and shell commands among them.

    Raises:
        SyntaxError: where it is no Python.
    """
    try:
        return ast.parse(body).body
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return ast.parse(TransformerManager().transform_cell(body)).body


def syntax_error(body: str) -> str:
    """What is wrong with a body that is no Python; empty for one that is."""
    try:
        _parsed(body)
    except SyntaxError as error:
        return f"SyntaxError: {error.msg} (line {error.lineno} of the body)"
    return ""


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

    Metrics may record any name, which is what a function for the end of an epoch says of itself.
    """
    bound = bound_names(body)
    hooks = {name: stand_in for name, stand_in in STAND_INS.items() if name in bound}
    if "metrics" in bound:
        hooks.setdefault("on_epoch_end", STAND_INS["on_epoch_end"])
    return hooks


def literal_stages(body: str) -> list[Stage] | None:
    """The stages of a body that says them in plain values, as `stages_text` does; None where it has none, or they are known only when it runs.

    Raises:
        ConfigError: as `nbddp.Stage`.
    """
    lists = [statement.value for statement in _statements(body) if isinstance(statement, ast.Assign) and "stages" in set(_bound(statement))]
    if not lists or not isinstance(lists[-1], ast.List):
        return None
    try:
        return [_literal_stage(node) for node in lists[-1].elts]
    except _NotLiteralError:
        return None


class _NotLiteralError(Exception):
    """A stage whose arguments are no plain values."""


def _literal_stage(node: ast.expr) -> Stage:
    from nbddp.stage import Stage

    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) != "Stage":
        raise _NotLiteralError
    try:
        arguments = [ast.literal_eval(argument) for argument in node.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except ValueError:
        raise _NotLiteralError from None
    try:
        return Stage(*arguments, **keywords)
    except TypeError:  # arguments that it does not take: said when the body runs
        raise _NotLiteralError from None


def unknown_hooks(body: str) -> list[str]:
    """Hooks that a body has and whose effect on the figures is known only when it runs."""
    bound = bound_names(body)
    try:
        stages = literal_stages(body)
    except ConfigError:  # which is said
        stages = []
    return [name for name in ("stages", "sampler") if name in bound and not (name == "stages" and stages is not None)]


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
