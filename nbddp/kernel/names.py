"""Names of the notebook in the line of a magic: ``{expr}`` and ``$name`` in its text, expressions that stand for objects.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any

from nbddp.errors import ConfigError, suggest
from nbddp.kernel.request import Named

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOLLAR = re.compile(r"\$([A-Za-z_]\w*)")


class _Evaluating(string.Formatter):
    """``str.format`` whose fields are expressions."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return eval(field_name, dict(kwargs)), ""


def expand(line: str, namespace: Mapping[str, Any]) -> str:
    """Put values of the notebook where the line says ``{expr}`` or ``$name``, as in IPython's other magics.

    Braces that hold no such expression stay: a dict is part of an expression. ``{{`` and ``}}`` stand for braces.

    Raises:
        ConfigError: for ``{name}`` with a name that the notebook lacks.
    """
    parts, position = [], 0
    while (start := line.find("{", position)) >= 0 and (end := _closing(line, start)):
        parts += [_dollars(line[position:start], namespace), _braces(line[start:end], namespace)]
        position = end
    return "".join([*parts, _dollars(line[position:], namespace)])


def _closing(line: str, start: int) -> int:
    """Position after the brace that closes the one at `start`; 0 where none does."""
    depth = 0
    for position in range(start, len(line)):
        depth += {"{": 1, "}": -1}.get(line[position], 0)
        if depth == 0:
            return position + 1
    return 0


def _braces(text: str, namespace: Mapping[str, Any]) -> str:
    if text.startswith("{{") and text.endswith("}}"):
        return text[1:-1]
    if not re.match(r"\{\s*[A-Za-z_(]", text):
        return text
    try:
        return _Evaluating().vformat(text, (), namespace)
    except NameError as error:
        if ":" in text:  # {name: value} is a dict
            return text
        message = f"{text}: {_undefined(error, namespace)}"
        raise ConfigError(message) from None
    except Exception as error:  # noqa: BLE001 - the user's own expression may raise anything
        if ":" in text:
            return text
        message = f"{text}: {type(error).__name__}: {error}"
        raise ConfigError(message) from None


def _dollars(text: str, namespace: Mapping[str, Any]) -> str:
    return _DOLLAR.sub(lambda match: str(namespace[match[1]]) if match[1] in namespace else match[0], text)


def _undefined(error: NameError, namespace: Mapping[str, Any]) -> str:
    name = error.name or str(error)
    return f"{name} is not defined in the notebook.{suggest(name, [known for known in namespace if not known.startswith('_')])}"


def evaluate(text: str, namespace: Mapping[str, Any], *, what: str, filename: str = "<magic line>", line: int = 1) -> Named:
    """The object that an expression of the notebook stands for; `what` says which argument it is.

    `filename` and `line` say where the expression stands, for lambdas in it. The namespace is not changed.

    Raises:
        ConfigError: for an unknown name, a syntax error, and whatever the expression raises.
    """
    try:
        code = compile("\n" * (line - 1) + text.strip(), filename, "eval", dont_inherit=True)
        return Named(text, eval(code, dict(namespace)))
    except SyntaxError as error:
        message = f"{what} {text}: not a name or an expression ({error.msg})"
    except NameError as error:
        undefined = _undefined(error, namespace)
        message = undefined if error.name == text else f"{what} {text}: {undefined}"
    except Exception as error:  # noqa: BLE001 - the user's own expression may raise anything
        message = f"{what} {text}: {type(error).__name__}: {error}"
    raise ConfigError(message) from None
