"""Which normalization layers of masked networks may mix features: decided by the masks, and true by autograd."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import zuko
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nflows.nn.nets import ResidualNet
from nflows.transforms import AffineCouplingTransform, CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation
from nflows.transforms.made import MADE
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from nbddp.norm.masked import mixing, networks

WIDTH = 16


def norm_and_relu(width=WIDTH):
    return nn.Sequential(nn.BatchNorm1d(width), nn.ReLU())


def names(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]


def refused(model):
    return mixing(model, names(model))


class Mix(nn.Module):
    """What any normalization over features is to dependencies: each feature comes to see all; and ReLUs after it stay alive."""

    def forward(self, x):
        return x + x.sum(-1, keepdim=True)


class Plain(nn.Module):
    def forward(self, x):
        return x


def reach(model, mixers, width):
    """Booleans (outputs, inputs) by autograd, with positive weights and inputs: nothing cancels, no ReLU is dead."""
    copied = copy.deepcopy(model).double().eval()
    for parameter in copied.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    for name in names(model):
        parent, _, key = name.rpartition(".")
        setattr(copied.get_submodule(parent), key, Mix() if name in mixers else Plain())
    x = torch.rand(width, dtype=torch.float64) + 0.5
    return torch.autograd.functional.jacobian(lambda x: copied(x[None])[0], x) != 0


def adds(model, mixers, width):
    return bool((reach(model, mixers, width) & ~reach(model, [], width)).any())


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class ByHand(nn.Module):
    """A network with a forward of its own, whose norms are registered apart from its layers."""

    def __init__(self, masks):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(len(mask)) for mask in masks[:-1])
        self.layers = nn.ModuleList(zuko.nn.MaskedLinear(mask) for mask in masks)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = torch.relu(norm(layer(x)))
        return self.layers[-1](x)


def sequence(masks, norms):
    """A chain of masked layers, with a norm before those that are named and after the last where it is."""
    layers = []
    for index, mask in enumerate(masks):
        if index in norms:
            layers.append(nn.BatchNorm1d(mask.shape[1]))
        layers += [zuko.nn.MaskedLinear(mask), nn.ReLU()]
    if len(masks) in norms:
        layers.append(nn.BatchNorm1d(masks[-1].shape[0]))
    return nn.Sequential(*layers)


@st.composite
def masked_chains(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.3, 0.6, 0.9, 1.0]))
    masks = [torch.rand(after, before, generator=generator) < density for before, after in itertools.pairwise(sizes)]
    return masks, draw(st.sets(st.integers(0, len(masks)), min_size=1))


@settings(max_examples=300, deadline=None)
@given(masked_chains())
# Input 0 reaches the first hidden layer, whose other unit alone goes on; the second hidden layer ends in a unit that nothing reaches. Each norm adds nothing by
# itself, both together do.
@example(([torch.tensor([[True], [False]]), torch.tensor([[False, True], [False, False]]), torch.tensor([[False, True]])], {1, 2}))
def test_plain_sequences_are_decided_exactly(case):
    masks, norms = case
    model = sequence(masks, norms)
    width = masks[0].shape[1]
    found = refused(model)
    passed = [name for name in names(model) if name not in found]
    assert not adds(model, passed, width)
    for name in found:
        assert adds(model, [*passed, name], width)


@settings(max_examples=200, deadline=None)
@given(masked_chains(), st.sampled_from(["by hand", "residual", "swish", "block", "blocks"]))
def test_no_network_passes_where_mixing_adds_a_dependency(case, kind):
    masks, norms = case
    width = masks[0].shape[1]
    if kind == "by hand":
        model = ByHand(masks)
    elif kind == "swish":
        model = sequence(masks, norms)
        for index, module in enumerate(model):
            if isinstance(module, nn.ReLU):
                model[index] = Swish()
    elif kind == "residual":
        square = masks[0].T.float() @ masks[0].float() > 0
        model = nn.Sequential(
            *sequence(masks, norms), Residual(nn.BatchNorm1d(len(masks[-1])), zuko.nn.MaskedLinear((masks[-1].float() @ masks[-1].T.float()) > 0))
        )
        model = nn.Sequential(Residual(nn.BatchNorm1d(width), zuko.nn.MaskedLinear(square), nn.BatchNorm1d(width)), *model)
    elif kind == "block":
        model = nn.Sequential(Residual(*[nn.Identity()]), Wrapped(sequence(masks, norms)))
    else:
        model = Blocks(masks, norms)
    found = refused(model)
    assert not adds(model, [name for name in names(model) if name not in found], width)


class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Blocks(nn.Module):
    """Blocks of a norm and a masked layer, in a list."""

    def __init__(self, masks, norms):
        super().__init__()
        self.blocks = nn.ModuleList(sequence([mask], {0} if index in norms else set()) for index, mask in enumerate(masks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def masks_of(rows, hidden, outputs):
    """A first layer in which all units see what `rows` says, full hidden ones, and a last layer with some outputs empty."""
    last = torch.ones(outputs, hidden, dtype=torch.bool)
    last[: outputs // 2] = False
    return [torch.tensor(rows).bool().expand(hidden, -1), torch.ones(hidden, hidden, dtype=torch.bool), last]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("randperm", [False, True])
@pytest.mark.parametrize("features", [2, 5])
def test_coupling_by_masks_passes(features, randperm, residual):
    flow = zuko.flows.NSF(features, passes=2, randperm=randperm, residual=residual, hidden_features=(WIDTH, WIDTH), activation=norm_and_relu)
    assert len(names(flow)) >= 6
    assert refused(flow) == {}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("randperm", [False, True])
@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("kind", [zuko.flows.NSF, zuko.flows.MAF])
def test_autoregressive_flows_are_refused(kind, context, randperm, residual):
    flow = kind(5, context, randperm=randperm, residual=residual, hidden_features=(WIDTH, WIDTH), activation=norm_and_relu)
    found = refused(flow)
    assert list(found) == names(flow)
    assert all("which the masks hide" in reason for reason in found.values())


def test_coupling_by_masks_with_context_is_refused():
    # Units that see the context alone feed the outputs that must not see the features.
    flow = zuko.flows.NSF(4, 3, passes=2, hidden_features=(WIDTH,), activation=norm_and_relu)
    hyper = flow.transform.transforms[0].hyper
    found = mixing(hyper, names(hyper))
    assert list(found) == ["1.0"]
    assert adds(hyper, ["1.0"], 7)


def test_the_reason_names_layers_and_a_pair_that_autograd_confirms():
    flow = zuko.flows.MAF(3, hidden_features=(WIDTH,), activation=norm_and_relu, transforms=1)
    reason = refused(flow)["transform.transforms.0.hyper.1.0"]
    assert reason == (
        "transform.transforms.0.hyper.1.0 stands between masked layers (transform.transforms.0.hyper.0, transform.transforms.0.hyper.2): "
        "normalizing over features would let output 2 depend on input 1 (of transform.transforms.0.hyper), which the masks hide"
    )
    hyper = flow.transform.transforms[0].hyper
    assert reach(hyper, ["1.0"], 3)[2, 1]
    assert not reach(hyper, [], 3)[2, 1]


@pytest.mark.parametrize("norms", [{0}, {2}])
def test_norms_before_and_after_all_masked_layers_are_placed(norms):
    mask = torch.tensor([[0, 0], [1, 0]]).bool()
    (reason,) = refused(sequence([mask, mask | torch.eye(2).bool()], norms)).values()
    assert ("stands before the masked layer 1:" if norms == {0} else "stands after the masked layer 2:") in reason


@pytest.mark.parametrize("context", [None, 2])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("hidden", [WIDTH, 5])
def test_nflows_made_is_refused(hidden, blocks, context):
    made = MADE(5, hidden, context_features=context, use_batch_norm=True, use_residual_blocks=blocks)
    found = refused(made)
    assert list(found) == names(made)
    assert all("which the masks hide" in reason for reason in found.values())
    assert found[names(made)[0]].startswith(f"{names(made)[0]} stands among masked layers (initial_layer, blocks.0.linear")


def test_nflows_made_of_two_features_is_a_coupling():
    made = MADE(2, WIDTH, use_batch_norm=True)
    assert refused(made) == {}
    assert not adds(made, names(made), 2)


def test_nflows_flows():
    autoregressive = [MaskedAffineAutoregressiveTransform(4, WIDTH, use_batch_norm=True) for _ in range(3)]
    coupling = [AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), lambda i, o: ResidualNet(i, o, WIDTH, use_batch_norm=True)) for _ in range(2)]
    flow = CompositeTransform([autoregressive[0], coupling[0], ReversePermutation(4), autoregressive[1], coupling[1], autoregressive[2]])
    found = refused(flow)
    assert set(found) == {name for name in names(flow) if "autoregressive_net" in name}
    assert len(names(flow)) > len(found) > 0


def test_coupling_with_masks_of_features_passes():
    transforms = [*zuko.flows.MAF(5, 3).transform.transforms, *zuko.flows.MAF(5, 3).transform.transforms]
    transforms[2:2] = zuko.flows.RealNVP(5, 3, hidden_features=(WIDTH, WIDTH), activation=norm_and_relu).transform.transforms
    mixed = zuko.flows.Flow(transforms, zuko.flows.MAF(5, 3).base)
    assert len(names(mixed)) == 6
    assert refused(mixed) == {}
    assert refused(zuko.flows.RealNVP(5, 3, hidden_features=(WIDTH, WIDTH), activation=norm_and_relu)) == {}


class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1, 0]]))
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.ones(8, 8).tril())


def pruned():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    for index in (0, 2):
        prune.random_unstructured(model[index], "weight", 0.5)
    return model


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.LazyLinear(4))


@pytest.mark.parametrize("make", [RealNVP, Attention, pruned, lazy], ids=lambda make: make.__name__)
def test_other_masks_hide_nothing(make):
    assert refused(make()) == {}


class Estimator(nn.Module):
    """A flow with an embedding network beside it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.flow = zuko.flows.MAF(4, 3, hidden_features=(WIDTH,))


