"""What the readers of other systems' settings files share: keys taken one by one, and a list of those without a counterpart here.

There are two such layouts: `nbddp.kernel.foreign_local` and `nbddp.kernel.foreign_trainer`. What can't be mapped is listed by its path, and never dropped
in silence; what a file leaves out means what it means there. Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError, suggest
from nbddp.rules import not_yet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Layout = Literal["local", "trainer"]
MARKS: dict[Layout, tuple[str, ...]] = {"local": ("local", "training"), "trainer": ("dataloaders", "trainer")}
SHARED = frozenset({"gpus", "optimizer", "precision"})
"""Keys at the top of a file that mean something in the second layout as well as here."""

OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad", "rmsprop", "lbfgs")
_HOOK = "an optimizer hook sets it"


def layout_of(values: dict[str, Any]) -> Layout | None:
    """Which of the two a file has; None for one of ours.

    Raises:
        ConfigError: for a mixture of the two.
    """
    here: dict[Layout, list[str]] = {layout: [key for key in marks if key in values] for layout, marks in MARKS.items()}
    if here["local"] and here["trainer"]:
        message = f"{', '.join(here['local'])} beside {', '.join(here['trainer'])}: a mixture of layouts; keep the keys of one"
        raise ConfigError(message)
    return next((layout for layout, keys in here.items() if keys), None)


@dataclass(slots=True)
class Found:
    """What a file says: options of the run, arguments of its stages, and what there is to tell.

    `hooks` are those that are given, `workers_per_rank` is set where the file counts loader workers per rank.
    """

    hooks: Collection[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    workers_per_rank: int | None = None
    unmapped: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    """Names of the options that the file does not give and that its system has a default of its own for."""
    said: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Tell something about what was read."""
        self.said.append(text)

    def notes(self) -> list[str]:
        """A line for each key without a counterpart, then what was converted, then the defaults that were filled in."""
        values = {name: self.options[name] for name in self.defaults if name in self.options}
        texts = [f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]
        filled = [f"not given there, so as by default there: {', '.join(texts)}"] if texts else []
        return [*(f"not mapped: {line}" for line in self.unmapped), *self.said, *filled]

    def default(self, name: str, value: object) -> None:
        """Take a default of the other system for an option that the file does not give."""
        self.options[name] = value
        self.defaults.append(name)

    def put(self, into: dict[str, Any], name: str, value: object, path: str) -> None:
        """Take an option, checked; one that is not available yet is listed.

        Raises:
            ConfigError: for a wrong value, with the path of its key.
        """
        try:
            into.update(TrainConfig.read({name: value}) if not not_yet(name) else TrainConfig(**{name: value}).to_json())
        except ConfigError as error:
            if "not available yet" in str(error):
                self.unmapped.append(f"{path}, which is not available yet")
                return
            message = f"{path}: {error}"
            raise ConfigError(message) from None


