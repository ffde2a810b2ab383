"""Checkpoint files: what goes in, what comes out, and what is refused in words."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from nbddp.checkpoint import buffer_names, check_plain, clear_unfinished, link, load_checkpoint, load_state, model_state, non_finite, plain, read, write
from nbddp.errors import CheckpointError


def save(path, model, **content):
    write(path, {"model": model_state(model), **content})
    return path


# -- plain types


def test_a_state_of_plain_types_is_copied():
    weight = torch.ones(2, requires_grad=True)
    state = {
        "tensors": [weight, (torch.tensor(1.5), None)],
        3: {"numpy": np.float64(2.5), "array": np.arange(6.0).reshape(2, 3).T},
        "set": {1, 2},
        "milestones": Counter([3, 3, 5]),
        "window": deque([1, 2]),
        "more": [True, 1 + 2j, b"x", torch.float16, torch.Size([1]), torch.device("cpu"), np.bool_(1)],
    }
    check_plain(state, "state")
    copied = plain(state, "state")
    weight.data.fill_(7)
    assert copied["tensors"][0].tolist() == [1.0, 1.0]
    assert not copied["tensors"][0].requires_grad
    assert copied[3]["numpy"] == 2.5
    assert copied[3]["array"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied["milestones"] == Counter({3: 2, 5: 1})
    assert isinstance(copied["milestones"], Counter)
    assert copied["window"] == [1, 2]
    assert copied["more"][-1] is True


def test_what_was_made_plain_is_read_with_weights_only(tmp_path):
    state = {
        "a": [torch.ones(2), (1, 2.5, None)],
        3: {"b": np.float32(1)},
        "s": {1},
        "c": Counter("aab"),
        "d": torch.float16,
        "z": 1 + 2j,
        "e": torch.device("cpu"),
    }
    write(tmp_path / "x.pt", {"model": {}, "state": plain(state, "state")})
    assert str(read(tmp_path / "x.pt")["state"]) == str(plain(state, "state"))


@pytest.mark.parametrize(
    "state, where",
    [
        ({"a": [1, {"b": object()}]}, r"state\['a'\]\[1\]\['b'\] is a object: checkpoints hold tensors and plain types only"),
        ({"f": len}, r"state\['f'\] is a builtin_function_or_method"),
        ({"words": np.array(["a"])}, r"state\['words'\] is a ndarray"),
        ({(object(),): 1}, r"a key of state\[0\] is a object"),
        ({"s": {(lambda: 0)}}, r"an element of state\['s'\] is a function"),
    ],
)
@pytest.mark.parametrize("check", [plain, check_plain])
def test_what_is_not_plain_is_named(state, where, check):
    with pytest.raises(CheckpointError, match=where):
        check(state, "state")


# -- the model's state


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("other_empty", torch.zeros(0))


def test_tied_tensors_are_one_in_the_file_and_tied_when_loaded(tmp_path):
    net = Tied()
    path = save(tmp_path / "tied.pt", net)
    state = load_checkpoint(path)
    assert state["embed.weight"].data_ptr() == state["out.weight"].data_ptr()
    other = load_checkpoint(path, Tied())
    assert other.out.weight is other.embed.weight
    torch.testing.assert_close(other.out.weight, net.out.weight)


def test_views_of_one_buffer_that_are_not_the_same_are_kept_apart():
    flat = torch.arange(6.0)
    net = nn.Module()
    net.a, net.b = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])
    state = model_state(net)
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert state["b"].tolist() == [2, 3, 4, 5]
    flat.fill_(9)
    assert state["a"].tolist() == [0, 1, 2, 3]


class Boxed(torch.Tensor):
    """A tensor made of another, as those of quantization libraries are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        def unboxed(value):
            return value.inner if isinstance(value, Boxed) else value

        found = function(*pytree.tree_map(unboxed, arguments), **pytree.tree_map(unboxed, keywords or {}))
        return pytree.tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, found)


