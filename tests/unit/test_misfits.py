"""What does not fit: the table that says so, and that nothing is touched then."""

from __future__ import annotations

import os
import re
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import nbddp
from nbddp.checkpoint import load_checkpoint, load_state, misfits, model_state, write
from nbddp.errors import CheckpointError
from support.loading import MODELS, Recurrent, ResNet, Transformer, bits, prefixed, refused, same, table, unchanged


@pytest.fixture
def file(tmp_path):
    def save(content, name="x.pt"):
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


# -- what does not fit


def test_what_does_not_fit_is_a_table_with_the_nearest_names(file):
    source = ResNet().state_dict()
    source["layers.0.convolution1.weight"] = source.pop("layers.0.conv1.weight")
    source["head.weight"] = torch.ones(7, 8)
    source["extra"] = torch.ones(1)
    path = file(source)
    message = refused(path, ResNet())
    assert message.splitlines()[0] == f"{path} does not fit ResNet; the model is unchanged:"
    assert table(message) == [
        "missing layers.0.conv1.weight in the model alone; the file has layers.0.convolution1.weight",
        "shape head.weight the model has (5, 8), the file (7, 8)",
        "unexpected layers.0.convolution1.weight in the file alone; the model has layers.0.conv1.weight",
        "unexpected extra in the file alone",
    ]
    assert misfits(ResNet(), source) == [line.strip() for line in message.splitlines()[1:]]
    columns = [[match.start() for match in re.finditer(r"(?<=  )\S", line)] for line in message.splitlines()[1:]]
    assert len({tuple(places) for places in columns}) == 1


def test_a_long_table_is_cut_and_the_rest_counted(file):
    path = file(nn.Sequential(*(nn.Linear(1, 1) for _ in range(20))).state_dict())
    lines = table(refused(path, nn.Sequential(*(nn.Linear(2, 1) for _ in range(30)))))
    assert len(lines) == 12
    assert lines[-1] == "and 29 more: 9 shape, 20 missing"
    assert len(misfits(nn.Sequential(*(nn.Linear(2, 1) for _ in range(30))), torch.load(path))) == 40


def test_a_large_model_that_does_not_fit_is_refused_at_once(file):
    names = [f"encoder.layers.{layer}.{part}.{end}" for layer in range(400) for part in ("attention", "linear1", "linear2") for end in ("weight", "bias")]
    path = file({name.replace("attention", "attn"): torch.ones(1) for name in names})
    net = nn.Module()
    for name in names:
        *parts, last = name.split(".")
        module = net
        for part in parts:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_buffer(last, torch.zeros(1))
    assert table(refused(path, net))[0] == "missing encoder.layers.0.attention.weight in the model alone; the file has encoder.layers.0.attn.weight"


def test_a_prefix_of_all_names_is_one_line(file):
    net = ResNet()
    path = file(prefixed(net.state_dict(), "backbone.net."))
    other = ResNet()
    (line,) = table(refused(path, other))
    assert line.startswith("all 32 names in the file that don't fit begin with 'backbone.net.', which the model's lack: ")
    exec(line.partition("lack: ")[2].rpartition(" loads it")[0], {"model": other, "nbddp": nbddp, "FILE": path})
    assert same(net, other)
    (line,) = table(refused(file(net.state_dict()), nn.ModuleDict({"net": other})))
    assert (
        line
        == "all 32 names in the model that don't fit begin with 'net.', which the file's lack: load into that part of it, nbddp.load_checkpoint(FILE, net.net)"
    )
    lines = table(refused(file(net.state_dict()), nn.ModuleDict({"net": other, "scale": nn.Linear(1, 1)})))
    assert [line.split()[:2] for line in lines] == [["all", "32"], ["missing", "scale.weight"], ["missing", "scale.bias"]]


def test_two_prefixes_are_a_choice(file):
    one, two, other = Recurrent(), Recurrent(), Recurrent()
    path = file({**prefixed(one.state_dict(), "student."), **prefixed(two.state_dict(), "teacher.")})
    (line,) = table(refused(path, other))
    assert line.startswith("the file has the model's names behind 'student.' and behind 'teacher.': choose one, as in model.load_state_dict(")
    exec(line.partition("as in ")[2], {"model": other, "nbddp": nbddp, "FILE": path})
    assert same(other, one)


def test_a_part_of_many_alike_is_not_taken_for_a_prefix(file):
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    lines = table(refused(file(nn.Linear(2, 2).state_dict()), net))
    assert [line.split()[0] for line in lines] == ["missing"] * 8 + ["unexpected"] * 2
    assert len(table(refused(file(nn.Linear(3, 2).state_dict()), nn.Sequential(nn.Linear(2, 2))))) == 4