class Section:
    """A mapping of a file whose keys are taken one by one; `close` lists those that nobody took."""

    def __init__(self, values: object, path: str, found: Found) -> None:
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            message = f"{path}={values!r} must be a mapping"
            raise ConfigError(message)
        self._values, self._path, self._found = dict(values), path, found

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and says something; null says nothing."""
        return self._values.get(key) is not None

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def path(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str) -> Any:
        """The value of a key, which counts as read; None where there is none."""
        return self._values.pop(key, None)

    def section(self, key: str) -> Section | None:
        """The mapping under a key."""
        return None if (value := self.take(key)) is None else Section(value, self.path(key), self._found)

    def put(self, key: str, name: str, into: dict[str, Any] | None = None) -> None:
        """Take a key as an option of ours."""
        if key in self:
            self._found.put(self._found.options if into is None else into, name, self._values[key], self.path(key))
        self.take(key)

    def flag(self, key: str) -> bool | None:
        """A key that is true or false."""
        return cast("bool | None", self._right(key, lambda value: isinstance(value, bool), "true or false"))

    def count(self, key: str, at_least: int = 1) -> int | None:
        """A key that is a whole number."""

        def counts(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= at_least

        return cast("int | None", self._right(key, counts, f"a whole number, at least {at_least}"))

    def word(self, key: str) -> str | None:
        """A key that is a text."""
        return cast("str | None", self._right(key, lambda value: isinstance(value, str), "a word"))

    def _right(self, key: str, is_right: Callable[[object], bool], rule: str) -> object:
        """The value of a key, which counts as read.

        Raises:
            ConfigError: where it is there and not as it must be.
        """
        value = self.take(key)
        if value is not None and not is_right(value):
            message = f"{self.path(key)}={value!r} must be {rule}"
            raise ConfigError(message)
        return value

    def refuse(self, key: str, why: str) -> None:
        """List a key, if it is there, with the reason."""
        if self.take(key) is not None:
            self._found.unmapped.append(f"{self.path(key)}: {why}")

    def close(self, why: str = "") -> None:
        """List what is left."""
        self._found.unmapped += [f"{self.path(key)}{f': {why}' if why else ''}" for key in self._values]
        self._values = {}


def take_optimizer(section: Section, kind: str | None, into: dict[str, Any], found: Found) -> None:
    """`type` and its arguments; torch's class names and their lower case are the same."""
    path = section.path("type").replace(".config.type", ".type")
    if "optimizer" in found.hooks:
        found.note(f"{path.removesuffix('.type')} is left out: the hook makes it")
        return
    if kind is None:
        found.note(f"{path} is not given: {TrainConfig().optimizer}")
    elif kind.lower() in OPTIMIZERS:
        into["optimizer"] = kind.lower()
    else:
        message = f"{path}={kind} must be one of {', '.join(OPTIMIZERS)}, or left to an optimizer hook.{suggest(kind.lower(), OPTIMIZERS)}"
        raise ConfigError(message)
    for name in ("lr", "weight_decay", "momentum", "fused"):
        section.put(name, name, into)
    section.close(_HOOK)


_PLATEAU = {"mode": "min", "factor": 0.1, "patience": 10, "threshold": 1e-4, "threshold_mode": "rel", "cooldown": 0, "min_lr": 0, "eps": 1e-8}
"""torch.optim.lr_scheduler.ReduceLROnPlateau's own, which the schedule plateau has."""


def take_scheduler(section: Section, kind: str | None, epochs: int | None, into: dict[str, Any], found: Found) -> None:
    """A schedule of ours where it is the same, else listed: the learning rate then stays constant."""
    path = section.path("type").replace(".config.type", "").removesuffix(".type")
    if "scheduler" in found.hooks:
        found.note(f"{path} is left out: the hook makes it")
        return
    word = re.sub(r"lr$", "", (kind or "").lower())
    if word in ("", "none"):
        section.close()
        return
    if word in ("cosine", "cosineannealing"):
        length, floor = section.count("T_max"), section.take("eta_min")
        if (length is None or length == epochs) and not floor:
            into["schedule"] = "cosine"
        else:
            over = "" if length is None else f" over {length} epochs"
            down = f" down to {floor}" if floor else ""
            found.unmapped.append(f"{path}: cosine{over}{down}; ours goes to 0 over the epochs of the stage. A scheduler hook makes it")
    elif word in ("reduce_on_plateau", "plateau", "reducelronplateau"):
        into["schedule"] = "plateau"
        for name, value in _PLATEAU.items():
            own = section.take(name)
            if own is not None and own != value:
                found.unmapped.append(f"{path}.{name}: plateau has {value} here; a scheduler hook sets it")
    elif word == "linear" and section.take("start_factor") == 1.0 and section.take("end_factor") == 1.0:
        section.take("total_iters")
    else:
        found.unmapped.append(f"{path}: {kind}; the learning rate stays constant. A scheduler hook makes it")
    section.close()
