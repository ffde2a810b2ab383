"""How the values of options are written: cadences, durations, devices, precisions, flags.

Validators of `nbddp.config`: they take what a line, a settings file or Python gives, and raise ValueError with the rule. Imports neither torch nor
Jupyter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool

from nbddp.errors import suggest

_EVERY = re.compile(r"^\s*(\d+)\s*(epochs?|steps?|min|minutes?)?\s*$")
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|sec|seconds?|min|minutes?|h|hours?)?\s*$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def read_every(value: object) -> object:
    """Write ``2`` as ``"2 epochs"``, ``"500 steps"`` and ``"10 min"`` in one spelling."""
    match = None if isinstance(value, bool) else _EVERY.match(str(value))
    if match is None or int(match[1]) < 1:
        rule = "must be a number of epochs (2), of steps (500 steps) or of minutes (10 min), at least 1"
        raise ValueError(rule)
    count, unit = int(match[1]), (match[2] or "epochs")[0]
    word = {"e": "epoch", "s": "step", "m": "min"}[unit]
    return f"{count} {word}" if word == "min" or count == 1 else f"{count} {word}s"


def read_steps_or_epochs(value: object) -> object:
    """The same for a cadence that can't be in minutes."""
    text = str(read_every(value))
    if text.endswith("min"):
        rule = "must be a number of epochs (2) or of steps (500 steps)"
        raise ValueError(rule)
    return text


def read_duration(value: object) -> object:
    """Turn ``"90 s"``, ``"10 min"`` and ``"2 h"`` into seconds."""
    if value is None or isinstance(value, float):
        return value
    match = None if isinstance(value, bool) else _DURATION.match(str(value))
    if match is None:
        rule = "must be a duration: seconds (90), or 90 s, 10 min, 2 h"
        raise ValueError(rule)
    return float(match[1]) * _SECONDS[(match[2] or "s")[0]]


def read_devices(value: object) -> object:
    """Turn ``"0,1"``, ``0`` and ``[0, 1]`` into a tuple of indices; ``auto`` and ``cpu`` stay."""
    if value in ("auto", "cpu"):
        return value
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(parts, list | tuple) and parts and all(not isinstance(p, bool) and str(p).strip().isdigit() for p in parts):
        indices = tuple(int(p) for p in parts)
        if len(set(indices)) == len(indices):
            return indices
    rule = "must be auto, cpu or distinct GPU indices such as 0,1"
    raise ValueError(rule)


_PRECISIONS = {
    **dict.fromkeys(["auto"], "auto"),
    **dict.fromkeys(["bf16", "bf16-mixed", "bfloat16"], "bf16"),
    **dict.fromkeys(["fp16", "16", "16-mixed", "float16"], "fp16"),
    **dict.fromkeys(["fp32", "32", "32-true", "float32", "no"], "fp32"),
}


def read_precision(value: object) -> object:
    """Understand Lightning's and accelerate's words for a precision."""
    word = str(value).lower()
    if word in ("64", "64-true", "float64", "double"):
        rule = "is the model's own matter: net.double() and --precision fp32, which keeps the dtype of parameters and batches"
        raise ValueError(rule)
    if word not in _PRECISIONS:
        rule = f"must be one of auto, bf16, fp16, fp32 (or Lightning's and accelerate's words).{suggest(word, _PRECISIONS)}"
        raise ValueError(rule)
    return _PRECISIONS[word]


def read_tf32(value: object) -> object:
    """Understand ``tf32``: true is high, false is highest."""
    flag = read_flag(value)
    return {True: "high", False: "highest"}[flag] if isinstance(flag, bool) else value


NORMS = ("auto", "keep", "sync", "batch", "layer", "group", "none")
_NORM_WORDS = {
    **{kind: kind for kind in NORMS},
    **dict.fromkeys(["syncbatchnorm", "sync_batchnorm", "sync_batch_norm", "syncbn", "sync_bn", "true"], "sync"),
    **dict.fromkeys(["batchnorm", "batch_norm"], "batch"),
    **dict.fromkeys(["layernorm", "layer_norm"], "layer"),
    **dict.fromkeys(["groupnorm", "group_norm"], "group"),
    **dict.fromkeys(["identity"], "none"),
    **dict.fromkeys(["false"], "keep"),
}


