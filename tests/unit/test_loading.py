"""Files of every kind into real models, by whatever names them; and that nothing which they carry is run."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import subprocess
import sys
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from torch import nn

import nbddp
from nbddp import checkpoint
from nbddp.checkpoint import load_checkpoint, model_state, write
from nbddp.checkpoint.door import load_file
from nbddp.errors import CheckpointError, ConfigError
from nbddp.wrappers import PREFIXES
from support.loading import MODELS, Recurrent, ResNet, lightning, prefixed, refused, same, table


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


@pytest.fixture
def file(tmp_path):
    def save(content, name="x.pt"):
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


# -- kinds of files


WRAPPED = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": []}, "loss": torch.tensor(1.0)},
    "model_state_dict": lambda state: {"model_state_dict": state, "args": {"lr": 0.1}},
    "nested": lambda state: {"checkpoint": {"model": state}, "epoch": 1},
    "twice": lambda state: {"model": {"state_dict": state, "step": 2}},
    "lightning": lightning,
}


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_state_dicts_are_found_wherever_trainers_put_them(tmp_path, make, how, zipped):
    net, other = make(), make()
    torch.save(WRAPPED[how](net.state_dict()), tmp_path / "x", _use_new_zipfile_serialization=zipped)
    assert load_checkpoint(tmp_path / "x", other) is other
    assert same(net, other)
    assert same(load_checkpoint(tmp_path / "x"), net)
    assert isinstance(load_checkpoint(tmp_path / "x"), OrderedDict)


def test_a_file_of_ours_is_loaded(tmp_path, make):
    net, other = make(), make()
    write(tmp_path / "x.pt", {"model": model_state(net), "epoch": 2, "step": 30})
    assert same(load_checkpoint(tmp_path / "x.pt", other), net)
    assert same(load_checkpoint(tmp_path / "x.pt"), net)
    assert load_file(tmp_path / "x.pt", other).facts() == ["epoch 2, step 30"]


@pytest.mark.parametrize("name", ["x.safetensors", "weights.bin", "x.pt"])
def test_safetensors_are_known_by_their_content(tmp_path, make, name):
    net, other = make(), make()
    safetensors.torch.save_model(net, str(tmp_path / name), metadata={"epoch": "4", "author": "someone"})
    assert load_file(tmp_path / name, other).facts() == ["epoch 4"]
    assert same(net, other)
    assert set(load_checkpoint(tmp_path / name)) == set(net.state_dict())  # the names of tied tensors that the file's metadata tell included


def test_what_was_read_of_safetensors_outlives_the_file_and_is_the_callers(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3), "half": torch.ones(2, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}, path)
    state = load_checkpoint(path)
    path.unlink()
    assert (state["w"].add_(1).tolist(), state["half"].dtype, tuple(state["none"].shape)) == ([2.0, 2.0, 2.0], torch.bfloat16, (0, 2))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:20],
        lambda data: data[:-2],
        lambda data: data + b"xx",
        lambda data: data.replace(b"F32", b"F99"),
        lambda data: data.replace(b'"w"', b'"w'),
        lambda data: data.replace(b"[0,12]", b"[8,12]"),
        lambda data: (10**7).to_bytes(8, "little") + data[8:],
    ],
)
def test_damaged_safetensors_are_called_so(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path)
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    assert re.match(rf"{path} is not a complete checkpoint: it is (a safetensors file that was )?cut off", refused(path, nn.Linear(1, 1)))


def test_a_pickled_module_is_taken_apart_where_its_code_may_run(file):
    net = nn.Linear(2, 2)
    for content in (net, {"model": net, "epoch": 2}):
        path = file(content)
        assert "holds pickled objects beside tensors (torch.nn.modules.linear.Linear)" in refused(path, nn.Linear(2, 2))
        assert same(load_checkpoint(path, nn.Linear(2, 2), weights_only=False), net)


def test_a_model_without_entries_is_loaded_from_any_wrapper(file):
    for content in ({"model": nn.Tanh().state_dict(), "epoch": 2}, {"state_dict": nn.Tanh().state_dict()}):
        assert dict(load_checkpoint(file(content))) == {}


def test_a_model_without_entries_is_loaded(file):
    assert load_checkpoint(file(nn.ReLU().state_dict()), nn.ReLU()).state_dict() == {}


# -- which state dict of several


def test_averaged_weights_are_not_taken_and_not_passed_over_in_silence(file, capsys):
    net, averaged = nn.Linear(2, 2), nn.Linear(2, 2)
    path = file({"model": net.state_dict(), "model_ema": averaged.state_dict(), "optimizer": {}})
    assert same(load_checkpoint(path, nn.Linear(2, 2)), net)
    assert capsys.readouterr().out == f"{path}: from its entry model, not model_ema\n"
    path = file({"state_dict": net.state_dict(), "ema": {"shadow": {f"module.{name}": value for name, value in averaged.state_dict().items()}}})
    assert same(load_checkpoint(path), net)
    assert capsys.readouterr().out == f"{path}: from its entry state_dict, not ema.shadow\n"


@pytest.mark.parametrize(
    "content, said",
    [
        ({"ema": "net"}, "holds no state dict of a model under a usual name: keys ema; its entry 'ema' may be one: model.load_state_dict"),
        (
            {"student": "net", "teacher": "net"},
            r"holds several state dicts \(student, teacher\), and which one is meant can't be told: choose one, as in model",
        ),
        ({"model": "net", "state_dict": "net"}, r"holds several state dicts \(model, state_dict\), and which one is meant"),
        ({"optimizer": {"model": "net"}}, "holds no state dict of a model: keys optimizer$"),
        ({"model": {"lr": 0.1}}, "holds no state dict of a model: keys model$"),
    ],
)
def test_where_a_choice_is_left_nothing_is_guessed(file, content, said):
    net = nn.Linear(2, 2)

    def filled(value):
        return net.state_dict() if value == "net" else {key: filled(item) for key, item in value.items()} if isinstance(value, dict) else value

    path = file(filled(content))
    message = refused(path, nn.Linear(2, 2))
    assert re.search(said, message)
    if "model.load_state_dict" in message:
        other = nn.Linear(2, 2)
        exec(message[message.index("model.load_state_dict") :], {"model": other, "torch": torch})
        assert same(other, net)


# -- Lightning


@pytest.mark.parametrize("prefix", ["model.", "net.", "model._orig_mod.", "_orig_mod.model.", "module.net.module."])
def test_the_attribute_of_a_lightning_module_is_left_out_and_said(file, make, prefix, capsys):
    net = make()
    path = file(lightning(prefixed(net.state_dict(), prefix), lr=0.1), "epoch=3-step=120.ckpt")
    assert same(load_checkpoint(path, make()), net)
    attribute = next(part for part in prefix.split(".") if part not in PREFIXES)
    assert capsys.readouterr().out == f"{path}: from what is below {attribute}. in it\n"
    loaded = load_file(path, make())
    assert loaded.facts()[0] == "epoch 3, step 120"
    assert loaded.below == attribute


def test_a_lightning_module_itself_is_loaded_as_it_is(file, capsys):
    net = nn.ModuleDict({"model": ResNet(), "loss": nn.Linear(1, 1)})
    assert same(load_checkpoint(file(lightning(net.state_dict())), copy.deepcopy(net)), net)
    assert capsys.readouterr().out == ""


def test_what_is_beside_the_model_in_a_lightning_module_is_left_out_only_when_asked(file, capsys):
    net = ResNet()
    path = file(lightning({**prefixed(net.state_dict(), "net."), "criterion.weight": torch.ones(5)}))
    message = refused(path, ResNet())
    assert table(message)[0] == "what is below net. in the file fits, and there is more beside it: strict=False loads that part alone"
    assert same(load_checkpoint(path, ResNet(), strict=False), net)
    said = capsys.readouterr().out
    assert f"{path}: from what is below net. in it; 32 entries loaded, left out:" in said
    assert "unexpected criterion.weight in the file alone" in " ".join(said.split())


@pytest.mark.parametrize("strict", [True, False])
def test_of_two_attributes_that_would_fit_none_is_taken(file, strict):
    net, averaged = Recurrent(), Recurrent()
    path = file(lightning({**prefixed(net.state_dict(), "model."), **prefixed(averaged.state_dict(), "ema.")}))
    other = Recurrent()
    message = refused(path, other, strict=strict)
    hint = table(message)[0]
    assert hint.startswith("what is below model. and below ema. in the file would each fit: choose one, as in model.load_state_dict(")
    exec(hint.partition("as in ")[2], {"model": other, "nbddp": nbddp, "FILE": path})
    assert same(other, net)


def test_an_attribute_is_not_left_out_where_the_rest_does_not_fit(file):
    message = refused(file(lightning(prefixed(ResNet(classes=7).state_dict(), "net."))), ResNet())
    assert "shape" not in message
    assert "all 32 names in the file that don't fit begin with 'net.', which the model's lack" in message


# -- nothing is run


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("wrap", [lambda state, code: {**state, "code": code}, lambda state, code: lightning(state, code=code)], ids=["bare", "lightning"])
def test_code_runs_only_where_it_is_asked_for_by_name(tmp_path, monkeypatch, name, zipped, wrap):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark, net, path = tmp_path / "ran", nn.Linear(2, 2), tmp_path / name
    torch.save(wrap(net.state_dict(), Code(mark)), path, _use_new_zipfile_serialization=zipped)
    for model in (None, nn.Linear(2, 2)):
        for strict in (True, False):
            with pytest.raises(
                CheckpointError, match=r"holds pickled objects beside tensors \((posix|nt)\.mkdir\); nbddp\.load_checkpoint\(FILE, weights_only=False\) runs"
            ):
                load_checkpoint(path, model, strict)
    assert not mark.exists()
    with contextlib.suppress(CheckpointError):
        load_checkpoint(path, nn.Linear(2, 2), weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("value", [0, None, [], "", "False"])
@pytest.mark.parametrize("model", [None, nn.Linear(2, 2)])
def test_what_only_counts_as_false_runs_no_code(file, tmp_path, value, model):
    path = file({"model": nn.Linear(2, 2).state_dict(), "code": Code(tmp_path / "ran")})
    with pytest.raises(ConfigError, match=r"weights_only=.* must be True or False"):
        load_checkpoint(path, model, weights_only=value)
    assert not (tmp_path / "ran").exists()


def test_a_class_in_the_hyper_parameters_is_named(file):
    net = nn.Linear(2, 2)
    path = file(lightning(prefixed(net.state_dict(), "model."), args=argparse.Namespace(lr=0.1)), "last.ckpt")
    message = refused(path, nn.Linear(2, 2))
    assert message == f"{path} can't be read: it holds pickled objects beside tensors (argparse.Namespace); " + (
        "nbddp.load_checkpoint(FILE, weights_only=False) runs what they say, for files that you trust"
    )
    assert same(load_checkpoint(path, nn.Linear(2, 2), weights_only=False), net)


# -- what names a checkpoint


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two run directories of the folder in which runs are looked for."""
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path / "runs"))
    for tail in ("k3f9", "k3f8"):
        folder = tmp_path / "runs" / f"20261129-130501-digits-{tail}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "spec.json").write_text("{}")
        write(folder / "checkpoints" / "last.pt", {"model": model_state(nn.Linear(2, 2))})
    return tmp_path / "runs"