def test_a_shape_is_said_once_for_tied_tensors(file):
    state = Transformer().state_dict()
    state["head.weight"] = torch.ones(3, 8)
    del state["embed.weight"]
    assert table(refused(file(state), Transformer())) == ["shape head.weight the model has (11, 8), the file (3, 8)"]
    load_checkpoint(file(state), net := Transformer(), strict=False)
    assert net.head.weight.shape == (11, 8)


def test_without_strict_what_fits_is_loaded_and_the_rest_said(file, capsys):
    source = ResNet(classes=7)
    net = ResNet()
    head = net.head.weight.detach().clone()
    path = file({**source.state_dict(), "more": torch.ones(1)})
    assert load_checkpoint(path, net, strict=False) is net
    assert torch.equal(net.head.weight, head)
    assert torch.equal(net.layers[1].bn2.weight, source.layers[1].bn2.weight)
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: 30 entries loaded, left out:\n  shape ")
    assert table(said) == [
        "shape head.weight the model has (5, 8), the file (7, 8)",
        "shape head.bias the model has (5,), the file (7,)",
        "unexpected more in the file alone",
    ]
    with pytest.raises(CheckpointError, match="does not fit Recurrent"):
        load_checkpoint(path, Recurrent(), strict=False)


# -- normalization


def swapped(model, kind):
    """The model with its BatchNorm layers replaced by another kind."""
    makers = {"group": lambda c: nn.GroupNorm(2, c), "layer": lambda c: nn.GroupNorm(1, c), "none": lambda _c: nn.Identity()}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, makers[kind](child.num_features))
    return model


@pytest.mark.parametrize(
    "kind, said",
    [
        ("layer", 'the file has no statistics of the BatchNorm layers (stem.1, layers.0.bn1, layers.0.bn2, layers.1.bn1 and 1 more), as after nbddp.swap_norm(net, "layer") or "group": swap first, then load'),  # noqa: E501
        ("none", 'the file has no entries of the BatchNorm layers (stem.1, layers.0.bn1, layers.0.bn2, layers.1.bn1 and 1 more), as after nbddp.swap_norm(net, "none"): swap first, then load'),  # noqa: E501
    ],
)  # fmt: skip
def test_a_file_of_a_swapped_model_names_the_swap(file, kind, said):
    assert table(refused(file(swapped(ResNet(), kind).state_dict()), ResNet()))[0] == said


def test_a_file_of_a_run_that_swapped_names_exactly_that(tmp_path):
    net = swapped(ResNet(), "group")
    names = ["stem.1", "layers.0.bn1", "layers.0.bn2", "layers.1.bn1", "layers.1.bn2"]
    write(tmp_path / "x.pt", {"model": model_state(net), "norm": dict.fromkeys(names, "group")})
    assert 'as after nbddp.swap_norm(net, "group"): swap first, then load' in table(refused(tmp_path / "x.pt", ResNet()))[0]
    write(tmp_path / "x.pt", {"model": model_state(net), "norm": {**dict.fromkeys(names, "group"), "stem.1": "layer"}})
    assert 'as after nbddp.swap_norm(net, {"stem.1": "layer", "layers.0.bn1": "group", ' in table(refused(tmp_path / "x.pt", ResNet()))[0]


def test_a_part_that_was_swapped_is_named(file):
    net = ResNet()
    net.layers[0] = swapped(net.layers[0], "layer")
    net.stem[1] = nn.Identity()
    assert table(refused(file(net.state_dict()), ResNet()))[0] == (
        "the file has no statistics of 2 BatchNorm layers (layers.0.bn1, layers.0.bn2) and no entries of 1 BatchNorm layer (stem.1), as after "
        'nbddp.swap_norm(net, "layer", only=["layers.0.bn1", "layers.0.bn2"]) or "group" and nbddp.swap_norm(net, "none", only=["stem.1"]): '
        "swap first, then load"
    )


@pytest.mark.parametrize("kind, types", [("group", "GroupNorm"), ("layer", "GroupNorm"), ("none", "Identity")])
def test_a_file_from_before_a_swap_says_to_load_first(file, kind, types):
    line = table(refused(file(ResNet().state_dict()), swapped(ResNet(), kind)))[0]
    assert line == (
        f"the file has running statistics of BatchNorm where the model has {types} (layers.0.bn1, layers.0.bn2, layers.1.bn1, layers.1.bn2 and 1 more): "
        f'load before swapping. Build the model anew, load into it, then nbddp.swap_norm(net, "{kind}")'
    )


