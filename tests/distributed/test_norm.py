"""Swapped models train alike at any number of ranks, ragged tails and ranks without samples included; what BatchNorm on its own does is shown beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from support.nets import Language, Recurrent, ResNet, flow

pytestmark = pytest.mark.distributed

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def data(*shape, classes=0, n=41, integers=False):
    generator = torch.Generator().manual_seed(3)
    if integers:
        x = torch.randint(11, (n, *shape), generator=generator)
        return TensorDataset(x, x.roll(-1, 1)), TensorDataset(x[:13], x[:13].roll(-1, 1))
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (n,), generator=generator) if classes else torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y), TensorDataset(x[:13] * 2, y[:13])


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def negative_log_likelihood(model, batch):
    x, context = batch
    return -model(context if model.transform.transforms[0].hyper.in_features == 6 else None).log_prob(x).mean()


def flow_data():
    generator = torch.Generator().manual_seed(4)
    x, context = (torch.randn(41, k, generator=generator, dtype=torch.float64) for k in (4, 2))
    return TensorDataset(x, context), TensorDataset(x[:13], context[:13])


MODELS = {
    "resnet": (ResNet, lambda: data(3, 5, 5, classes=4), {"loss": nn.functional.cross_entropy}),
    "language": (Language, lambda: data(6, integers=True), {"loss": token_loss}),
    "recurrent": (Recurrent, lambda: data(4, 3), {"loss": nn.functional.mse_loss}),
    "coupling": (lambda: flow(passes=2), flow_data, {"training_step": negative_log_likelihood}),
    "autoregressive": (lambda: flow(passes=None, context=2), flow_data, {"training_step": negative_log_likelihood}),
}


def maker(name, to):
    model, dataset, _ = MODELS[name]

    def make():
        from nbddp.norm import swap_norm

        torch.manual_seed(5)
        net = model().double()
        if to is not None:
            assert swap_norm(net, to).replaced
        return net, *dataset()

    return make


def trained(training, nproc, name, to, **options):
    options = {"epochs": 2, "batch_size": 12, "drop_last": False, "lr": 0.01, **options}  # 41 samples: tails of 5, dealt to 3 ranks as 2, 2, 1
    return training(nproc, maker(name, to), MODELS[name][2], **options)


def assert_same(one, other):
    assert len(one.history["loss"]) == len(other.history["loss"]) == 8
    np.testing.assert_allclose(other.history["loss"], one.history["loss"], **TOLERANCE)
    np.testing.assert_allclose(other.epochs["val_loss"], one.epochs["val_loss"], **TOLERANCE)
    for weights in other.weights:
        for name, value in one.weights[0].items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-7, atol=1e-8, err_msg=name)


CASES = [
    (name, to) for name in MODELS for to in ("sync", "layer", "group", "none") if (name, to) not in (("autoregressive", "layer"), ("autoregressive", "group"))
]


@pytest.mark.parametrize("name, to", CASES)
def test_swapped_models_have_the_same_curve_at_1_and_2_ranks(training, name, to):
    assert_same(trained(training, 1, name, to), trained(training, 2, name, to))


@pytest.mark.parametrize(
    "options", [{"accumulate": 2, "batch_size": 12}, {"batch_size": 39}, {"compile": True, "drop_last": True, "epochs": 3, "batch_size": 15}], ids=str
)
def test_synchronised_layers_at_3_ranks_in_micro_batches_compiled_and_where_a_rank_has_no_samples(training, options):
    # 41 samples in batches of 39 leave 2 for 3 ranks: one repeats a sample that must not count.
    one, three = (trained(training, nproc, "resnet", "sync", timeout=200, **{"epochs": 4, **options}) for nproc in (1, 3))
    assert len(one.history["loss"]) == len(three.history["loss"]) >= 6
    np.testing.assert_allclose(three.history["loss"], one.history["loss"], rtol=1e-8)
    np.testing.assert_allclose(three.epochs["val_loss"], one.epochs["val_loss"], rtol=1e-8)


def test_synchronised_layers_are_batch_norm_of_one_process_and_without_them_ranks_are_not(training):
    one = trained(training, 1, "resnet", None)
    assert_same(one, trained(training, 2, "resnet", "sync"))
    assert np.abs(trained(training, 2, "resnet", None).history["loss"] - one.history["loss"]).max() > 1e-3


class Checkpointed(nn.Module):
    """Its middle part goes forward again in the backward pass."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 1), reentrant
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant) if self.training else self.middle(self.first(x)))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "batch_size": 18}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_where_a_rank_has_no_samples(training, reentrant, options):
    def make():
        from nbddp.norm import swap_norm

        torch.manual_seed(5)
        net = Checkpointed(reentrant=reentrant).double()
        swap_norm(net, "sync")
        return net, *data(4)

    # 41 samples in batches of 39 leave 2 for 3 ranks, and 5 in two micro-batches of up to 3 each
    options = {"epochs": 4, "batch_size": 39, "drop_last": False, "optimizer": "sgd", "lr": 0.05, **options}
    one, three = (training(nproc, make, {"loss": nn.functional.mse_loss}, **options) for nproc in (1, 3))
    np.testing.assert_allclose(three.history["loss"], one.history["loss"], **TOLERANCE)
    np.testing.assert_allclose(three.epochs["val_loss"], one.epochs["val_loss"], **TOLERANCE)
    for name in ("middle.1.running_mean", "middle.1.running_var", "middle.1.num_batches_tracked"):
        for weights in three.weights:
            np.testing.assert_allclose(weights[name], one.weights[0][name], **TOLERANCE)


def test_a_ddp_model_of_the_users_is_changed_inside(ranks):
    def on_rank(rank):
        from nbddp.norm import swap_norm

        torch.manual_seed(0)
        net = ResNet()
        ddp = nn.parallel.DistributedDataParallel(net)
        found = [len(swap_norm(ddp, "sync").replaced)]
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            ddp(x).square().sum().backward()
        found.append([float(p.grad.double().sum()) for p in net.parameters()])
        found.append(swap_norm(ddp, {"stem.1": "layer", "head.3": "none"}).notes)
        plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        ddp = nn.parallel.DistributedDataParallel(plain)
        swap_norm(ddp, "layer")  # no buffer is left to broadcast
        ddp(x[:, :, 0, 0]).square().sum().backward()
        found.append(float(plain[1].weight.grad.double().sum()))
        return found

    one, other = ranks(2, on_rank)
    assert one[0] == 7
    assert one[1] == other[1]
    assert one[3] == other[3]
    assert one[2] == ("DistributedDataParallel still waits for gradients of the weights that are gone: wrap the model anew",)
