"""Which entry of a file stands for which of a model: wrappers, ties, dtypes."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nbddp.checkpoint import load_checkpoint, misfits, model_state, write
from nbddp.checkpoint.door import load_file
from nbddp.errors import CheckpointError
from nbddp.wrappers import PREFIXES
from support.loading import MODELS, ResNet, Transformer, compiled, lightning, refused, same, table


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


@pytest.fixture(autouse=True)
def compiler_cache(tmp_path, monkeypatch):
    """torch.compile sets it where it is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture
def file(tmp_path):
    def save(content, name="x.pt"):
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


# -- names


PARTS = st.lists(st.sampled_from(PREFIXES), max_size=3)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
def test_wrappers_in_any_nesting_anywhere_in_a_name_are_seen_through(tmp_path, data, name):
    """Each module of the model is wrapped or not, as DDP, FSDP and torch.compile around parts of a model would."""
    net, other = MODELS[name](), MODELS[name]()
    around = {module: data.draw(PARTS, label=module) for module, _ in net.named_modules()}

    def wrapped(key):
        *path, last = key.split(".")
        parts = [*around[""]]
        for depth, part in enumerate(path):
            parts += [part, *around.get(".".join(path[: depth + 1]), [])]
        return ".".join([*parts, last])

    state = OrderedDict((wrapped(key), value) for key, value in net.state_dict().items())
    torch.save(state, tmp_path / "x.pt")
    assert same(load_checkpoint(tmp_path / "x.pt", other), net)
    assert list(load_checkpoint(tmp_path / "x.pt")) == list(net.state_dict())
    assert misfits(other, state) == []


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        nn.DataParallel,
        lambda net: compiled(nn.DataParallel(compiled(net))),
        lambda net: nn.Sequential(OrderedDict(stem=net.stem, layers=compiled(net.layers), head=nn.DataParallel(net.head))),
    ],
    ids=["compiled", "data parallel", "both, in turn", "parts"],
)
def test_a_model_that_is_wrapped_is_loaded_and_so_is_what_a_wrapped_model_wrote(file, wrap):
    net, other = ResNet(), ResNet()
    load_checkpoint(file(net.state_dict()), wrap(other))
    assert same(net, other)
    other = ResNet()
    load_checkpoint(file(wrap(net).state_dict()), other)
    assert same(net, other)
    other = ResNet()
    load_checkpoint(file(wrap(net).state_dict()), wrap(other))
    assert same(net, other)


class Named(nn.Module):
    """Has attributes called `module`, beside others and alone."""

    def __init__(self, alone=False):
        super().__init__()
        self.module = nn.Sequential(OrderedDict(module=nn.Linear(2, 2)))
        if not alone:
            self.other = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.randn(2, 2))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_attribute_that_is_called_module_keeps_its_name(tmp_path, alone, depth):
    net, other = Named(alone), Named(alone)
    wrapped = net
    for _ in range(depth):
        wrapped = nn.DataParallel(wrapped)
    torch.save(wrapped.state_dict(), tmp_path / "x.pt")
    assert same(load_checkpoint(tmp_path / "x.pt", other), net)
    write(tmp_path / "ours.pt", {"model": model_state(net)})
    assert same(load_checkpoint(tmp_path / "ours.pt"), net)
    assert same(load_checkpoint(tmp_path / "ours.pt", nn.DataParallel(Named(alone))).module, net)


def test_names_that_differ_by_module_alone_are_told_apart(file):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.a.module = nn.Linear(2, 2)

    net = Both()
    for wrap in (lambda model: model, nn.DataParallel, lambda model: nn.Sequential(OrderedDict(a=compiled(model.a)))):
        assert same(load_checkpoint(file(wrap(net).state_dict()), Both()), net)


