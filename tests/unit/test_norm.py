"""Normalization layers change in place: what they become, what they keep, what is refused, and that a refusal leaves everything as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._dynamo  # which sets an environment variable when it is imported first
from torch import nn
from torch.nn.utils import parametrize, prune

import nbddp
from nbddp import norm
from nbddp.errors import ConfigError
from nbddp.norm import BatchNorm, LayerNorm, SyncBatchNorm, apply, swapped, without_dropped
from support.nets import Language, Recurrent, ResNet, flow


def images(n=3):
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def trained(model, *inputs):
    """Running statistics and affine weights that are not those of the start."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(3):
            model(*inputs)
    return model


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model, before):
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], value) for name, value in before.items())


RESNET = ["stem.1", "blocks.0.norms.0", "blocks.0.norms.1", "blocks.1.norms.0", "blocks.1.norms.1", "blocks.1.short.1", "head.3"]


def test_to_sync_and_back_nothing_changes_but_the_class():
    net = trained(ResNet(), images()).eval()
    y, before, parameters = net(images()), bits(net), dict(net.named_parameters())
    report = nbddp.swap_norm(net)
    assert report.replaced == RESNET
    assert report.left == []
    assert {type(module) for module in norm.batch_norm_layers(net).values()} == {SyncBatchNorm}
    assert torch.equal(net(images()), y)
    assert same_bits(net, before)
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    assert nbddp.swap_norm(net, "batch").replaced == RESNET
    assert [type(module).__name__ for module in norm.batch_norm_layers(net).values()] == ["BatchNorm2d"] * 6 + ["BatchNorm1d"]
    assert torch.equal(net(images()), y)
    assert not nbddp.swap_norm(net, "batch").replaced


def test_in_training_a_synchronised_layer_alone_is_batch_norm():
    one, other = (trained(ResNet(), images()) for _ in range(2))
    other.load_state_dict(one.state_dict())
    nbddp.swap_norm(other, "sync")
    assert torch.equal(one(images()), other(images()))
    assert same_bits(other, bits(one))


@pytest.mark.parametrize("to", ["layer", "group"])
def test_per_sample_layers_depend_on_no_other_sample_and_keep_the_weights(to):
    net = trained(ResNet(), images()).train()
    weights = {name: value for name, value in net.named_parameters() if "norm" in name or name in ("stem.1.weight", "stem.1.bias")}
    report = nbddp.swap_norm(net, to)
    assert report.replaced == RESNET
    assert all("running statistics dropped" in row.note for row in report)
    for name, value in weights.items():
        assert dict(net.named_parameters())[name] is value
    assert not any("running" in name or "tracked" in name for name in net.state_dict())
    x = images()
    for mode in (True, False):
        together = net.train(mode)(x)
        torch.testing.assert_close(together, torch.cat([net(x[i : i + 1]) for i in range(3)]), rtol=1e-4, atol=1e-5)


def test_which_class_each_kind_is():
    net = nn.ModuleDict({"a": nn.BatchNorm1d(12, eps=0.1), "b": nn.BatchNorm2d(48), "c": nn.BatchNorm3d(7), "d": nn.SyncBatchNorm(64)})
    layers = copy.deepcopy(net)
    nbddp.swap_norm(layers, "layer")
    assert [type(module) for module in layers.values()] == [LayerNorm, nn.GroupNorm, nn.GroupNorm, LayerNorm]
    assert isinstance(layers["a"], nn.LayerNorm)
    assert layers["a"].normalized_shape == (12,)
    assert layers["a"].eps == 0.1
    assert [layers[name].num_groups for name in "bc"] == [1, 1]
    groups = copy.deepcopy(net)
    nbddp.swap_norm(groups, "group")
    assert [module.num_groups for module in groups.values()] == [6, 24, 7, 32]
    nothing = copy.deepcopy(net)
    report = nbddp.swap_norm(nothing, "none")
    assert {type(module) for module in nothing.values()} == {nn.Identity}
    assert not nothing.state_dict()
    assert all(row.note == "affine weights and running statistics dropped" for row in report)
    nbddp.swap_norm(net, "batch")
    assert [type(module) for module in net.values()] == [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm]
    with pytest.raises(ValueError, match="at least 2D"):
        net["d"](torch.ones(64))
    assert net["d"](torch.ones(2, 64, 3)).shape == (2, 64, 3)


