"""Random configurations: values of every option that is available, and texts that a line can trip over."""

from __future__ import annotations

from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.options import train_options
from nbddp.rules import not_yet

NORMS = ("auto", "keep", "sync", "batch", "layer", "group", "none")
TEXT = st.text(min_size=1)
# What a line can trip over: quotes, braces, dollars, dashes, comments, brackets, backslashes, line ends of all kinds.
TRICKY = st.text(alphabet="ab n'\"{}$#-=,\\()[]%!:.*\n\r\t\u2028\x0b\x00é–", min_size=1)
ANY_TEXT = st.one_of(TEXT, TRICKY)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
PATTERN = ANY_TEXT.filter(lambda text: "=" not in text)
WANDB = st.text(alphabet="ab c.-_='\"{}$", min_size=1).map(str.strip).filter(bool)
SPECIAL = {
    "devices": st.one_of(st.sampled_from(["auto", "cpu"]), st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)),
    "max_time": POSITIVE,
    "val_split": st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
    "val_every": st.builds("{} {}".format, st.integers(1, 10**6), st.sampled_from(["epochs", "steps"])),
    "checkpoint_every": st.builds("{} {}".format, st.integers(1, 10**6), st.sampled_from(["epochs", "steps", "min"])),
    "norm": st.one_of(st.sampled_from(NORMS), st.dictionaries(PATTERN, st.sampled_from(NORMS), max_size=3)),
    "wandb": st.dictionaries(st.sampled_from(["group", "name", "entity", "job_type"]), WANDB).flatmap(
        lambda others: st.builds(lambda project: {"project": project, **others}, WANDB)
    ),
}


def of_field(name: str) -> st.SearchStrategy[Any]:
    """Values of a field as Python gives them, also such as rules refuse."""
    option, default = train_options()[name], TrainConfig.model_fields[name].default
    if name in SPECIAL:
        return SPECIAL[name]
    if option.flag:
        return st.sampled_from([True, False, *([None] if default is None else [])])
    if option.words:
        return st.sampled_from(option.words)
    kind = {"N": st.integers(0, 10**12), "X": POSITIVE}.get(option.metavar, ANY_TEXT)
    return st.one_of(st.none(), kind) if default is None else kind


AVAILABLE = [name for name in TrainConfig.model_fields if not not_yet(name)]


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Configurations that no rule refuses."""
    names = draw(st.lists(st.sampled_from(AVAILABLE), unique=True, max_size=8))
    try:
        return TrainConfig(**{name: draw(of_field(name)) for name in names})
    except ConfigError:
        reject()
