"""What the options of a panel come to: what is wrong with them, in the words of the magic, or the plan.

The same functions as for a cell, called on the options as they stand: a text is read as the magic's line reads it. The body is not run. Runs in the
kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, NbddpError
from nbddp.kernel.body import require_loss
from nbddp.kernel.line import identifier
from nbddp.kernel.machine import this_machine
from nbddp.kernel.magics import named_runs
from nbddp.kernel.names import evaluate
from nbddp.kernel.panel_body import bound_names, literal_stages, stand_ins, syntax_error, unknown_hooks
from nbddp.kernel.panel_fill import read_texts
from nbddp.kernel.panel_known import Decisions, Devices
from nbddp.kernel.prepare import Outline, Prepared, complete, outline
from nbddp.kernel.request import Named, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.kernel.panel_fill import Draft

BODY = "body"
EXPRESSIONS = ("val", "loss")
_FIELD = re.compile(r"\w+")
_SIMPLE = (ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.UnaryOp, ast.USub, ast.Load)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the options come to.

    Attributes:
        errors: what is wrong, by the control that it is about; under the empty name where it is about none.
        outlined: what is known whatever the number of ranks, of the options but `unread`; None where not even that is.
        prepared: the plan and what belongs to it, of the options but `wrong`; None where there is none.
        unread: options that have no value, or one that excludes others.
        wrong: these, and those that do not fit the ranks.
        remarks: what the figures leave out.
    """

    errors: Mapping[str, str] = field(default_factory=dict)
    outlined: Outline | None = None
    prepared: Prepared | None = None
    unread: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()

    @property
    def plan(self) -> Prepared | None:
        """The plan of the options as they stand; None where something is wrong with them."""
        return None if set(self.errors) - {BODY} else self.prepared


@dataclass(slots=True)
class _Parts:
    """What is put together: without what turned out to be wrong."""

    model: Named
    data: Named
    val: Named | None
    options: dict[str, object]
    hooks: dict[str, object]
    notes: tuple[str, ...]

    def request(self) -> Request:
        return Request(self.model, self.data, self.val, dict(self.options), dict(self.hooks), requested=0.0, notes=self.notes)

    def leave_out(self, name: str) -> bool:
        """Whether there was an option of that name; it is gone then."""
        if name == "val" and self.val is not None:
            self.val = None
            return True
        return self.options.pop(name, None) is not None


