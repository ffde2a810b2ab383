"""What the options of a panel come to: what is wrong with them, in the words of the magic, or the plan.

The same functions as for a cell, called on the options as they stand: a text is read as the magic's line reads it. The body is not run. Runs in the
kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, NbddpError
from nbddp.kernel.body import require_loss
from nbddp.kernel.machine import this_machine
from nbddp.kernel.names import evaluate
from nbddp.kernel.panel_body import bound_names, stand_ins
from nbddp.kernel.panel_fill import read_texts
from nbddp.kernel.prepare import Outline, Prepared, complete, outline
from nbddp.kernel.request import Named, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbddp.kernel.panel_fill import Draft

BODY = "body"
EXPRESSIONS = ("val", "loss")
_FIELD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Checked:
    """What the options come to.

    Attributes:
        errors: what is wrong, by the control that it is about; under the empty name where it is about none.
        outlined: what is known whatever the number of ranks; None where not even that is.
        prepared: the plan and what belongs to it; None where something is wrong with the options.
    """

    errors: Mapping[str, str] = field(default_factory=dict)
    outlined: Outline | None = None
    prepared: Prepared | None = None


class Checker:
    """Checks drafts against the notebook as it is.

    Args:
        names: the notebook's names now.
    """

    def __init__(self, names: Callable[[], Mapping[str, Any]]) -> None:
        self._names = names
        self._expressions: dict[str, Named] = {}
        self.machine = this_machine()

    def check(self, draft: Draft) -> Checked:
        """Check every option by itself, then all of them together."""
        errors: dict[str, str] = {}
        options: dict[str, object] = {}
        for name, text in draft.call.values.items():
            try:
                options |= read_texts({name: text})
            except ConfigError as error:
                errors[name] = str(error)
        found: dict[str, Named | None] = {}
        for what, expression in (("MODEL", draft.call.model), ("DATA", draft.call.data), ("val", draft.call.val), ("loss", draft.call.loss)):
            try:
                found[what] = None if expression is None else self.look_up(what, expression)
            except ConfigError as error:
                errors[what if what in EXPRESSIONS else ""] = str(error)
        if errors:
            return Checked(errors)
        return self._together(draft, options, found)

    def look_up(self, what: str, text: str) -> Named:
        """The object that an expression stands for: a name each time, what has to be computed once.

        Raises:
            ConfigError: as `evaluate`.
        """
        if text.isidentifier() or text not in self._expressions:
            self._expressions[text] = evaluate(text, self._names(), what=f"--{what}" if what in EXPRESSIONS else what)
        return self._expressions[text]

    def _together(self, draft: Draft, options: dict[str, object], found: Mapping[str, Named | None]) -> Checked:
        model, data, val, loss = (found[what] for what in ("MODEL", "DATA", *EXPRESSIONS))
        assert model is not None
        assert data is not None
        hooks: dict[str, object] = dict(stand_ins(draft.body))
        errors = self._missing_loss(draft) if loss is None else {}
        if loss is not None:
            hooks["loss"] = loss.value
        elif not {"loss", "training_step"} & set(hooks):
            hooks |= stand_ins("loss = None")
        val = None if val is None or val.value is None else val
        outlined = None
        try:
            outlined = outline(Request(model, data, val, options, hooks, requested=0.0, notes=draft.notes))
            return Checked(errors, outlined, complete(outlined, self.machine))
        except NbddpError as error:
            wrong = str(error)
        except Exception as error:  # noqa: BLE001 - datasets, samplers and metrics are the user's code
            wrong = f"{type(error).__name__}: {error}"
        return Checked({**errors, _about(wrong): wrong}, outlined)

    def _missing_loss(self, draft: Draft) -> dict[str, str]:
        bound = dict.fromkeys(bound_names(draft.body), _bound)
        hooks = {name: hook for name, hook in bound.items() if name in ("loss", "training_step")}
        try:
            require_loss(hooks, bound, self._names(), has_body=True)
        except ConfigError as error:
            return {BODY: str(error)}
        return {}


def _bound() -> None:
    """Stands for whatever a body binds."""


def _about(text: str) -> str:
    """The option that a message begins with; empty where it begins with none."""
    first = _FIELD.match(text)
    name = first[0] if first else ""
    return name if name in TrainConfig.model_fields or name in EXPRESSIONS else ""
