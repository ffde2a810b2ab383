"""The written cell, read back: by the parser of the line alone, and by a shell that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nbddp.config import TrainConfig
from nbddp.errors import ConfigError
from nbddp.kernel.cell_writer import MEANT, Call, told, value_text, write_cell, write_line
from nbddp.kernel.line import parse, uncommented
from nbddp.kernel.names import expand
from support import shell as shells
from support.configs import AVAILABLE, TRICKY, configs, of_field

NAMES = {"net": 1, "n": 4, "train_set": 2}


def read(line):
    """As the magic reads a line."""
    return parse(expand(uncommented(line), NAMES))


def written(call):
    """The line; None where no line can say it."""
    try:
        return write_line(call)
    except ConfigError as error:
        if "ends with a backslash" not in str(error):
            raise
        return None


@settings(max_examples=400)
@given(configs())
def test_a_written_line_is_the_same_configuration(config):
    line = written(Call("net", "train_set", told(config)))
    assume(line is not None)
    assert line.splitlines() == [line]  # IPython ends a magic's line where Python ends lines
    back = TrainConfig(**read(line).options)
    assert back == config
    assert {name for name in config.given if name in MEANT or getattr(config, name) != TrainConfig.model_fields[name].default} == back.given


@given(configs())
def test_only_what_says_something_is_written(config):
    assert all(name in MEANT or getattr(config, name) != TrainConfig.model_fields[name].default for name in told(config))


@pytest.mark.parametrize("name", AVAILABLE)
@settings(max_examples=25)
@given(data=st.data())
def test_the_text_of_a_value_is_that_value(name, data):
    value = data.draw(of_field(name))
    try:
        fields = TrainConfig.read({name: value})
    except ConfigError:
        assume(False)
    text = value_text(name, fields[name])
    if text == "none" and name == "name":  # a run may be called so
        return
    line = written(Call("net", "train_set", {name: text}))
    assume(line is not None)
    assert TrainConfig.read(read(line).options) == fields


@given(model=TRICKY, data=TRICKY, val=TRICKY, loss=TRICKY, note=TRICKY)
def test_expressions_and_notes_come_back(model, data, val, loss, note):
    call = Call(model, data, {"epochs": "3"}, val=val, loss=loss, note=note, bind="first", background=True)
    line = written(call)
    if line is None:
        assert any(text.endswith("\\") for text in (model, data, val, loss, note))
        return
    back = read(line)
    assert (back.model, back.data, back.val, back.loss, back.note) == (model, data, val, loss, note)
    assert (back.bind, back.background, dict(back.options)) == ("first", True, {"epochs": "3"})


@pytest.mark.parametrize(
    "options, written",
    [
        ({"nproc": 4, "batch_size": 256, "lr": 3e-4, "precision": "bf16"}, "-n 4 --batch-size 256 --lr 0.0003 --precision bf16"),
        ({"lr": 3e-5, "weight_decay": 0.0}, "--lr 3e-5 --weight-decay 0"),
        ({"epochs": 1, "shuffle": True, "compile": False, "optimizer": "adamw"}, "--epochs 1 --shuffle"),
        ({"shuffle": False, "compile": True, "pin_memory": False}, "--no-shuffle --no-pin-memory --compile"),
        ({"max_time": "90 min", "val_every": "500 steps", "checkpoint_every": "10 min"}, "--max-time 90 min --val-every 500 steps --checkpoint-every 10 min"),
        ({"max_time": 2 * 3600}, "--max-time 2 h"),
        ({"max_time": 0.25}, '--max-time "0.25 s"'),
        ({"devices": [0, 2]}, "--devices 0,2"),
        ({"norm": {"encoder.*": "sync", "head": "keep"}}, "--norm encoder.*=sync,head=keep"),
        ({"norm": {"a,b": "sync"}}, "--norm {'a,b': 'sync'}"),
        ({"wandb": {"project": "digits", "tags": ["a", "b"]}}, "--wandb project=digits,tags=a+b"),
        ({"name": "my run", "run_root": Path("/data/a b")}, '--run-root "/data/a b" --name "my run"'),
        ({"name": 'it is "so"'}, "--name 'it is \"so\"'"),
        ({"name": ""}, '--name ""'),
        ({"name": "{n} $n"}, '--name "{{n}} {chr(36)}n"'),
        ({"name": "a\nb"}, '--name "a{chr(10)}b"'),
    ],
)
def test_how_a_line_is_written(options, written):
    assert write_line(Call("net", "train_set", told(TrainConfig(**options)))) == f"net train_set {written}"


def test_a_cell_has_its_body_below_and_without_one_is_a_line_magic():
    call = Call("net", "DataLoader(data, 4)", {"epochs": "2"}, val="held_out")
    assert write_cell(call, "\nloss = criterion\n\n") == "%%ddp_train net DataLoader(data, 4) --val held_out --epochs 2\nloss = criterion"
    assert write_cell(Call("net", "data", loss="nn.MSELoss()"), " \n") == "%ddp_train net data --loss nn.MSELoss()"


def test_what_no_line_can_say_is_refused():
    with pytest.raises(ConfigError, match="a comma separates the pairs"):
        told(TrainConfig(wandb={"project": "a,b"}))
    with pytest.raises(ConfigError, match=r"--name 'a b\\\\': a line can't say a text in quotes that ends with a backslash"):
        write_line(Call("net", "data", {"name": "a b\\"}))
    assert write_line(Call("net", "data", {"name": "ab\\"})).endswith("--name ab\\")


def test_a_shell_runs_the_written_cell(tmp_path):
    config = TrainConfig(nproc=2, name="{n} $n # 'x'\n%%y", epochs=3, norm={"*": "keep"}, lr=1e-5, max_time="90 min", shuffle=False)
    with shells.running(tmp_path) as shell:
        shell.ip.user_ns.update(net=nn.Linear(2, 1), train_set=[1, 2], n=3)
        request = shell.run(write_cell(Call("net", "train_set", told(config)), "loss = 3"))
    assert request is not None
    assert TrainConfig(**request.options) == config
    assert request.hooks == {"loss": 3}
