"""The help of %%ddp_train: what ``-h`` prints and ``%%ddp_train?`` shows, made from the definition of the options.

Runs in the kernel; imports neither torch nor Jupyter.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from nbddp.kernel.options import Option, synonyms_of, train_options
from nbddp.rules import not_yet

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 120
_COLUMN = 34

HOOK_HELP = {
    "loss": "loss(output, target), a mean over samples; the batch is (*inputs, target)",
    "training_step": "training_step(model, batch) returns the loss, or a dict: loss, optionally weight, output, target, further scalars to record",
    "validation_step": "validation_step(model, batch), the same for validation; default: training_step without gradients",
    "optimizer": "optimizer(model) returns a torch.optim.Optimizer; excludes --optimizer --lr --weight-decay --momentum --fused",
    "scheduler": "scheduler(optimizer) returns a learning-rate scheduler; see --scheduler-interval",
    "collate_fn": "collate_fn(samples) makes a batch",
    "sampler": "the order of the training samples: yields indices and has a length, or sampler(dataset)",
    "metrics": "a dict of names and metrics, computed in validation",
    "stages": "a list of nbddp.Stage(name, freeze=, train_only=, **options), one after the other",
    "on_epoch_end": "on_epoch_end(state), called on rank 0",
}

_HEAD = """\
%%ddp_train MODEL DATA [options]     in the first line of a cell, hooks below it
%ddp_train MODEL DATA [options]      without a body
%ddp_plan, %%ddp_plan                the same line: shows what would happen, starts nothing

Train a model of the notebook with DistributedDataParallel, in processes of its own, and bring the weights back.
MODEL and DATA are names or expressions of the notebook; {expr} and $name put a value of the notebook into the line.

    %%ddp_train net train_set --val val_set -n 4 --epochs 10 --batch-size 256
    loss = nn.CrossEntropyLoss()
"""


def help_text() -> str:
    """The whole help, grouped, 120 columns wide."""
    parts = [_HEAD, "names that the cell may define", _rows((f"  {name}", text) for name, text in HOOK_HELP.items())]
    for group, options in groupby(train_options().values(), key=lambda option: option.group):
        parts += ["", group, _rows((f"  {_flag(option)}", _meaning(option)) for option in options)]
    return "\n".join(parts) + "\n"


def _flag(option: Option) -> str:
    short = "-n, " if option.name == "nproc" else ""
    spelling = f"--no-{option.spelling[2:]}" if option.flag and option.default is True else option.spelling
    return f"{short}{spelling} {option.metavar}".rstrip()


def _meaning(option: Option) -> str:
    others = [name for name in synonyms_of(option.name) if name != "n"]
    later = not_yet(option.name)
    return "; ".join([option.help, *_default(option)]) + (f" ({later})" if later else "") + (f" (elsewhere: {', '.join(others)})" if others else "")


def _default(option: Option) -> list[str]:
    if option.flag:
        return ["on by default, the flag turns it off"] if option.default is True else []
    return [] if option.default is None else [f"default: {option.default}"]


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for left, right in rows:
        filled = textwrap.wrap(right, WIDTH - _COLUMN, break_on_hyphens=False, break_long_words=False)
        if len(left) >= _COLUMN - 1:
            lines.append(left)
            left = ""
        lines += [f"{head:<{_COLUMN}}{text}" for head, text in zip([left, *[""] * len(filled)], filled, strict=False)]
    return "\n".join(lines)