def test_a_batch_norm_1d_becomes_a_layer_norm_of_channels_whatever_the_positions():
    net = nn.Sequential(nn.BatchNorm1d(4)).double()
    nbddp.swap_norm(net, "layer")
    for length in ((), (4,), (7,)):  # 4 positions are as many as channels: over those alone it must not normalize
        x = torch.randn(3, 4, *length, dtype=torch.float64)
        torch.testing.assert_close(net(x), nn.functional.group_norm(x, 1, eps=1e-5))
    torch.testing.assert_close(net(torch.arange(4.0).double()), nn.functional.layer_norm(torch.arange(4.0).double(), (4,)))


@pytest.mark.parametrize("to", ["sync", "layer", "group"])
def test_what_a_layer_keeps(to):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, eps=0.01)).double()
    layer = net[1]
    layer.weight.requires_grad_(False)
    layer.eval()
    layer.colour = "red"
    seen = []
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    layer.register_buffer("mine", torch.ones(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nbddp.swap_norm(net, to)
    assert net[1] is layer
    assert (layer.weight.requires_grad, layer.bias.requires_grad, layer.training, layer.eps, layer.colour) == (False, True, False, 0.01, "red")
    assert layer.weight.dtype is torch.float64
    assert "1.mine" in net.state_dict()
    bias = layer.bias.detach().clone()
    net(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert seen == [(5, 8)]
    assert not torch.equal(layer.bias, bias)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("to", ["sync", "layer", "group", "none"])
def test_the_options_of_a_layer_are_carried_over(to, options):
    net = nn.Sequential(nn.BatchNorm2d(6, **options))
    nbddp.swap_norm(net, to)
    assert len(list(net.parameters())) == (0 if to == "none" or options.get("affine") is False else 2)
    if to == "sync":
        for name, value in options.items():
            assert getattr(net[0], name) == value
    assert net(torch.randn(2, 6, 3, 3)).shape == (2, 6, 3, 3)
    nbddp.swap_norm(net, "batch")


@pytest.mark.parametrize("channels, groups", [(1, 1), (2, 1), (7, 1), (16, 8), (32, 16), (48, 24), (64, 32), (100, 25), (37, 1)])
def test_groups_of_features_leave_something_of_the_input(channels, groups):
    net = nn.Sequential(nn.BatchNorm1d(channels))
    nbddp.swap_norm(net, "group")
    assert net[0].num_groups == groups
    if channels > 1:
        assert net(torch.randn(1, channels)).abs().max() > 0.5
        assert not torch.equal(net(torch.randn(2, channels)), net(torch.randn(2, channels)))


def test_a_layer_that_occurs_twice_is_one_layer_and_so_is_the_model_itself():
    shared = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(shared))
    report = nbddp.swap_norm(net, "layer")
    assert report.replaced == ["1"]
    assert net[1] is net[2][0]
    alone = nn.BatchNorm2d(4)
    assert nbddp.swap_norm(alone, "group").replaced == ["the model itself"]
    assert isinstance(alone, nn.GroupNorm)


def test_lazy_layers_are_swapped_once_they_have_seen_a_batch():
    net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match="1: a lazy layer knows its channels after its first batch"):
        nbddp.swap_norm(net, "layer")
    net(torch.randn(3, 5))
    assert nbddp.swap_norm(net, "sync").replaced == ["1"]
    assert nbddp.swap_norm(net, "batch").replaced == ["1"]
    assert type(net[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("options", [{"affine": False, "track_running_stats": False}, {}], ids=["no tensors", "tensors of a state dict"])
def test_a_lazy_layer_is_one_until_it_has_seen_a_batch_whatever_it_holds(options):
    net = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(**options))
    net.load_state_dict(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **options)).state_dict())
    with pytest.raises(ConfigError, match="1: a lazy layer knows its channels after its first batch"):
        nbddp.swap_norm(net, "group")
    before = vars(net[1]).copy()
    with pytest.raises(ConfigError, match="1 can't become sync: a lazy layer knows its channels after its first batch"):
        apply(net, {"1": "sync"})
    assert vars(net[1]) == before
    assert net(torch.randn(3, 4)).shape == (3, 8)


class Called(nn.BatchNorm1d):
    def __call__(self, x):
        return super().__call__(x) * 2