def test_an_embedding_network_beside_a_flow_passes():
    assert refused(Estimator()) == {}


class Conditional(nn.Module):
    """A norm that is scaled by linear layers."""

    def __init__(self, conditions):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale, self.shift = nn.Linear(conditions, WIDTH), nn.Linear(conditions, WIDTH)


@pytest.mark.parametrize("conditions", [3, WIDTH])
def test_a_conditional_norm_between_blocks_of_masked_layers_is_refused(conditions):
    first, last = MADE(4, WIDTH), MADE(4, WIDTH)
    model = nn.Module()
    model.steps = nn.ModuleList([first, Conditional(conditions), last])
    (reason,) = refused(model).values()
    assert reason.startswith("steps.1.norm stands among masked layers (steps.0.initial_layer, ")


def test_an_embedding_that_is_registered_between_flows_passes():
    model = Estimator()
    model.other = zuko.flows.MAF(4, 3, hidden_features=(WIDTH,))
    model.between = nn.ModuleDict({"embedding": model.embedding})
    model.last = zuko.flows.MAF(4, 3, hidden_features=(WIDTH,))
    del model.embedding
    assert names(model) == ["between.embedding.1"]
    assert refused(model) == {}


def test_a_norm_beside_a_flow_in_a_forward_of_its_own_cannot_be_decided():
    model = Estimator()
    model.standardize = nn.BatchNorm1d(4)
    (reason,) = refused(model).values()
    assert reason.startswith("standardize stands among masked layers (flow.transform.transforms.0.hyper.0, ")
    assert reason.endswith("cannot be read from the masks alone")


