"""The help covers what there is."""

from __future__ import annotations

import pytest

from nbddp.config import TrainConfig
from nbddp.kernel.help import HOOK_HELP, help_text
from nbddp.kernel.options import INVOCATION, spelled
from nbddp.kernel.request import HOOKS


def test_every_hook_is_described():
    assert set(HOOK_HELP) == set(HOOKS)
    rows = help_text().splitlines()
    for name in HOOKS:
        row = next(line for line in rows if line.startswith(f"  {name} "))
        assert HOOK_HELP[name].split()[0] in row


@pytest.mark.parametrize("name", [*TrainConfig.model_fields, *(option.name for option in INVOCATION)])
def test_every_option_is_described_once(name):
    text = help_text()
    negated = name in TrainConfig.model_fields and TrainConfig.model_fields[name].default is True
    spelling = spelled(f"no_{name}" if negated else name)
    rows = [line for line in text.splitlines() if line.startswith(("  --", "  -n, --"))]
    assert len([row for row in rows if spelling in row.split()[:2]]) == 1


def test_defaults_and_other_names_are_told():
    text = help_text()
    assert "default: adamw" in text
    assert "(elsewhere: learning_rate)" in text
    assert "-n, --nproc N" in text
