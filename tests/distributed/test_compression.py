"""Compressed gradients on real ranks: what arrives, what is remembered, and that training comes to where it comes without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbddp import checkpoint
from nbddp.errors import CheckpointError
from nbddp.evaluation.ranks import Ranks
from nbddp.worker.compress import Cast, make_compression
from nbddp.worker.powersgd import PowerSGD

pytestmark = pytest.mark.distributed

NAMES = ["bf16", "fp16", "powersgd"]


class Given(nn.Module):
    """Parameters whose gradients are the numbers that forward is given."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, gradients):
        products = [getattr(self, name) * value.conj() for name, value in gradients.items()]
        return sum((product.real if product.is_complex() else product).sum() for product in products)


def wrapped(model, name, **options):
    """The model in DDP with a compression, as on a real rank."""
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"), "gloo", None)
    ddp = nn.parallel.DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **options})
    compression = make_compression(name, ranks)
    if compression is not None:
        compression.register(ddp)
    return ddp, compression


def reduce(ddp, gradients):
    """One backward pass; what it leaves, by name."""
    ddp.zero_grad(set_to_none=True)
    ddp(gradients).backward()
    return {name: p.grad.to_dense().clone() if p.grad.is_sparse else p.grad.clone() for name, p in ddp.module.named_parameters()}


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_equal_on_all_ranks(results):
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


# -- what arrives