class OfLinear(nn.Module):
    """A masked layer that holds a linear layer, as often written by hand."""

    def __init__(self, mask, conditions=0):
        super().__init__()
        self.linear = nn.Linear(*mask.shape[::-1])
        if conditions:
            self.condition = nn.Linear(conditions, len(mask), bias=False)
        self.register_buffer("mask", mask.float())


class Frozen(nn.Linear):
    def __init__(self, mask):
        super().__init__(*mask.shape[::-1])
        self.mask = nn.Parameter(mask.float(), requires_grad=False)


class Attribute(nn.Linear):
    def __init__(self, mask):
        super().__init__(*mask.shape[::-1])
        self.connected = mask


class Transposed(nn.Linear):
    def __init__(self, mask):
        super().__init__(*mask.shape[::-1])
        self.register_buffer("mask", mask.T.clone())


def normed(mask):
    return parametrizations.weight_norm(zuko.nn.MaskedLinear(mask))


class Mask(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask.float())

    def forward(self, weight):
        return weight * self.mask


def parametrized(mask):
    layer = nn.Linear(*mask.shape[::-1])
    parametrize.register_parametrization(layer, "weight", Mask(mask))
    return layer


@pytest.mark.parametrize(
    "layer",
    [OfLinear, lambda mask: OfLinear(mask, 3), Frozen, Attribute, Transposed, normed, parametrized],
    ids=["held", "conditioned", "frozen", "attribute", "transposed", "weight norm", "parametrized"],
)
def test_masked_layers_written_in_other_ways_are_found(layer):
    first = torch.tensor([[1, 0], [1, 1], [1, 0]]).bool()
    last = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    assert list(refused(nn.Sequential(layer(first), nn.BatchNorm1d(3), layer(last)))) == ["1"]
    same = torch.tensor([[1, 0], [1, 0], [1, 0]]).bool()
    assert refused(nn.Sequential(layer(same), nn.BatchNorm1d(3), layer(last))) == {}