def test_where_names_can_be_assigned_in_two_ways_it_is_an_error(file):
    path = file({"module.weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2), "bias": torch.ones(2)})
    message = refused(path, nn.Linear(2, 2))
    assert message.startswith("module.weight and _orig_mod.weight in the file are the same as weight in the model, but for module., _orig_mod., ")
    assert set(load_checkpoint(path)) == {"module.weight", "_orig_mod.weight", "bias"} or set(load_checkpoint(path)) == {"module.weight", "weight", "bias"}


def test_without_a_model_module_is_left_out_where_nothing_is_beside_it(file):
    names = ["module.a._orig_mod.w", "module.b.module.w", "module.c.module.w", "module.c.w"]
    path = file(OrderedDict((name, torch.ones(1)) for name in names))
    assert list(load_checkpoint(path)) == ["a.w", "b.w", "c.module.w", "c.w"]


def test_versions_of_modules_reach_them_under_any_name(file):
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    net = nn.Sequential(OrderedDict(net=nn.Sequential(Versioned(2, 2))))
    for content in (nn.DataParallel(compiled(net)).state_dict(), lightning(net.state_dict())):
        load_checkpoint(file(content), compiled(net))
        net.load_state_dict(load_checkpoint(file(content)))
    load_checkpoint(file(lightning(net.state_dict())), net.net)
    assert seen == [3] * 5


# -- ties


def test_tied_tensors_stay_tied_and_one_name_is_enough(file):
    net = Transformer()
    for left_out in ("embed.weight", "head.weight", None):
        other = Transformer()
        weight = other.embed.weight
        state = {name: value for name, value in net.state_dict().items() if name != left_out}
        load_checkpoint(file(state), other)
        assert other.embed.weight is other.head.weight is weight
        assert same(net, other)
        assert misfits(other, state) == []


def test_buffers_and_views_that_are_one_tensor_are_tied_as_well(file):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.randn(3))
            self.register_buffer("other", self.one.detach())

    net = Shared()
    assert same(load_checkpoint(file({"other": net.one}), Shared()), net)


class Transposed(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed: one memory in two shapes."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().t())


@pytest.mark.parametrize("strict", [True, False])
def test_different_values_for_views_of_one_memory_are_an_error_too(file, strict):
    net, wanted = Transposed(), Transposed().double()
    load_checkpoint(file(wanted.state_dict()), net, strict=strict)
    assert torch.equal(net.decoder.weight.t(), wanted.encoder.weight.float())
    assert net.decoder.weight.data_ptr() == net.encoder.weight.data_ptr()
    message = refused(file({**wanted.state_dict(), "encoder.weight": torch.ones(2, 3)}), net, strict=strict)
    assert table(message) == ["tied encoder.weight shares memory with another entry, and the file has different values for them"]


def test_different_values_for_tied_tensors_are_an_error(file):
    net = Transformer()
    state = {**net.state_dict(), "head.weight": net.head.weight.detach() + 1}
    for strict in (True, False):
        assert table(refused(file(state), Transformer(), strict=strict)) == [
            "tied head.weight is one tensor with embed.weight in the model, and the file has different values for them"
        ]
    state["head.weight"] = net.head.weight.detach().clone().double()
    assert same(load_checkpoint(file(state), Transformer()), net)
    state["embed.weight"] = state["head.weight"] = torch.full_like(net.head.weight.detach(), float("nan"))
    state["head.weight"] = state["head.weight"].clone()
    assert load_checkpoint(file(state), Transformer()).embed.weight.isnan().all()


# -- dtypes, devices, modes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floats_are_cast_and_the_model_keeps_its_own(file, make, dtype):
    net, other = make().to(dtype), make()
    other.eval()
    next(other.parameters()).requires_grad_(requires_grad=False)
    before = {name: (id(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in other.named_parameters()}
    loaded = load_file(file(net.state_dict()), other)
    assert {name: (id(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in other.named_parameters()} == before
    assert not any(module.training for module in other.modules())
    assert all(torch.equal(value, net.state_dict()[name].to(value.dtype)) for name, value in other.state_dict().items())
    count = sum(value.is_floating_point() for value in net.state_dict().values())
    assert loaded.facts() == [f"{count} from {str(dtype).removeprefix('torch.')} to float32"]


def holding(value):
    module = nn.Module()
    module.register_buffer("x", value)
    return module


@pytest.mark.parametrize(
    "own, value, fits",
    [
        (torch.zeros(2, dtype=torch.int64), torch.tensor([3, 4], dtype=torch.int32), True),
        (torch.zeros(2, dtype=torch.int64), torch.tensor([3.0, 4.0]), True),
        (torch.zeros(2, dtype=torch.int64), torch.tensor([3.5, 4.0]), False),
        (torch.zeros(2, dtype=torch.uint8), torch.tensor([300, 4]), False),
        (torch.zeros(2, dtype=torch.bool), torch.tensor([1, 0], dtype=torch.uint8), True),
        (torch.zeros(2, dtype=torch.bool), torch.tensor([2, 0], dtype=torch.uint8), False),
        (torch.zeros(2, dtype=torch.uint8), torch.tensor([-1, 4], dtype=torch.int8), False),
        (torch.zeros(2, dtype=torch.int8), torch.tensor([200, 4], dtype=torch.uint8), False),
        (torch.zeros(2, dtype=torch.int64), torch.tensor([2**63, 4], dtype=torch.uint64), False),
        (torch.zeros(2, dtype=torch.uint64), torch.tensor([5, 4]), True),
        (torch.zeros(2), torch.tensor([True, False]), True),
        (torch.zeros(2), torch.tensor([1, 2]), True),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([1.0, 2.0]), True),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([1j, 2.0], dtype=torch.complex128), True),
        (torch.zeros(2), torch.tensor([1j, 2.0]), False),
        (torch.zeros(2), torch.tensor([1 + 0j, 2.0]), False),
        (torch.zeros(()), torch.tensor([2.0]), True),
        (torch.zeros(0, 3), torch.ones(0, 3, dtype=torch.float64), True),
    ],
)
def test_values_are_cast_where_they_stay_what_they_are(file, own, value, fits):
    net = holding(own)
    if fits:
        load_checkpoint(file({"x": value}), net)
        assert net.x is own
        assert torch.equal(own, value.to_dense().reshape(own.shape).to(own.dtype))
    else:
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (own, value)]
        assert table(refused(file({"x": value}), net)) == [f"dtype x the model has {kinds[0]}, which can't hold the {kinds[1]} of the file"]


def test_values_that_become_infinite_are_said(file, capsys):
    net = nn.Linear(2, 1).half()
    load_checkpoint(file({"weight": torch.tensor([[1e6, 1.0]]), "bias": torch.tensor([float("inf")])}), net)
    assert net.weight.tolist() == [[float("inf"), 1.0]]
    assert capsys.readouterr().out.endswith("values became inf, which the model's dtype can't hold: weight\n")


def test_what_is_no_tensor_where_the_model_has_one_is_said(file):
    path = file({"weight": torch.ones(2, 2), "bias": [1.0, 2.0]})
    assert table(refused(path, nn.Linear(2, 2))) == ["dtype bias the model has a tensor, the file a list"]


@pytest.mark.parametrize(
    "own, value, said",
    [
        (torch.zeros(2, 2), torch.ones(2, 2).to_sparse(), "the model has a dense tensor, the file a sparse_coo one"),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2), "the model has a sparse_coo tensor, the file a dense one"),
        (torch.zeros(2, 2), torch.ones(2, 2, device="meta"), "the file has no values for it: it was on the meta device"),
    ],
)
def test_tensors_that_keep_their_values_otherwise_do_not_fit(file, own, value, said):
    net, path = holding(own), file({"x": value, "y": torch.ones(1)})
    net.register_buffer("y", torch.zeros(1))
    with pytest.raises(CheckpointError, match="the model is unchanged") as caught:
        load_checkpoint(path, net)
    assert table(str(caught.value)) == [f"dtype x {said}"]
    assert misfits(net, {"x": value, "y": torch.ones(1)}) == [f"dtype  x  {said}"]
    assert net.y == 0


def test_tensors_that_no_one_can_write_to_are_named(file):
    net = holding(torch.zeros(1).expand(3))
    net.register_buffer("y", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"Module can't be loaded into: elements of x are one in memory, as expand\(\) makes them; \.clone\(\)"):
        load_checkpoint(file({"x": torch.ones(3), "y": torch.ones(1)}), net)
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"Linear can't be loaded into: weight was made in torch\.inference_mode\(\), and can be written"):
        load_checkpoint(file(nn.Linear(2, 2).state_dict()), net)


def test_models_without_memory_are_refused(file):
    path = file(nn.Linear(2, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"Linear can't be loaded into yet: weight is on the meta device, without memory; model\.to_empty"):
        load_checkpoint(path, nn.Linear(2, 2, device="meta"))
    with pytest.raises(CheckpointError, match=r"Sequential can't be loaded into yet: 0\.weight is uninitialised; let the model see one batch first"):
        load_checkpoint(path, nn.Sequential(nn.LazyLinear(2)))