def test_tensors_made_of_others_are_not_taken_for_one():
    """They have no memory of their own, and all are at address 0."""
    net = nn.Module()
    for name, value in (("x", 0.0), ("y", 1.0)):
        net.register_buffer(name, Boxed(torch.tensor([value])))
    assert [tensor.inner.item() for tensor in model_state(net).values()] == [0, 1]
    load_state(net, {"x": torch.tensor([3.0]), "y": torch.tensor([4.0])}, strict=True, what="it")
    assert [tensor.inner.item() for tensor in (net.x, net.y)] == [3, 4]


def test_a_conjugate_and_its_original_are_not_confused(tmp_path):
    net, other = nn.Module(), nn.Module()
    for module, value in ((net, torch.tensor([1 + 2j])), (other, torch.zeros(1, dtype=torch.complex64))):
        module.register_buffer("x", value)
        module.register_buffer("y", value.conj())
    write(tmp_path / "x.pt", {"model": model_state(net)})
    load_checkpoint(tmp_path / "x.pt", other)
    assert (other.x.tolist(), other.y.tolist()) == ([1 + 2j], [1 - 2j])


def test_a_transposed_parameter_and_its_original_are_not_confused():
    net = nn.Module()
    net.a = nn.Parameter(torch.arange(4.0).reshape(2, 2))
    net.b = nn.Parameter(net.a.detach().T)
    state = model_state(net)
    assert state["a"].tolist() == [[0, 1], [2, 3]]
    assert state["b"].tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)),
        lambda: nn.Linear(2, 3).double(),
        lambda: nn.Linear(2, 3, dtype=torch.complex64),
        lambda: nn.LSTM(2, 3),
        lambda: nn.MultiheadAttention(4, 2),
    ],
    ids=["batchnorm", "weight_norm", "spectral_norm", "float64", "complex", "lstm", "attention"],
)
def test_a_model_comes_back_bit_for_bit_into_another(tmp_path, make):
    net = make()
    path = save(tmp_path / "net.pt", net)
    other = load_checkpoint(path, make())
    for (name, value), (_, loaded) in zip(net.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(loaded, value, rtol=0, atol=0, msg=name)


def test_the_versions_of_modules_travel_along(tmp_path):
    class Versioned(nn.Linear):
        _version = 3
        seen = None

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            Versioned.seen = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    for net in (nn.Sequential(Versioned(2, 2)), nn.Sequential(nn.Sequential(Versioned(2, 2)))):
        load_checkpoint(save(tmp_path / "v.pt", net), net)
        assert Versioned.seen == 3
        Versioned.seen = None
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "wrapped.pt")
    load_checkpoint(tmp_path / "wrapped.pt", net)
    assert Versioned.seen == 3