def made_of(features=5, width=20):
    """The masks of an autoregressive network."""
    degrees = [torch.arange(features), torch.arange(width) % (features - 1), torch.arange(width) % (features - 1)]
    return [degrees[1][:, None] >= degrees[0], degrees[2][:, None] >= degrees[1], degrees[0][:, None] > degrees[2]]


@pytest.mark.parametrize("layer", [Transposed, Frozen, parametrized], ids=["transposed", "frozen", "parametrized"])
def test_square_masks_are_taken_as_those_beside_them(layer):
    first, middle, last = made_of()
    reasons = refused(nn.Sequential(layer(first), nn.BatchNorm1d(20), nn.ReLU(), layer(middle), nn.BatchNorm1d(20), nn.ReLU(), layer(last)))
    assert list(reasons) == ["1", "4"]
    assert all("would let output 1 depend on input 1" in reason for reason in reasons.values())


class InOneForward(nn.Module):
    """The masks of all layers are held by the network, as buffers or in a list."""

    def __init__(self, *, listed):
        super().__init__()
        masks = [mask.float() for mask in made_of()]
        if listed:
            self.masks = masks
        self.layers = nn.ModuleList(nn.Linear(*mask.shape[::-1]) for mask in masks) if listed else None
        for number, mask in enumerate(() if listed else masks):
            self.register_buffer(f"mask{number}", mask)
            self.add_module(f"layer{number}", nn.Linear(*mask.shape[::-1]))
        self.norm = nn.BatchNorm1d(20)


@pytest.mark.parametrize("listed", [False, True])
def test_a_network_that_holds_all_masks_itself_is_undecided(listed):
    (reason,) = refused(InOneForward(listed=listed)).values()
    assert reason.startswith("norm stands among masked layers (the model itself)")
    assert reason.endswith("cannot be read from the masks alone")
    beside = nn.ModuleDict({"flow": InOneForward(listed=listed), "embedding": nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20))})
    assert list(refused(beside)) == ["flow.norm"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_masked_layers_that_torch_jit_compiled_are_seen():
    first, _, last = made_of()
    layers = [torch.jit.script(zuko.nn.MaskedLinear(mask)) for mask in (first, last)]
    assert list(refused(nn.Sequential(layers[0], nn.BatchNorm1d(20), layers[1]))) == ["1"]


class Unknown(nn.Module):
    """A weight of which nothing says which side is which."""

    def __init__(self, mask):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(mask.shape))
        self.register_buffer("mask", mask.float())


class MaskedConv2d(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 1, 1:] = 0
        self.mask[:, :, 2:] = 0