def test_no_swap_is_named_where_it_would_not_be_enough(file):
    state = ResNet(classes=7, norm=lambda c: nn.GroupNorm(2, c)).state_dict()
    assert "swap_norm" not in refused(file(state), ResNet())
    state = {name: value for name, value in ResNet().state_dict().items() if name != "stem.1.running_mean"}
    assert "swap_norm" not in refused(file(state), ResNet())
    assert "swap_norm" not in refused(file({**ResNet().state_dict(), "head.running_mean": torch.ones(1)}), ResNet())


def test_files_without_counters_of_batches_fit_where_torch_takes_them(file, tmp_path):
    net = ResNet()
    state = OrderedDict((name, value) for name, value in net.state_dict().items() if "num_batches" not in name)
    assert same(load_checkpoint(file(state), ResNet()), net)
    safetensors.torch.save_file(dict(state), tmp_path / "x.safetensors")
    assert same(load_checkpoint(tmp_path / "x.safetensors", ResNet()), net)
    state._metadata = net.state_dict()._metadata
    assert {line.split()[0] for line in table(refused(file(state), ResNet()))} == {"missing"}


def test_buffers_that_are_not_saved_are_not_missed_and_those_of_old_files_ignored(file):
    net, other = Transformer(), Transformer()
    mask = other.mask.clone()
    assert "mask" not in net.state_dict()
    load_checkpoint(file({**net.state_dict(), "mask": torch.zeros(9, 9)}), other)
    assert same(net, other)
    assert torch.equal(other.mask, mask)


# -- nothing is touched


class Extra(nn.Linear):
    """Has a state of its own, and refuses some."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        if self.seen < 0:
            message = "seen must not be negative"
            raise ValueError(message)


def test_extra_states_travel_and_one_that_raises_leaves_the_model(file):
    net, other = nn.Sequential(nn.Linear(2, 2), Extra()), nn.Sequential(nn.Linear(2, 2), Extra())
    net[1].seen = 7
    load_checkpoint(file(net.state_dict()), other)
    assert other[1].seen == 7
    net[1].seen = -1
    message = refused(path := file(net.state_dict()), other)
    assert message == f"{path} could not be loaded into Sequential; the model is unchanged: ValueError: seen must not be negative"
    assert other[1].seen == 7
    state = {name: value for name, value in net.state_dict().items() if "extra" not in name}
    assert table(refused(file(state), other)) == ["missing 1._extra_state in the model alone"]


@pytest.mark.parametrize("error", [ValueError("not this one"), KeyError("x"), RuntimeError("no")])
@pytest.mark.parametrize("register", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"])
def test_hooks_that_raise_leave_the_model(file, register, error):
    net = ResNet()

    def hook(*_):
        raise error

    getattr(net.head, register)(hook)
    assert f"the model is unchanged: {type(error).__name__}: " in refused(file(ResNet().state_dict()), net)


def test_an_interrupt_leaves_the_model(file):
    net = ResNet()
    before = bits(net)

    def hook(*_):
        raise KeyboardInterrupt

    net.head.register_load_state_dict_post_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(file(ResNet().state_dict()), net)
    assert unchanged(net, before)


def test_a_tensor_that_can_not_be_written_to_does_not_keep_the_others_from_being_undone(file):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].register_buffer("x", torch.zeros(1).expand(3), persistent=False)
    net.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    assert "ZeroDivisionError" in refused(file({name: value + 1 for name, value in net.state_dict().items()}), net)


class Tells(nn.Module):
    """Has a `load_state_dict` of its own that returns nothing, and takes what it loads out of what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def state_dict(self):
        return super().state_dict()

    def load_state_dict(self, state, strict=True):
        super().load_state_dict({name: state.pop(name) for name in list(state)}, strict=strict)


def test_a_model_whose_own_method_tells_nothing_is_loaded_or_left(file, capsys):
    net, wanted = Tells(), Tells()
    load_checkpoint(file(wanted.state_dict()), net)
    assert same(net, wanted)
    assert table(refused(file({"inner.weight": torch.ones(2, 2), "more": torch.ones(1)}), net)) == [
        'Missing key(s) in state_dict: "inner.bias".',
        'Unexpected key(s) in state_dict: "more".',
    ]
    load_checkpoint(file({"inner.weight": torch.ones(2, 2)}), net, strict=False)
    assert torch.equal(net.inner.weight, torch.ones(2, 2))
    assert "1 entry loaded, left out:\n  missing  inner.bias" in capsys.readouterr().out


