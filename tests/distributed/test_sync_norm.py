"""SyncBatchNorm on CPU ranks: outputs, gradients and running statistics are those of one process with the whole batch, by torch's own BatchNorm."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.distributed

C = 5
CLOSE = {"rtol": 1e-10, "atol": 1e-11}
SHAPES = {"1d": (), "1d with positions": (4,), "2d": (3, 2), "3d": (2, 3, 2)}
KINDS = {"1d": nn.BatchNorm1d, "1d with positions": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
SIZES = {1: [[9], [4]], 2: [[4, 5], [1, 3]], 3: [[4, 2, 3], [3, 0, 1]], 4: [[1, 1, 1, 1], [0, 0, 0, 4]]}
"""Samples of each rank, in each of two batches."""


def layer(kind, dtype=torch.float64, **options):
    torch.manual_seed(1)
    made = KINDS[kind](C, **options).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def batches(kind, nproc, dtype=torch.float64):
    """For each batch: the samples of all ranks, and how they are dealt."""
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(sum(sizes), C, *SHAPES[kind], generator=generator, dtype=torch.float64).mul(3).add(7).to(dtype), sizes) for sizes in SIZES[nproc]]


def passes(norm, inputs, coefficients):
    """Outputs, and the gradients of a weighted sum of their squares, after each batch; then the buffers, and the outputs in eval mode."""
    found = {}
    for number, (x, coefficient) in enumerate(zip(inputs, coefficients, strict=True)):
        x = x.clone().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y.square() * coefficient + y * coefficient.square()).sum().backward()
        found |= {f"y{number}": y, f"x{number}": x.grad} | {f"{name}{number}": p.grad.clone() for name, p in norm.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    found["eval"] = norm.eval()(inputs[0])
    return {name: value.detach() for name, value in found.items()}


def on_a_rank(rank, norm, dealt, coefficients):
    from nbddp.norm import swap_norm

    report = swap_norm(norm := nn.Sequential(norm), "sync")
    assert report.replaced == ["0"]
    assert type(norm[0]).__name__ == "SyncBatchNorm"
    norm = norm[0]
    found = passes(norm, [x.split(sizes)[rank] for x, sizes in dealt], [c.split(sizes)[rank] for c, (_, sizes) in zip(coefficients, dealt, strict=True)])
    return {name: value.numpy() for name, value in found.items()}


def compare(ranks, kind, nproc, dtype=torch.float64, close=CLOSE, **options):
    dealt = batches(kind, nproc, dtype)
    generator = torch.Generator().manual_seed(3)
    coefficients = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x, _ in dealt]
    whole = passes(layer(kind, dtype, **options), [x for x, _ in dealt], coefficients)
    parts = ranks(nproc, on_a_rank, layer(kind, dtype, **options), dealt, coefficients)
    for name, value in whole.items():
        if name[0] in "xy" or name == "eval":  # of the samples of a rank
            if options.get("track_running_stats") is False and name == "eval":
                continue  # of whatever a rank has: statistics are of the batch, and eval mode does not wait for others
            found = np.concatenate([part[name] for part in parts])
        elif name[:-1] in ("weight", "bias"):  # summed over ranks by DDP
            found = sum(part[name] for part in parts)
        else:
            for part in parts[1:]:
                np.testing.assert_array_equal(part[name], parts[0][name])
            found = parts[0][name]
        np.testing.assert_allclose(found, value.numpy(), **close, err_msg=name)


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", list(KINDS))
def test_it_is_one_process_with_the_whole_batch(ranks, kind, nproc):
    compare(ranks, kind, nproc)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.5},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"bias": False},
    ],
    ids=str,
)
def test_whatever_the_options_of_the_layer(ranks, options):
    if "bias" in options and "bias" not in nn.BatchNorm1d.__init__.__code__.co_varnames:
        pytest.skip("this torch has no BatchNorm without bias")
    compare(ranks, "2d", 3, **options)


def test_in_float32(ranks):
    compare(ranks, "2d", 3, torch.float32, close={"rtol": 2e-5, "atol": 2e-5})


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_what_needs_no_gradient_gets_none(ranks, frozen):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm

        norm = SyncBatchNorm(C, dtype=torch.float64)
        norm.weight.requires_grad_(frozen != "weight")
        x = torch.arange(2.0 * C, dtype=torch.float64).view(2, C).add(rank).requires_grad_(frozen != "input")
        norm(x).square().sum().backward()
        return x.grad is None, norm.weight.grad is None, norm.bias.grad is None

    assert ranks(2, on_rank) == [(frozen == "input", frozen == "weight", False)] * 2


@pytest.mark.parametrize("sizes", [[9], [4, 5], [4, 2, 3], [3, 0, 1], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
def test_gradients_of_gradients(ranks, sizes, options):
    x, c = (torch.randn(sum(sizes), C, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def penalty(norm, x, c):
        """The gradient of a loss that a gradient is in."""
        x = x.clone().requires_grad_()
        y = norm(x.sin())
        (inner,) = torch.autograd.grad((y.square() * c).sum(), x, create_graph=True)
        ((inner * c).square().sum() + (y.tanh() * c).sum()).backward()
        return [x.grad, *(parameter.grad for parameter in norm.parameters())]

    def on_rank(rank, norm, x, c):
        from nbddp.norm import swap_norm

        norm = nn.Sequential(norm)
        assert swap_norm(norm, "sync").replaced == ["0"]
        return [gradient.numpy() for gradient in penalty(norm, x.split(sizes)[rank], c.split(sizes)[rank])]

    expected, *weights = penalty(layer("1d", **options), x, c)
    found = ranks(len(sizes), on_rank, layer("1d", **options), x, c)
    np.testing.assert_allclose(np.concatenate([part[0] for part in found]), expected.numpy(), **CLOSE)
    for index, weight in enumerate(weights, 1):
        np.testing.assert_allclose(sum(part[index] for part in found), weight.numpy(), **CLOSE)


def test_gradients_of_gradients_where_a_repeated_sample_does_not_count(ranks):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm, counting

        norm = SyncBatchNorm(2, dtype=torch.float64) if rank is not None else nn.BatchNorm1d(2, dtype=torch.float64)
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[: 1 if rank else 4].requires_grad_()
        with counting(0 if rank else 4):
            (inner,) = torch.autograd.grad(norm(x).pow(3).sum() * (not rank), x, create_graph=True)
            inner.square().sum().backward()
        return x.grad.numpy(), norm.weight.grad.numpy()

    alone, (one, other) = on_rank(None), ranks(2, on_rank)
    for index in (0, 1):
        np.testing.assert_allclose(one[index], alone[index], **CLOSE)
        assert not other[index].any()


def test_a_layer_of_an_old_file_counts_no_batches(ranks):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm

        found = []
        for momentum in (0.5, None):
            norm = SyncBatchNorm(2, momentum=momentum) if rank is not None else nn.BatchNorm1d(2, momentum=momentum)
            norm.num_batches_tracked = None
            norm(torch.tensor([[1.0, 2], [3, 4]])[slice(None) if rank is None else slice(rank, rank + 1)])
            found.append(norm.running_mean.numpy())
        return found

    for found in ranks(2, on_rank):
        np.testing.assert_allclose(found, on_rank(None))


def test_half_precision_stays_half_and_is_summed_in_float32(ranks):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm

        norm = SyncBatchNorm(1)
        x = torch.full((300, 1), 100.0).add(torch.arange(300.0).view(-1, 1) % 2 * (1 + rank)).to(torch.bfloat16).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(x)
        y.float().square().sum().backward()
        return y.dtype, x.grad.dtype, float(norm.running_mean), bool(torch.isfinite(x.grad).all())

    assert [(a, b, round(c, 2), d) for a, b, c, d in ranks(2, on_rank)] == [(torch.bfloat16, torch.bfloat16, 10.07, True)] * 2


def test_one_value_per_channel_is_an_error_on_every_rank(ranks):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm

        norm = SyncBatchNorm(2)
        with pytest.raises(ValueError, match="more than 1 value per channel when training, got 1 over all ranks"):
            norm(torch.ones(1 - rank, 2))
        with pytest.raises(ValueError, match="at least 2D"):
            norm(torch.ones(2))
        return norm(torch.arange(2.0).view(1, 2) + rank).detach().numpy()  # one sample per rank is enough

    found = ranks(2, on_rank)
    np.testing.assert_allclose(found[0], -found[1])
    assert abs(found[0]).min() > 0.9


def test_a_repeated_sample_does_not_count_and_eval_mode_waits_for_nobody(ranks):
    def on_rank(rank):
        from nbddp.norm import SyncBatchNorm, alone, counting

        norm = SyncBatchNorm(2, dtype=torch.float64)
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()
        with counting(3 if rank == 0 else 0):
            y = norm(x)
        (y.square().sum() * (rank == 0)).backward()
        found = [norm.running_mean.clone().numpy(), norm.running_var.clone().numpy(), x.grad.numpy()]
        norm.eval()
        if rank == 1:
            norm(x)
        norm.train()
        if rank == 0:
            with alone():
                norm(x).sum().backward()
        return found

    (mean, var, grad), (other_mean, other_var, other_grad) = ranks(2, on_rank)
    reference = nn.BatchNorm1d(2, dtype=torch.float64)
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference(x).square().sum().backward()
    for found in (mean, other_mean):
        np.testing.assert_allclose(found, reference.running_mean.numpy(), **CLOSE)
    for found in (var, other_var):
        np.testing.assert_allclose(found, reference.running_var.numpy(), **CLOSE)
    np.testing.assert_allclose(grad, x.grad.numpy(), **CLOSE)
    assert (other_grad == 0).all()


def test_state_dicts_are_exchanged_with_batch_norm_and_torchs_own():
    from nbddp.norm import SyncBatchNorm

    source = layer("2d")
    source(batches("2d", 1)[0][0])
    for one in (nn.BatchNorm2d(C).double(), nn.SyncBatchNorm(C).double(), SyncBatchNorm(C, dtype=torch.float64)):
        for other in (SyncBatchNorm(C, dtype=torch.float64), nn.SyncBatchNorm(C).double(), nn.BatchNorm2d(C).double()):
            one.load_state_dict(source.state_dict())
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            for (name, value), (same, found) in zip(source.state_dict().items(), other.state_dict().items(), strict=True):
                assert name == same
                assert torch.equal(value, found)
            assert other.state_dict()._metadata[""]["version"] == source.state_dict()._metadata[""]["version"]


def test_without_a_process_group_it_is_batch_norm():
    from nbddp.norm import SyncBatchNorm

    x = batches("2d", 1)[0][0]
    one, other = layer("2d"), SyncBatchNorm(C, dtype=torch.float64)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))
    assert torch.equal(one.eval()(x), other.eval()(x))
