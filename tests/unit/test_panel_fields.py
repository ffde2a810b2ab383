"""Which control each option gets, and that what a control shows is what it says."""

from __future__ import annotations

import pytest
from hypothesis import given

from nbddp.config import TrainConfig
from nbddp.kernel.panel_fields import controls, entered, shown
from nbddp.kernel.panel_fill import given_texts, read_texts
from nbddp.rules import not_yet
from support.configs import configs

ALL = {control.name: control for members in controls({}).values() for control in members}


def test_every_field_has_one_control_in_the_group_of_its_definition():
    assert list(ALL) == list(TrainConfig.model_fields)
    for group, members in controls({}).items():
        assert {TrainConfig.model_fields[control.name].json_schema_extra["group"] for control in members} == {group}
    assert all(ALL[name].help.startswith(field.description) for name, field in TrainConfig.model_fields.items())


def test_what_is_not_available_yet_is_shown_and_can_not_be_set():
    assert {name for name, control in ALL.items() if not control.available} == {name for name in ALL if not_yet(name)} != set()
    assert all(control.help.endswith("not available yet") for control in ALL.values() if not control.available)


@pytest.mark.parametrize(
    "name, kind, choices",
    [
        ("optimizer", "choice", [("default (adamw)", ""), ("adam", "adam"), ("adamw", "adamw")]),
        ("lr_scale", "choice", [("default", ""), ("linear", "linear"), ("sqrt", "sqrt")]),
        ("pin_memory", "choice", [("default", ""), ("true", "true"), ("false", "false"), ("auto", "auto")]),
        ("precision", "choice", [("default (auto)", ""), ("auto", "auto"), ("bf16", "bf16")]),
        ("shuffle", "switch", []),
        ("lr", "text", []),
        ("batch_size", "text", []),
        ("val_every", "text", []),
        ("norm", "suggested", []),
        ("devices", "suggested", []),
    ],
)
def test_kinds(name, kind, choices):
    assert ALL[name].kind == kind
    assert list(ALL[name].choices[: len(choices)]) == choices
    assert ALL[name].available


def test_the_default_is_what_a_loader_brings():
    brought = {control.name: control for members in controls({"shuffle": False, "num_workers": 4, "pin_memory": True}).values() for control in members}
    assert (brought["shuffle"].default, brought["num_workers"].default, brought["pin_memory"].choices[0]) == (False, "4", ("default (true)", ""))
    assert brought["num_workers"].help.endswith("the DataLoader's where it is left out")
    assert [entered(brought["shuffle"], value) for value in (True, False)] == [True, None]
    assert [entered(ALL["shuffle"], value) for value in (True, False)] == [None, False]


@given(configs())
def test_a_filled_control_says_what_it_was_filled_with(config):
    texts = given_texts(config)
    said = {name: text for name, control in ALL.items() if (text := entered(control, shown(control, texts.get(name)))) is not None}
    blank = {name for name, text in texts.items() if isinstance(text, str) and not text.strip()}  # a name of spaces can't be typed
    assert said == {name: text for name, text in texts.items() if name not in blank and (ALL[name].kind != "switch" or text is not ALL[name].default)}


@given(configs())
def test_texts_are_read_as_a_line_reads_them(config):
    texts = {name: text for name, text in given_texts(config).items() if not (isinstance(text, str) and text.endswith("\\"))}
    assert read_texts(texts) == {name: getattr(config, name) for name in texts}