def test_a_run_is_named_by_its_id_or_its_directory(runs):
    folder = runs / "20261129-130501-digits-k3f9"
    wanted = load_checkpoint(folder / "checkpoints" / "last.pt")
    for name in (folder, str(folder), folder.name, "k3f9", "digits-k3f9"):
        assert same(load_checkpoint(name), wanted)
    for name, said in (("digits", "2 runs match digits"), ("k3f7", f"k3f7 is neither a file nor a run: no run k3f7 in {runs}")):
        with pytest.raises(CheckpointError, match=said):
            load_checkpoint(name)


def test_paths_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "x y.pt")
    assert list(load_checkpoint("~/x y.pt")) == ["weight", "bias"]


def test_a_folder_that_is_no_run_says_what_is_in_it(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path} is a folder, not a run directory; and it holds no checkpoint"):
        load_checkpoint(tmp_path)
    for name in ("model.safetensors", "b.ckpt", "readme.md"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"is a folder, not a run directory; name one of its files: b\.ckpt, model\.safetensors$"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".pt", "x\0y.pt", "x\ny"])
def test_a_text_that_can_not_be_a_path_is_an_error_in_a_line(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path))
    with pytest.raises(CheckpointError):
        load_checkpoint(name)


AS_NOBODY = """
import os, sys
import nbddp
from nbddp.checkpoint.door import Place
from nbddp.errors import CheckpointError
os.getuid() or os.setuid(65534)
try:
    Place.of(sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_where_the_system_does_not_let_us_look_it_says_so(tmp_path):
    (tmp_path / "closed").mkdir()
    torch.save({}, tmp_path / "closed" / "x.pt")
    (tmp_path / "closed").chmod(0)
    try:
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, tmp_path / "closed" / "x.pt"], capture_output=True, text=True, timeout=60, check=True)
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert done.stdout == f"{tmp_path}/closed/x.pt can't be read: Permission denied\n"


def test_a_link_to_nothing_is_not_listed_as_a_file(tmp_path):
    (tmp_path / "x.pt").symlink_to("nowhere")
    torch.save({}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match=rf"no checkpoint {tmp_path}/x\.pt; {tmp_path} has y\.pt$"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_missing_file_lists_others_the_nearest_first(tmp_path):
    for name in [*(f"{letter}.pt" for letter in "abcdefgh"), "epoch=3.ckpt", "epoch-3.safetensors", "notes.txt"]:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "epoch-3.ckpt")
    assert str(caught.value) == (
        f"no checkpoint {tmp_path}/epoch-3.ckpt; {tmp_path} has epoch=3.ckpt, epoch-3.safetensors, a.pt, b.pt, c.pt, d.pt, e.pt, f.pt and 2 more"
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((5,), "load_checkpoint takes a checkpoint file, a run, its id or its directory, not a int"),
        ((None,), "not a NoneType"),
        (("",), "the path of the checkpoint is empty"),
        (("~nobody-of-this-name/x.pt",), "~nobody-of-this-name/x.pt: Could not determine home directory"),
        (("x.pt", None, 0), "load_checkpoint: strict=0 must be True or False"),
        (("x.pt", None, "no"), "load_checkpoint: strict='no' must be True or False"),
        ((nn.Linear(1, 1), "x.pt"), "not a Linear; the model comes second"),
    ],
)
def test_arguments_that_name_no_checkpoint(arguments, said):
    with pytest.raises(ConfigError, match=said):
        load_checkpoint(*arguments)


@pytest.mark.parametrize("model, what", [(ResNet, "the class ResNet"), ({}, "a dict")])
def test_what_is_no_module_is_not_loaded_into(file, model, what):
    with pytest.raises(ConfigError, match=rf"a checkpoint is loaded into a torch\.nn\.Module, not into {what}"):
        load_checkpoint(file(ResNet().state_dict()), model)


def test_the_public_function_is_this_one():
    assert nbddp.load_checkpoint is load_checkpoint is checkpoint.load_checkpoint