class Scaled(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


class Renamed(nn.BatchNorm1d):
    pass


def test_what_can_not_become_something_else_is_left_and_said():
    net = nn.Sequential(Scaled(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), Renamed(3), nn.InstanceNorm1d(3, affine=True), nn.BatchNorm1d(3), Called(3))
    parametrize.register_parametrization(net[2], "weight", nn.Softplus())
    plain = net[5].forward
    net[5].forward = lambda x: plain(x) * 2
    report = nbddp.swap_norm(net, "layer")
    assert report.replaced == ["1", "3"]
    assert {row.layer: row.note for row in report if not row.replaced} == {
        "0": "Scaled has a forward of its own, which would be lost",
        "2": "its parametrization would be lost",
        "5": "it has a forward of its own, which would be lost",
        "6": "Called has a forward of its own, which would be lost",
    }
    assert isinstance(net[4], nn.InstanceNorm1d)
    with pytest.raises(ConfigError, match="0 can't become sync: Scaled has a forward of its own"):
        apply(net, {"1": "layer", "0": "sync"})
    assert report.kinds == norm.became(net) == {"1": "layer", "3": "layer"}


@pytest.mark.parametrize("to, replaced", [("sync", ["1"]), ("layer", ["1"]), ("group", ["1"]), ("none", [])])
def test_layers_whose_weights_a_hook_makes(to, replaced):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    prune.random_unstructured(net[1], "weight", 0.5)
    report = nbddp.swap_norm(net, to)
    assert report.replaced == replaced
    assert [row.note for row in report if not row.replaced] == ["its pruning, or its weight normalization, would be lost"] * (to == "none")
    net(torch.randn(3, 4)).sum().backward()
    assert to == "none" or (net[1].weight_orig.grad is not None and not net[1].weight[net[1].weight_mask == 0].any())


def test_torchs_own_synchronised_layer_becomes_that_for_the_cpu_and_the_report_tells_them_apart():
    net = nn.Sequential(nn.SyncBatchNorm(4))
    report = nbddp.swap_norm(net, "sync")
    assert type(net[0]) is SyncBatchNorm
    assert report.replaced == ["0"]
    assert (report[0].before, report[0].after) == ("torch.SyncBatchNorm", "nbddp.SyncBatchNorm")
    assert nbddp.swap_norm(net, "sync").replaced == []


class Flat(nn.BatchNorm2d):
    """Takes features without positions."""

    def _check_input_dim(self, x):
        assert x.dim() == 2


def test_a_subclass_for_inputs_of_its_own_takes_them_afterwards():
    for path in (["sync", "batch"], ["layer"], ["group"], ["none"]):
        net = nn.Sequential(Flat(8))
        for to in path:
            assert nbddp.swap_norm(net, to).replaced == ["0"]
            assert net(torch.randn(3, 8)).shape == (3, 8)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("path", [["1"], [""]], ids=["a part", "all of it"])
def test_layers_that_torch_jit_compiled_are_told_of(path):
    net = nn.Sequential(nn.BatchNorm1d(4), torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))))
    report = nbddp.swap_norm(net if path == ["1"] else net[1], "layer")
    assert report.replaced == (["0"] if path == ["1"] else [])
    assert [tuple(vars_of(row)) for row in report if not row.replaced] == [
        ("1.1" if path == ["1"] else "1", "BatchNorm1d", "BatchNorm1d", "is compiled by torch.jit: swap before that")
    ]


def vars_of(row):
    return row.layer, row.before, row.after, row.note


class Siamese(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **options))
        self.other = nn.Sequential(nn.Linear(4, 8), self.one[1])


@pytest.mark.parametrize("to", ["layer", "group", "none"])
@pytest.mark.parametrize(
    "make",
    [
        Siamese,
        lambda: Siamese(track_running_stats=False),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.Sequential(torch.compile(nn.Sequential(nn.BatchNorm1d(4)), backend="eager")),
        lambda: nn.DataParallel(nn.Sequential(nn.BatchNorm1d(4))),
    ],
    ids=["shared", "without running statistics", "the model itself", "compiled", "wrapped"],
)
def test_weights_from_before_a_swap_fit_without_what_it_dropped(to, make):
    net = make()
    before = bits(net)
    assert nbddp.swap_norm(net, to).replaced
    kept = without_dropped(before, net)
    assert not any(net.load_state_dict(kept))
    assert set(kept) == set(net.state_dict())


def test_what_only_looks_like_dropped_weights_is_a_misfit():
    state = nn.Sequential(nn.Linear(4, 4)).state_dict()
    assert set(without_dropped(state, nn.Sequential(nn.Identity()))) == set(state)


def test_only_skip_and_patterns():
    net = ResNet()
    assert nbddp.swap_norm(net, "layer", only="head.*").replaced == ["head.3"]
    report = nbddp.swap_norm(net, "sync", skip=["blocks.*"])
    assert report.replaced == ["stem.1"]
    assert {row.note for row in report if not row.replaced} == {"skipped"}
    report = nbddp.swap_norm(net, {"blocks.0.*": "group", "blocks.*.0": "layer", "stem.*": "keep"})
    assert report.kinds == {"blocks.0.norms.0": "group", "blocks.0.norms.1": "group", "blocks.1.norms.0": "layer"}
    assert {row.layer: row.note for row in report if not row.replaced} == {
        "stem.1": "kept",
        "blocks.1.norms.1": "no pattern of to= fits it",
        "blocks.1.short.1": "no pattern of to= fits it",
    }