def read_norm(value: object) -> object:
    """Understand the layers' own names, Lightning's ``sync_batchnorm``, and the same by pattern."""
    if isinstance(value, Mapping):
        return {pattern: _norm_kind(kind) if isinstance(kind, str | bool) else kind for pattern, kind in value.items()}
    if isinstance(value, str) and ":" in value:
        pattern, _, kind = value.partition(":")
        rule = f"must be a kind, or pattern=value: write {pattern.strip()}={kind.strip()}"
        raise ValueError(rule)
    return _norm_kind(value) if isinstance(value, str | bool) else value


def _norm_kind(value: str | bool) -> str:
    return _NORM_WORDS.get(str(value).lower(), str(value))


def auto_is_none(value: object) -> object:
    """Take ``auto`` and ``none`` for a value that is not given."""
    return None if isinstance(value, str) and value.lower() in ("auto", "none") else value


def not_bool(value: object) -> object:
    """Refuse True and False, which Python counts as numbers."""
    if isinstance(value, bool):
        rule = "must be a number"
        raise ValueError(rule)  # noqa: TRY004 - pydantic collects ValueError, not TypeError
    return value


def read_flag(value: object) -> object:
    """Understand true, yes, on, 1 and their opposites."""
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


Flag = Annotated[StrictBool, BeforeValidator(read_flag)]
Count = Annotated[int, BeforeValidator(not_bool), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(not_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(not_bool), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(not_bool), Field(ge=0, allow_inf_nan=False)]


WANDB_KEYS = ("project", "group", "name", "entity", "mode", "tags", "job_type")
WANDB_MODES = ("online", "offline", "disabled")


def read_wandb(value: object) -> object:
    """Read ``project=digits,group=lab,tags=a+b``, or a mapping of the same keys, as a dict of texts; several tags are joined by a plus."""
    if value is None:
        return None
    pairs = _wandb_pairs(value)
    for index, (name, _) in enumerate(pairs):
        if name not in WANDB_KEYS:
            rule = f"has the unknown key {name}; the keys are {', '.join(WANDB_KEYS)}.{suggest(name, WANDB_KEYS)}"
            raise ValueError(rule)
        if name in (other for other, _ in pairs[:index]):
            rule = f"gives {name} twice: keep one"
            raise ValueError(rule)
    read = {name: _wandb_text(name, text) for name, text in pairs if text is not None}
    if "project" not in read:
        rule = "needs a project: project=NAME"
        raise ValueError(rule)
    if (mode := read.get("mode", WANDB_MODES[0])) not in WANDB_MODES:
        rule = f"has mode={mode}, which must be one of {', '.join(WANDB_MODES)}.{suggest(mode, WANDB_MODES)}"
        raise ValueError(rule)
    return read


def _wandb_pairs(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(str(name), text) for name, text in value.items()]
    parts = [part.partition("=") for part in value.split(",")] if isinstance(value, str) else []
    if not parts or not all(equals for _, equals, _ in parts):
        rule = "must be key=value pairs such as project=digits,group=lab, or a mapping of them"
        raise ValueError(rule)
    return [(name.strip(), text.strip()) for name, _, text in parts]


def _wandb_text(name: str, value: object) -> str:
    """A value as a text; tags may be a list."""
    texts = list(value) if name == "tags" and isinstance(value, list | tuple) else str(value).split("+") if name == "tags" else [value]
    plain = [isinstance(text, str | int | float) and not isinstance(text, bool) and bool(str(text).strip()) for text in texts]
    if not texts or not all(plain) or any("+" in str(text) for text in texts if name == "tags"):
        rule = f"has {name}={value!r}, which must be a text" + (", or several joined by + (a+b)" if name == "tags" else "")
        raise ValueError(rule)
    return "+".join(str(text).strip() for text in texts)