KINDS = {
    "matrix": lambda seed: numbers(seed, 40, 30),
    "float64": lambda seed: numbers(seed, 40, 30, dtype=torch.float64),
    "complex": lambda seed: numbers(seed, 40, 30, dtype=torch.complex64),
    "vector": lambda seed: numbers(seed, 1000),
    "number": lambda seed: numbers(seed),
    "empty": lambda seed: numbers(seed, 0, 3),
    "image": lambda seed: numbers(seed, 32, 16, 3, 3).to(memory_format=torch.channels_last),
    "half": lambda seed: numbers(seed, 40, 30).bfloat16(),
}


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_arrive_as_the_mean_in_the_dtype_of_the_parameter(ranks, name, kind, nproc):
    def run(rank):
        ddp, _ = wrapped(Given(p=KINDS[kind](0), q=numbers(0, 3)), name)
        gradients = reduce(ddp, {"p": KINDS[kind](rank), "q": numbers(rank, 3)})
        assert gradients["p"].dtype is ddp.module.p.dtype
        return gradients

    results = ranks(nproc, run)
    assert_equal_on_all_ranks(results)
    mean = sum(KINDS[kind](rank).to(torch.complex128) for rank in range(nproc)) / nproc
    assert torch.allclose(results[0]["p"].to(torch.complex128), mean, atol=0.05 if name == "bf16" or kind == "half" else 0.005)
    assert kind in ("half", "empty") or not torch.allclose(results[0]["p"].to(torch.complex128), mean, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_powersgd_loses_nothing_over_time(ranks, kind):
    """What it sent so far and what it still remembers are together the mean of all gradients so far, whatever their shape, dtype and strides."""
    steps = 6

    def run(rank):
        ddp, compression = wrapped(Given(p=KINDS[kind](0), q=numbers(0, 3)), "powersgd")
        sent = torch.zeros(KINDS[kind](0).shape, dtype=torch.complex128)
        for step in range(steps):
            gradients = reduce(ddp, {"p": KINDS[kind](10 * step + rank), "q": numbers(rank, 3)})
            assert gradients["p"].dtype is ddp.module.p.dtype
            sent += gradients["p"]
        memory = compression.state()["matrices"]
        return {"sent": sent, "error": memory["p"]["error"]} if memory else {"sent": sent}

    results = ranks(2, run)
    assert torch.equal(results[0]["sent"], results[1]["sent"])
    total = sum(KINDS[kind](10 * step + rank).to(torch.complex128) for step in range(steps) for rank in range(2)) / 2
    errors = [result["error"] for result in results if "error" in result]
    assert bool(errors) == (kind not in ("vector", "number", "empty", "complex"))
    remembered = torch.zeros_like(total)
    if errors:
        mean = (errors[0].double() + errors[1].double()) / 2
        assert mean.abs().max() > 0.1
        mean = mean.view(32, 3, 3, 16).permute(0, 3, 1, 2) if kind == "image" else mean  # as it lies in memory
        remembered = mean.to(torch.complex128)
    assert torch.allclose(results[0]["sent"] + remembered, total, atol=0.2 if kind == "half" else 1e-4)


def test_powersgd_finds_a_gradient_of_low_rank_at_once(ranks):
    def low(rank):
        return numbers(rank, 60, 2, dtype=torch.float64) @ numbers(rank + 5, 2, 50, dtype=torch.float64)

    results = ranks(2, lambda rank: reduce(wrapped(Given(p=low(0)), "powersgd")[0], {"p": low(rank)}))
    assert_equal_on_all_ranks(results)
    assert torch.allclose(results[0]["p"], (low(0) + low(1)) / 2, atol=1e-10)


def test_powersgd_takes_a_gradient_of_0_and_what_comes_after_it(ranks):
    def run(rank):
        ddp, _ = wrapped(Given(p=torch.zeros(40, 30)), "powersgd")
        zeros = [reduce(ddp, {"p": torch.zeros(40, 30)}) for _ in range(2)]
        assert all(torch.equal(zero["p"], torch.zeros(40, 30)) for zero in zeros)
        ones = [reduce(ddp, {"p": torch.ones(40, 30)})["p"] for _ in range(3)]
        assert torch.allclose(sum(ones), torch.full((40, 30), 3.0))

    ranks(2, run)


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_is_forgotten(ranks, name, broken):
    def run(rank):
        ddp, compression = wrapped(Given(p=torch.zeros(40, 30)), name)
        reduce(ddp, {"p": numbers(rank, 40, 30)})
        before = checkpoint.plain(compression.state(), "")
        gradient = numbers(rank + 2, 40, 30)
        if rank == 1:
            gradient[35, 7] = broken
        assert not torch.isfinite(reduce(ddp, {"p": gradient})["p"]).all()
        if before is not None:
            after = compression.state()["matrices"]["p"]
            assert torch.equal(after["q"], before["matrices"]["p"]["q"])
            assert torch.equal(after["error"], before["matrices"]["p"]["error"])
        return reduce(ddp, {"p": numbers(rank, 40, 30)})

    results = ranks(2, run)
    assert_equal_on_all_ranks(results)
    assert torch.isfinite(results[0]["p"]).all()


def test_fp16_has_the_range_of_one_gradient_not_of_their_sum(ranks):
    results = ranks(3, lambda rank: reduce(wrapped(Given(p=torch.zeros(4)), "fp16")[0], {"p": torch.full((4,), 6e4)}))
    assert torch.allclose(results[0]["p"], torch.full((4,), 6e4), rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients_travel_as_they_are(ranks, name):
    def run(rank):
        class Embedded(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = nn.Embedding(50, 40, sparse=True), nn.Linear(40, 30)

            def forward(self, index):
                return self.head(self.table(index)).sum() + self.table(index).sum()

        torch.manual_seed(0)
        plain, _ = wrapped(Embedded(), None)
        compressed, _ = wrapped(plain.module.__class__(), name)
        compressed.module.load_state_dict(plain.module.state_dict())
        index = torch.tensor([rank, 3])
        wanted, found = reduce(plain, index), reduce(compressed, index)
        assert compressed.module.table.weight.grad.is_sparse
        return {"table": found["table.weight"], "wanted": wanted["table.weight"]}

    results = ranks(2, run)
    assert_equal_on_all_ranks(results)
    assert torch.equal(results[0]["table"], results[0]["wanted"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_a_gpu(ranks, name):
    """Two ranks share a GPU, which gloo allows."""

    def low(rank):
        return numbers(rank, 60, 2) @ numbers(rank + 5, 2, 50)

    def run(rank):
        ddp, _ = wrapped(Given(p=low(0), q=numbers(0, 3)).cuda(), name)
        first = reduce(ddp, {"p": low(rank).cuda(), "q": numbers(rank, 3).cuda()})["p"].cpu()
        broken = reduce(ddp, {"p": torch.full((60, 50), torch.inf, device="cuda"), "q": numbers(rank, 3).cuda()})["p"]
        assert not torch.isfinite(broken).any()
        again = reduce(ddp, {"p": low(rank).cuda(), "q": numbers(rank, 3).cuda()})["p"].cpu()
        assert torch.allclose(again, first, atol=1e-3)
        return {"p": first}

    results = ranks(2, run)
    assert_equal_on_all_ranks(results)
    assert torch.allclose(results[0]["p"], (low(0) + low(1)) / 2, atol=0.1)


# -- over a checkpoint


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}], ids=["views", "copies", "unused"])
@pytest.mark.parametrize("name", NAMES)
def test_five_steps_a_checkpoint_and_five_steps_are_ten_steps(ranks, tmp_path, name, options, nproc):
    def run(rank):
        def begin():
            torch.manual_seed(7)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            ddp = nn.parallel.DistributedDataParallel(model, **{"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02, **options})
            ddp(torch.zeros(1, 64)).sum().backward()  # the buckets are settled after the first pass
            compression = make_compression(name, Ranks(rank, nproc, rank, torch.device("cpu"), "gloo", None))
            compression.register(ddp)
            return ddp, compression, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

        def train(ddp, optimizer, first, last):
            for step in range(first, last + 1):
                optimizer.zero_grad()
                x = numbers(100 * step + rank, 8, 64)
                (ddp(x) - x.flip(1)).square().mean().backward()
                optimizer.step()

        whole, _, optimizer = begin()
        train(whole, optimizer, 1, 10)

        half, compression, optimizer = begin()
        train(half, optimizer, 1, 5)
        content = {"model": half.module.state_dict(), "optimizer": optimizer.state_dict(), "comm_hook": compression.state()}
        path = tmp_path / f"rank-{rank}.pt"
        checkpoint.write(path, checkpoint.plain(content, "the state"))
        content = checkpoint.read(path)

        resumed, compression, optimizer = begin()
        resumed.module.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        compression.load(content["comm_hook"])
        train(resumed, optimizer, 6, 10)
        for key, value in whole.module.state_dict().items():
            assert torch.equal(value, resumed.module.state_dict()[key]), key
        return {key: value.clone() for key, value in whole.module.state_dict().items()}

    assert_equal_on_all_ranks(ranks(nproc, run))


def test_a_state_is_kept_until_its_parameter_sends_and_none_begins_anew(ranks):
    def run(rank):
        ddp, compression = wrapped(Given(p=torch.zeros(40, 30)), "powersgd")
        first = reduce(ddp, {"p": numbers(rank, 40, 30)})
        state = checkpoint.plain(compression.state(), "")
        _, fresh = wrapped(Given(p=torch.zeros(40, 30)), "powersgd")
        fresh.load(state)
        assert torch.equal(fresh.state()["matrices"]["p"]["error"], state["matrices"]["p"]["error"])
        compression.load(None)
        assert compression.state() == {"matrices": {}}
        assert torch.equal(reduce(ddp, {"p": numbers(rank, 40, 30)})["p"], first["p"])

    ranks(2, run)


def test_a_state_of_another_model_is_refused(ranks):
    def run(rank):
        _, compression = wrapped(Given(p=torch.zeros(40, 30), q=torch.zeros(40, 30)), "powersgd")
        memory = {"q": torch.zeros(4, 30), "error": torch.zeros(40, 30)}
        compression.load({"matrices": {"p": memory}})
        for state, message in [
            ({"matrices": {"other": memory}}, "the model has no parameter other"),
            ({"matrices": {"p": {**memory, "error": torch.zeros(40, 31)}}}, r"p is a matrix of \(40, 30\) in the model and \(40, 31\) in the file"),
            ({"scale": 3}, "it is not PowerSGD's"),
        ]:
            with pytest.raises(CheckpointError, match=f"memory of compressed gradients does not fit: {message}"):
                compression.load(state)

    ranks(2, run)


def test_one_rank_sends_nothing_that_could_be_compressed():
    one, two = (Ranks(0, size, 0, torch.device("cpu"), "gloo", None) for size in (1, 2))
    assert make_compression(None, two) is None
    assert all(make_compression(name, one) is None for name in NAMES)
    assert isinstance(make_compression("powersgd", two), PowerSGD)
    assert [make_compression(name, two).dtype for name in ("bf16", "fp16")] == [torch.bfloat16, torch.float16]
    assert isinstance(make_compression("bf16", two), Cast)


# -- in the loop


def make():
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    teacher = numbers(1, 32, 16)
    x = numbers(2, 960, 32)
    return net, TensorDataset(x, torch.tanh(x @ teacher / 4)), None


def mse(output, target):
    return nn.functional.mse_loss(output, target)


def train(training, nproc=2, make=make, **options):
    return training(nproc, make, {"loss": mse}, **{"epochs": 5, "batch_size": 48, "optimizer": "sgd", "momentum": 0.9, "lr": 0.1, **options})


DDP = {
    "plain": {},
    "copies": {"gradient_as_bucket_view": False},
    "buckets": {"bucket_cap_mb": 0.01},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "accumulate": {"accumulate": 3},
    "static accumulate": {"static_graph": True, "accumulate": 3},
    "clipped, skipping": {"clip_norm": 1.0, "on_nan": "skip"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "adamw": {"optimizer": "adamw", "momentum": None, "lr": 2e-3, "epochs": 8},
}


@pytest.fixture(scope="module")
def uncompressed():
    """What each set of options comes to without a compression, once."""
    return {}


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("name", NAMES)
def test_training_comes_to_where_it_comes_uncompressed(training, uncompressed, name, options):
    if options not in uncompressed:
        uncompressed[options] = train(training, **DDP[options]).epochs["loss"]
    plain = uncompressed[options]
    result = train(training, grad_compression=name, **DDP[options])
    np.testing.assert_allclose(result.epochs["loss"][-1], plain[-1], rtol=0.1 if name == "powersgd" else 0.02)
    assert plain[-1] < 0.3 * plain[0]
    for key, value in result.weights[0].items():
        np.testing.assert_array_equal(value, result.weights[1][key], err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_trains_as_without(training, name):
    assert train(training, 1, grad_compression=name).history["loss"].tolist() == train(training, 1).history["loss"].tolist()


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_on_equals_one_that_never_stopped(training, name, nproc):
    options = {"grad_compression": name, "epochs": 2, "checkpoint_every": "13 steps", "keep_last": 9, "bucket_cap_mb": 0.01, "schedule": "cosine"}
    whole = train(training, nproc, **options)
    (middle,) = whole.run.checkpoints.glob("step-*13.pt")
    resumed = train(training, nproc, resume=str(middle), **options)
    assert len(resumed.history["loss"]) == 40 - 13
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        for key, value in one.items():
            np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_only_some_steps_or_ranks_use(training, name):
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.head(torch.tanh(self.left(x) if x[0, 0] > 0 else self.right(x)))

    def forked():
        torch.manual_seed(5)
        return Forked(), *make()[1:]

    plain = train(training, 2, forked, find_unused_parameters=True)
    result = train(training, 2, forked, find_unused_parameters=True, grad_compression=name)
    np.testing.assert_allclose(result.epochs["loss"][-1], plain.epochs["loss"][-1], rtol=0.1)
    for key, value in result.weights[0].items():
        np.testing.assert_array_equal(value, result.weights[1][key], err_msg=key)