@pytest.mark.parametrize("to", ["layer", {"blocks.*": "group", "head.3": "layer"}, {"stem.1": "none"}, "sync"])
def test_a_cell_that_swaps_can_be_run_again(to):
    net = ResNet()
    assert nbddp.swap_norm(net, to, skip="stem.*" if isinstance(to, str) else None).replaced
    before = bits(net)
    assert not nbddp.swap_norm(net, to, skip="stem.*" if isinstance(to, str) else None).replaced
    assert same_bits(net, before)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda net: nbddp.swap_norm(net, "layers"), "to='layers' must be one of sync, batch, layer, group, none. Did you mean layer?"),
        (lambda net: nbddp.swap_norm(net, None), "to=None must be one of"),
        (lambda net: nbddp.swap_norm(net, "auto"), "auto is an option of training: here it is sync"),
        (lambda net: nbddp.swap_norm(net, "head.*=group,*=sync"), r"By pattern it is a dict: {'head.\*': 'group', '\*': 'sync'}"),
        (lambda net: nbddp.swap_norm(net, {"stem.*": "auto"}), r"to\['stem.\*'\]='auto' must be one of"),
        (lambda net: nbddp.swap_norm(net, {3: "sync"}), "the pattern 3 must be a string"),
        (lambda net: nbddp.swap_norm(net, {"steam.*": "sync"}), r"the pattern steam.\* matches no BatchNorm layer. Did you mean stem.\*"),
        (lambda net: nbddp.swap_norm(net, only="head"), r"the pattern head matches no BatchNorm layer. Did you mean head.\*"),
        (lambda net: nbddp.swap_norm(net, skip=["stem.1", 3]), r"skip=\['stem.1', 3\] must be a pattern over layer names"),
        (lambda net: nbddp.swap_norm(net, only=3), "only=3 must be a pattern over layer names"),
        (lambda net: nbddp.swap_norm("net"), "swap_norm takes a torch.nn.Module, not a str"),
    ],
)
def test_wrong_values_are_named_and_nothing_changes(call, words):
    net = ResNet()
    before, types = bits(net), [type(module) for module in net.modules()]
    with pytest.raises(ConfigError, match=words):
        call(net)
    assert same_bits(net, before)
    assert types == [type(module) for module in net.modules()]


def test_models_without_batch_norm_have_nothing_to_swap():
    report = nbddp.swap_norm(nn.Linear(2, 2), "layer")
    assert len(report) == 0
    assert repr(report) == "no BatchNorm layers: nothing to swap"
    assert "nothing to swap" in report._repr_html_()
    with pytest.raises(ConfigError, match=r"matches no BatchNorm layer\. There is none"):
        nbddp.swap_norm(nn.Linear(2, 2), {"a.*": "sync"})


def test_the_report_displays_as_a_table():
    net = nn.ModuleDict({"<a>": nn.BatchNorm1d(4), "b": nn.BatchNorm2d(64)})
    report = nbddp.swap_norm(net, "group", skip="b")
    assert [line.split() for line in repr(report).splitlines()][:2] == [
        ["layer", "from", "to", "note"],
        ["<a>", "BatchNorm1d", "GroupNorm(2,", "4)", *report[0].note.split()],
    ]
    assert report[0].note == "2 groups of 2; for inputs (N, 4), groups of 2 leave little more than signs: layer leaves more; running statistics dropped"
    assert "&lt;a&gt;" in report._repr_html_()
    assert "<a>" not in report._repr_html_()


def test_a_compiled_model_is_changed_inside_and_compiled_again():
    net = trained(ResNet(), images()).eval()
    compiled = torch.compile(net, backend="eager")
    compiled(images())
    report = nbddp.swap_norm(compiled, "layer")
    assert report.replaced == RESNET
    assert "the model is compiled again when it is called next" in repr(report)
    torch.testing.assert_close(compiled(images()), net(images()))
    net.blocks = torch.compile(net.blocks, backend="eager")
    assert nbddp.swap_norm(ResNet(), "sync", only="blocks.*").replaced == [name for name in RESNET if name.startswith("blocks")]
    parts = ResNet()
    parts.blocks = torch.compile(parts.blocks, backend="eager")
    assert nbddp.swap_norm(parts, "sync").replaced == RESNET  # a wrapper within does not show in the names