def test_names_of_a_file_can_not_write_to_a_terminal_or_fill_it(file):
    path = file({"a\n\x1b[31m": torch.ones(1), "b" * 5000: torch.ones(1), "": torch.ones(1), **nn.Linear(2, 2).state_dict()})
    lines = table(refused(path, nn.Linear(2, 2)))
    assert lines[0] == r"unexpected a\n\x1b[31m in the file alone"
    assert re.fullmatch(r"unexpected b{59}…b{60} in the file alone", lines[1])
    assert lines[2] == "unexpected '' in the file alone"


class Refuses(nn.Linear):
    def _load_from_state_dict(self, *arguments):
        arguments[-1].append("not here " * 200)


def test_what_torch_says_of_each_entry_is_cut(file):
    net = nn.ModuleList(Refuses(1, 1) for _ in range(40))
    lines = refused(file(net.state_dict()), net).splitlines()
    assert (len(lines), lines[-1].strip()) == (14, "and 28 more")
    assert max(map(len, lines)) < 400


def test_a_hook_that_puts_other_tensors_in_is_undone_too(file):
    net = nn.Linear(2, 2)

    def hook(module, *_):
        module.weight = nn.Parameter(torch.zeros(2, 2))
        module.register_buffer("more", torch.ones(1))
        raise ValueError

    net.register_load_state_dict_post_hook(hook)
    refused(file(nn.Linear(2, 2).state_dict()), net)
    assert "more" not in net._buffers


def test_without_undo_no_copy_is_kept():
    net = nn.Linear(2, 2)
    net.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    state = nn.Linear(2, 2).state_dict()
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        load_state(net, state, strict=True, what="it", undo=False)
    assert torch.equal(net.weight, state["weight"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)), prefix=st.sampled_from(["", "module.", "_orig_mod."]))
def test_a_file_that_does_not_fit_leaves_every_bit(tmp_path, data, name, prefix):
    net, source = MODELS[name](), MODELS[name]()
    state = OrderedDict((prefix + key, value) for key, value in source.state_dict().items())
    spoilt = data.draw(st.lists(st.sampled_from([key for key in state if "num_batches" not in key]), min_size=1, max_size=3, unique=True))
    for key in spoilt:
        how = data.draw(st.sampled_from(["renamed", "reshaped", "complex", "no tensor"]))
        value = state.pop(key) if how == "renamed" else state[key]
        state[f"{key}_" if how == "renamed" else key] = {
            "renamed": value,
            "reshaped": value.reshape(*value.shape, 1).expand(*value.shape, 2),
            "complex": value.to(torch.complex64),
            "no tensor": "text",
        }[how]
    tied = name == "transformer" and {key.removeprefix(prefix) for key in spoilt} & {"embed.weight", "head.weight"}
    torch.save(state, tmp_path / "x.pt")
    message = refused(tmp_path / "x.pt", net)
    assert tied or all(key.removeprefix(prefix) in message for key in spoilt)


# -- models that have their own way of loading


def test_what_hooks_of_a_model_make_fit_fits(file):
    """Of weight_norm, whose hook knows the names that it had before parametrizations."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    old = OrderedDict(net.state_dict())
    old["0.weight_g"] = torch.randn(2, 1)
    old["0.weight_v"] = torch.randn(2, 3)
    del old["0.parametrizations.weight.original0"], old["0.parametrizations.weight.original1"]
    before = bits(net)
    assert misfits(net, old) == []
    assert unchanged(net, before)
    load_checkpoint(file({f"module.{name}": value for name, value in old.items()}), net)
    assert torch.equal(net[0].parametrizations.weight.original1, old["0.weight_v"])
    del old["0.bias"]
    assert table(refused(file(old), net)) == ["missing 0.bias in the model alone"]
    assert misfits(net, old) == ["missing  0.bias  in the model alone"]
    old["0.bias"] = torch.ones(3)
    assert table(refused(file(old), net)) == ["shape 0.bias the model has (2,), the file (3,)"]


def test_a_model_that_can_not_be_copied_is_compared_by_names():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    net.lock = open(os.devnull)  # noqa: SIM115, PTH123 - what deepcopy refuses
    try:
        assert [line.split()[0] for line in misfits(net, {"0.bias": torch.ones(2)})] == ["missing", "missing"]
    finally:
        net.lock.close()