def test_an_extra_state_that_is_not_plain_is_named():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"hook": print}

        def set_extra_state(self, state):
            pass

    with pytest.raises(CheckpointError, match=r"model\['0._extra_state'\]\['hook'\] is a builtin_function_or_method"):
        model_state(nn.Sequential(Extra(1, 1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(value):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert non_finite(net.state_dict()) is None
    net[1].weight.data[0, 1] = value
    assert non_finite(net.state_dict()) == "1.weight"
    assert non_finite({"c": torch.tensor([1j * value])}) == "c"
    assert non_finite({"i": torch.tensor([1]), "text": "nan"}) is None


def test_a_buffer_may_hold_inf_as_attention_masks_do_and_no_nan():
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    assert non_finite(net.state_dict(), buffer_names(net)) is None
    net.mask[0] = float("nan")
    assert non_finite(net.state_dict(), buffer_names(net)) == "mask"


# -- loading


def test_device_dtype_mode_and_gradients_of_the_model_stay(tmp_path):
    path = save(tmp_path / "x.pt", nn.Linear(2, 2).double())
    net = nn.Linear(2, 2).eval().requires_grad_(requires_grad=False)
    weight = net.weight
    assert load_checkpoint(path, net) is net
    assert net.weight is weight
    assert (net.weight.dtype, net.training, net.weight.requires_grad) == (torch.float32, False, False)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: nn.DataParallel(nn.DataParallel(m))])
def test_a_bare_state_dict_loads_also_of_a_wrapped_model(tmp_path, wrap):
    source = nn.Sequential(nn.Linear(2, 2))
    torch.save(wrap(source).state_dict(), tmp_path / "bare.pt")
    net = load_checkpoint(tmp_path / "bare.pt", nn.Sequential(nn.Linear(2, 2)))
    torch.testing.assert_close(net[0].weight, source[0].weight)


def test_names_of_a_compiled_model_lose_their_prefix(tmp_path):
    torch.save({f"_orig_mod.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}, tmp_path / "x.pt")
    assert list(load_checkpoint(tmp_path / "x.pt")) == ["weight", "bias"]


def test_a_sub_module_called_module_keeps_its_name(tmp_path):
    net = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    assert next(iter(load_checkpoint(save(tmp_path / "x.pt", net), net).state_dict())) == "module.weight"


def test_a_run_and_its_directory_stand_for_their_last_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path / "checkpoints" / "last.pt", nn.Linear(1, 1))

    class Run:
        dir = tmp_path

    assert list(load_checkpoint(tmp_path)) == list(load_checkpoint(str(tmp_path))) == list(load_checkpoint(Run())) == ["weight", "bias"]


def test_a_model_without_any_state_has_a_checkpoint_too(tmp_path):
    assert dict(load_checkpoint(save(tmp_path / "x.pt", nn.Identity()))) == {}


# -- writing


def test_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = save(tmp_path / "x.pt", nn.Linear(1, 1))
        link(path, tmp_path / "y.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "y.pt").stat().st_mode) == 0o600
    assert path.stat().st_ino == (tmp_path / "y.pt").stat().st_ino


def test_a_link_replaces_what_was_there_and_is_a_copy_where_links_are_not_to_be_had(tmp_path, monkeypatch):
    path, other = save(tmp_path / "x.pt", nn.Linear(1, 1)), tmp_path / "y.pt"
    other.write_bytes(b"old")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    link(path, other)
    assert other.read_bytes() == path.read_bytes()
    assert stat.S_IMODE(other.stat().st_mode) == 0o600
    path.unlink()
    with pytest.raises(FileNotFoundError):
        link(path, other)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["y.pt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail] . file write failed\nmore")])
def test_a_full_disk_leaves_what_was_written_before(tmp_path, monkeypatch, error):
    path = save(tmp_path / "x.pt", nn.Linear(1, 1), step=1)

    def fail(content, file):
        file.write(b"half a file")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match=r"the checkpoint .*x\.pt can't be written: .*(No space left|write failed).*; what was written before"):
        write(path, {"model": {}})
    assert read(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_other_errors_of_writing_leave_nothing_behind_either(tmp_path):
    with pytest.raises(pickle.PicklingError):
        write(tmp_path / "x.pt", {"local": type("Local", (), {})()})
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, torch
from pathlib import Path
from nbddp import checkpoint
path = Path(sys.argv[1])
for step in range(10**9):
    checkpoint.write(path, {"model": {"w": torch.full((300_000,), float(step))}, "step": step})
    checkpoint.link(path, path.with_name("best.pt"))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_complete_files(tmp_path):
    path, best = tmp_path / "last.pt", tmp_path / "best.pt"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not best.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(20):  # while it writes: whoever reads sees one whole file or another
            time.sleep(random.uniform(0, 0.02))
            for file in (path, best):
                content = read(file)
                assert (content["model"]["w"] == content["step"]).all()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    for file in (path, best):
        content = read(file)
        assert (content["model"]["w"] == content["step"]).all()
    clear_unfinished(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.pt", "last.pt"]