def test_a_look_at_the_swapped_model_leaves_no_trace():
    net = trained(ResNet(), images()).eval()
    y, before = net(images()), bits(net)
    with swapped(net, {"stem.1": "layer", "head.3": "none"}):
        assert type(net.head[3]) is nn.Identity
        assert not same_bits(net, before)
    assert same_bits(net, before)
    assert torch.equal(net(images()), y)
    with pytest.raises(ConfigError, match=r"head.2 is to become sync: it must be a BatchNorm layer of ResNet, and is a Linear"):
        apply(net, {"stem.1": "layer", "head.2": "sync"})
    with pytest.raises(ConfigError, match=r"tail is to become sync: .* and is not there"):
        apply(net, {"stem.1": "layer", "tail": "sync"})
    assert same_bits(net, before)


def test_swapped_models_are_copied_and_pickled():
    net = ResNet()
    nbddp.swap_norm(net, {"stem.*": "sync", "head.*": "layer"})
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert [type(module) for module in other.modules()] == [type(module) for module in net.modules()]
        assert same_bits(other, bits(net))
        assert nbddp.swap_norm(other, "batch").replaced == ["stem.1"]
        assert type(other.stem[1]) is nn.BatchNorm2d


def test_the_models_of_other_fields():
    language = Language()
    assert nbddp.swap_norm(language, "layer").replaced == ["norm"]
    assert language.output.weight is language.embedding.weight
    assert language(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 11)
    recurrent = Recurrent()
    assert nbddp.swap_norm(recurrent, "group").replaced == ["norm"]
    assert recurrent(torch.randn(2, 4, 3)).shape == (2, 1)


@pytest.mark.parametrize("to", ["layer", "group"])
def test_between_the_masks_of_an_autoregressive_flow_features_are_not_mixed(to):
    net = flow(passes=None)
    before, types = bits(net), [type(module) for module in net.modules()]
    with pytest.raises(ConfigError, match=rf"{to} is refused for transform.transforms.0.hyper.1.0 and 3 more: .* would let output .* depend on input .*"):
        nbddp.swap_norm(net, to)
    assert same_bits(net, before)
    assert types == [type(module) for module in net.modules()]
    assert len(nbddp.swap_norm(net, {"*.1.0": "sync", "*.3.0": "none"}).replaced) == 4


@pytest.mark.parametrize("to", ["layer", "group", "sync", "none"])
def test_between_those_of_a_coupling_flow_they_may_be(to):
    assert len(nbddp.swap_norm(flow(passes=2), to).replaced) == 4


def test_an_example_verifies_by_autograd():
    hyper = flow(passes=None, context=2).transform.transforms[0].hyper
    before = bits(hyper)
    with pytest.raises(ConfigError, match=r"layer is refused: output .* would depend on input .*, which it does not before the swap"):
        nbddp.swap_norm(hyper, "layer", example=torch.randn(3, 6))
    assert same_bits(hyper, before)
    assert "no output came to depend on an input" in repr(nbddp.swap_norm(hyper, "none", example=torch.randn(3, 6)))
    coupling = flow(passes=2).transform.transforms[0].hyper
    assert nbddp.swap_norm(coupling, "layer", example=torch.randn(3, 4)).replaced


def test_several_transforms_are_verified_one_by_one():
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

    def transform():
        return MaskedAffineAutoregressiveTransform(4, 16, num_blocks=1, use_batch_norm=True)

    net = CompositeTransform([transform(), ReversePermutation(4), transform()])
    before = bits(net)
    with pytest.raises(ConfigError, match=r"layer is refused for \S+ and 3 more"):
        nbddp.swap_norm(net, "layer")
    with pytest.raises(ConfigError, match=r"group is refused: output .* would depend on input .* of _transforms.0.autoregressive_net, which"):
        nbddp.swap_norm(net, "group", example=torch.randn(5, 4))
    assert same_bits(net, before)
    assert len(nbddp.swap_norm(net, "sync", example=torch.randn(5, 4)).replaced) == 4


def test_masks_within_compiled_parts_are_seen():
    hyper = flow(passes=None).transform.transforms[0].hyper
    net = nn.Sequential(torch.compile(hyper, backend="eager"))
    with pytest.raises(ConfigError, match=r"layer is refused for 0.1.0 and 1 more"):
        nbddp.swap_norm(net, "layer")
    with pytest.raises(ConfigError, match=r"layer is refused for transform\.transforms"):  # the example is taken as a context, and runs through no network
        nbddp.swap_norm(flow(passes=None), "layer", example=torch.randn(3, 4))