class OfConv(nn.Module):
    """One mask for all channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.register_buffer("mask", torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Unknown(torch.ones(4, 4)), nn.BatchNorm1d(4), Unknown(torch.ones(4, 4))),
        nn.Sequential(MaskedConv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), MaskedConv2d(8, 1, 3, padding=1)),
        nn.Sequential(OfConv(), nn.BatchNorm2d(2), OfConv()),
        nn.Sequential(zuko.nn.MaskedLinear(torch.ones(4, 4).bool()), nn.BatchNorm1d(4)).to("meta"),
    ],
    ids=["orientation", "convolutions", "one mask for all channels", "no values"],
)
def test_masks_that_are_no_matrix_leave_it_undecided(model):
    (reason,) = refused(model).values()
    assert reason.startswith("1 stands among masked layers (0")
    assert reason.endswith("cannot be read from the masks alone")


def test_coupling_networks_with_a_forward_of_their_own_pass():
    model = ByHand(masks_of([1, 1, 0, 0], WIDTH, 8))
    assert refused(model) == {}
    assert not adds(model, names(model), 4)


def test_a_layer_that_is_shared_is_judged_in_every_place():
    norm = nn.BatchNorm1d(WIDTH)
    coupling, autoregressive = (
        zuko.nn.MaskedMLP(adjacency, (WIDTH,), activation=lambda: norm)
        for adjacency in (torch.tensor([[0, 0, 0], [1, 0, 0]]).bool(), torch.ones(3, 3).bool().tril(-1))
    )
    assert refused(nn.ModuleDict({"only": coupling})) == {}
    assert list(refused(nn.ModuleDict({"one": coupling, "two": autoregressive}))) == ["one.1"]


def test_only_named_layers_mix():
    flow = zuko.flows.MAF(3, hidden_features=(WIDTH,), activation=norm_and_relu)
    assert mixing(flow, []) == {}
    assert list(mixing(flow, names(flow)[1:2])) == names(flow)[1:2]


def test_wrappers_do_not_show_in_names(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # which torch.compile would set
    flow = zuko.flows.MAF(3, hidden_features=(WIDTH,), activation=norm_and_relu, transforms=1)
    plain = refused(flow)
    assert plain
    flow.transform.transforms[0].hyper = torch.compile(flow.transform.transforms[0].hyper, backend="eager")
    assert mixing(nn.DataParallel(flow), list(plain)) == plain


def test_models_without_masks_pass():
    assert refused(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))) == {}
    assert mixing(nn.BatchNorm1d(3), [""]) == {}


def test_networks_are_those_of_single_transforms():
    flow = CompositeTransform([MaskedAffineAutoregressiveTransform(4, WIDTH, use_batch_norm=True), ReversePermutation(4), MADE(4, WIDTH, use_batch_norm=True)])
    assert networks(flow, names(flow)) == ["_transforms.0.autoregressive_net", "_transforms.2"]
    assert networks(flow, names(flow)[-1:]) == ["_transforms.2"]
    hyper = zuko.flows.MAF(4, residual=True, hidden_features=(WIDTH,), activation=norm_and_relu).transform.transforms[0].hyper
    assert networks(hyper, names(hyper)) == [""]
    assert networks(Estimator(), names(Estimator())) == []


def test_blocks_of_a_list_may_feed_each_other():
    class Gate(nn.Module):
        """Normalizes what comes from the block before, and scales it by what its own masked layer makes of the first inputs."""

        def __init__(self):
            super().__init__()
            self.layer = zuko.nn.MaskedLinear(torch.ones(WIDTH, 3).bool())
            self.norm = nn.BatchNorm1d(WIDTH)

    model = nn.Module()
    model.blocks = nn.ModuleList([Wrapped(zuko.nn.MaskedLinear(torch.rand(WIDTH, 4) < 0.5)), Gate(), Wrapped(zuko.nn.MaskedLinear(torch.rand(4, WIDTH) < 0.5))])
    assert list(refused(model)) == ["blocks.1.norm"]
    assert refused(nn.ModuleDict({"alone": model.blocks[1]})) == {}