class Checker:
    """Checks drafts against the notebook as it is.

    Args:
        names: the notebook's names now.
        changed: called, maybe from another thread, when a check would say something else though no option was changed.
    """

    def __init__(self, names: Callable[[], Mapping[str, Any]], changed: Callable[[], None] = lambda: None) -> None:
        self._names = names
        self._computed: dict[str, Named] = {}
        self._devices = Devices(changed)
        self.decisions = Decisions()
        self.machine = this_machine()

    def check(self, draft: Draft) -> Checked:
        """Check every option by itself, then all of them together."""
        call, errors = draft.call, dict[str, str]()
        options: dict[str, object] = {}
        for name, text in call.values.items():
            if error := self.error_of(name, text):
                errors[name] = error
            else:
                options |= read_texts({name: text})
        if call.bind is not None and (error := self.error_of("as", call.bind)):
            errors["as"] = error
        found: dict[str, Named | None] = {}
        for what, expression in (("MODEL", call.model), ("DATA", call.data), ("val", call.val), ("loss", call.loss)):
            try:
                found[what] = None if expression is None else self.look_up(what, expression)
            except ConfigError as error_of_it:
                errors[what if what in EXPRESSIONS else ""] = str(error_of_it)
        model, data = found.get("MODEL"), found.get("DATA")
        unread = frozenset(errors)
        if model is None or data is None:
            return Checked(errors, unread=unread, wrong=unread)
        errors |= self._missing_loss(draft)
        options |= named_runs(options, self._names())
        parts = _Parts(model, data, found.get("val"), options, self._hooks(draft, found.get("loss"), errors), draft.notes)
        checked = self._together(parts, errors, unread)
        return replace(checked, remarks=tuple(self._remarks(draft)))

    def error_of(self, name: str, text: str | bool) -> str:
        """What is wrong with an option by itself; empty where nothing is. From any thread: nothing of the user's is run."""
        try:
            if name == "as":
                identifier(str(text), "--as")
            else:
                read_texts({name: text})
        except ConfigError as error:
            value = self._names().get(text) if isinstance(text, str) and text.isidentifier() else None
            hint = f"; {text} is a variable of the notebook: write its value, {value}" if isinstance(value, int | float | str) else ""
            return f"{error}{hint}"
        return ""

    def look_up(self, what: str, text: str) -> Named:
        """The object that an expression stands for, each time; where that calls something, once.

        Raises:
            ConfigError: as `evaluate`.
        """
        if not (calls := _calls(text)) or text not in self._computed:
            found = evaluate(text, self._names(), what=f"--{what}" if what in EXPRESSIONS else what)
            if not calls:
                return found
            self._computed[text] = found
        return self._computed[text]

    def _hooks(self, draft: Draft, loss: Named | None, errors: dict[str, str]) -> dict[str, object]:
        hooks: dict[str, object] = dict(stand_ins(draft.body))
        if loss is not None:
            if "loss" in hooks:
                errors.setdefault("loss", "--loss and the cell's loss: keep one of the two")
            hooks["loss"] = loss.value
        elif not {"loss", "training_step"} & set(hooks):
            hooks |= stand_ins("loss = None")
        try:
            if stages := literal_stages(draft.body):
                hooks["stages"] = stages
        except ConfigError as error:
            errors.setdefault(BODY, str(error))
        return hooks

    def _together(self, parts: _Parts, errors: dict[str, str], unread: frozenset[str]) -> Checked:
        """Leave one option after the other out, until the rest comes to something; what the first of them breaks is what the magic would say."""
        outlined, said, dropped, of_outline = None, False, set(unread), unread
        while True:
            try:
                rest = outline(parts.request())
                if outlined is None:
                    outlined, of_outline = rest, frozenset(dropped)
                prepared = complete(rest, self.machine, decide=self.decisions, devices=self._devices)
                return Checked(errors, outlined, prepared, of_outline, frozenset(dropped))
            except NbddpError as error:
                wrong = str(error)
            except Exception as error:  # noqa: BLE001 - datasets, samplers and metrics are the user's code
                wrong = f"{type(error).__name__}: {error}"
            name = _about(wrong)
            if not said and not set(errors) - {BODY}:
                errors[name] = wrong
            said = True
            if not parts.leave_out(name):
                return Checked(errors, outlined, None, of_outline, frozenset({*dropped, *([name] if name else [])}))
            dropped.add(name)

    def _missing_loss(self, draft: Draft) -> dict[str, str]:
        if wrong := syntax_error(draft.body):
            return {BODY: wrong}
        if draft.call.loss is not None:
            return {}
        bound = dict.fromkeys(bound_names(draft.body), _bound)
        hooks = {name: hook for name, hook in bound.items() if name in ("loss", "training_step")}
        try:
            require_loss(hooks, bound, self._names(), has_body=True)
        except ConfigError as error:
            return {BODY: str(error)}
        return {}

    def _remarks(self, draft: Draft) -> list[str]:
        """What the figures are not of: what is known only when the cell runs."""
        later = unknown_hooks(draft.body)
        remarks = [f"the figures are without {' and '.join(later)} of the body, which is not run here: %%ddp_plan shows them"] if later else []
        computed = [text for text in (draft.call.model, draft.call.data, draft.call.val, draft.call.loss) if text in self._computed]
        if computed:
            remarks.append(f"{', '.join(computed)}: computed once for the figures, and again by Run and by the cell")
        return remarks


def _calls(text: str) -> bool:
    """Whether an expression may do more than look something up."""
    try:
        return not all(isinstance(node, _SIMPLE) for node in ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return False


def _bound() -> None:
    """Stands for whatever a body binds."""


def _about(text: str) -> str:
    """The option that a message begins with; empty where it begins with none."""
    first = _FIELD.match(text)
    name = first[0] if first else ""
    return name if name in TrainConfig.model_fields or name in EXPRESSIONS else ""
