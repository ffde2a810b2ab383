"""Models that are not one stack of layers under one forward pass, each trained on two ranks from a cell."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel


def train(nb, line, body="loss = nn.MSELoss()", **options):
    return nb.run(f"%%ddp_train {line} {{BY_HAND}}\n{body}", check=True, **options)


def test_the_weights_are_those_of_a_loop_written_by_hand(nb):
    nb.run("net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))\nexpected = fit(net, mse, in_order(X, Y), epochs=3)", check=True)
    cell = train(nb, "net train_set --epochs 3")
    assert nb.eval("apart(net, expected)") < 1e-6
    assert cell.text.splitlines()[-1].startswith("net: epoch 3")


def test_tied_weights_are_still_tied_and_trained_as_one(nb):
    nb.run(
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))

tied = Tied()
weight = tied.encode.weight
before = weight.detach().clone()
copies = TensorDataset(X, X)
expected = fit(tied, mse, in_order(X, X), epochs=2)
""",
        check=True,
    )
    train(nb, "tied copies --epochs 2")
    assert nb.eval("tied.encode.weight is tied.decode.weight is weight") is True
    assert nb.eval("apart(tied, expected)") < 1e-6
    assert nb.eval("float((weight - before).abs().max())") > 1e-3


def test_a_model_with_log_prob_and_no_forward(nb):
    nb.run(
        """
class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    def log_prob(self, x):
        return torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(x).sum(-1)

flow = Gaussian()
samples = TensorDataset(3 + 0.5 * torch.randn(64, 4))
def nll(model, batch):
    return -model.log_prob(batch[0]).mean()
expected = fit(flow, nll, in_order(samples.tensors[0]), epochs=2)
""",
        check=True,
    )
    train(nb, "flow samples --epochs 2", "training_step = nll")
    assert nb.eval("apart(flow, expected)") < 1e-6
    assert nb.eval("float(flow.mean.min())") > 0.3
    assert nb.eval("bool(run.history['loss'][-1] < run.history['loss'][0])") is True


def test_two_forward_passes_in_one_step(nb):
    nb.run(
        """
twice = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
def both(model, batch):
    return F.mse_loss(model(batch[0]), batch[1]) + 0.1 * (model(batch[0] + 0.1) - model(batch[0])).square().mean()
expected = fit(twice, both, in_order(X, Y))
""",
        check=True,
    )
    train(nb, "twice train_set", "training_step = both")
    assert nb.eval("apart(twice, expected)") < 1e-6


def test_a_step_that_calls_only_a_sub_module(nb):
    nb.run(
        """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.frozen = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)

pair = Pair()
def head(model, batch):
    return F.mse_loss(model.used(batch[0]), batch[1])
expected = fit(pair, head, in_order(X, Y))
""",
        check=True,
    )
    train(nb, "pair train_set", "training_step = head")
    assert nb.eval("apart(pair, expected)") < 1e-6


def test_a_parameter_without_gradient_is_named_with_the_option_that_helps(nb):
    nb.run(
        """
class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)

spare = Spare()
expected = fit(spare, mse, in_order(X, Y))
""",
        check=True,
    )
    error = nb.run("%%ddp_train spare train_set {BY_HAND}\nloss = nn.MSELoss()").error
    assert error.ename == "WorkerError"
    assert "the step does not use spare.weight, spare.bias" in error.evalue
    assert "--find-unused-parameters" in error.evalue
    assert nb.eval("run.state") == "failed"
    train(nb, "spare train_set --find-unused-parameters")
    assert nb.eval("apart(spare, expected)") < 1e-6


def test_a_parameter_that_only_some_steps_use(nb):
    nb.run(
        """
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.late = nn.Linear(4, 2), nn.Linear(4, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.always(x) + (self.late(x) if self.calls <= 2 else 0)

sometimes = Sometimes()
""",
        check=True,
    )
    error = nb.run("%%ddp_train sometimes train_set {BY_HAND}\nloss = nn.MSELoss()").error
    assert error.ename == "WorkerError"
    assert "late.weight, late.bias" in error.evalue
    assert "--find-unused-parameters" in error.evalue


def test_float64_stays_float64_and_is_exact(nb):
    nb.run(
        """
double = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
doubles = TensorDataset(X.double(), Y.double())
expected = fit(double, mse, in_order(X.double(), Y.double()), epochs=3)
""",
        check=True,
    )
    train(nb, "double doubles --epochs 3")
    assert nb.eval("{str(p.dtype) for p in double.parameters()}") == {"torch.float64"}
    assert nb.eval("apart(double, expected)") < 1e-12


@pytest.mark.parametrize("norm", ["nn.utils.parametrizations.weight_norm", "nn.utils.parametrizations.spectral_norm", "nn.utils.spectral_norm"])
def test_reparametrised_weights(nb, norm):
    nb.run(
        f"""
normed = nn.Sequential({norm}(nn.Linear(4, 8)), nn.Tanh(), {norm}(nn.Linear(8, 2)))
keys, before = list(normed.state_dict()), copy.deepcopy(normed.state_dict())
expected = copy.deepcopy(normed)
expected = fit(expected, mse, in_order(X, Y), epochs=2)
""",
        check=True,
    )
    train(nb, "normed train_set --epochs 2")
    assert nb.eval("list(normed.state_dict()) == keys") is True
    assert nb.eval("apart(normed, expected)") < 1e-5
    assert nb.eval("max(float((normed.state_dict()[name] - before[name]).abs().max()) for name in keys)") > 1e-3
    assert nb.eval("bool(torch.isfinite(normed(X)).all())") is True


def test_the_old_weight_norm(nb):
    nb.run(
        """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    old = nn.utils.weight_norm(nn.Linear(4, 2))
expected = nn.Linear(4, 2)
expected.load_state_dict({"weight": old.weight.detach(), "bias": old.bias.detach()})
expected = nn.utils.parametrizations.weight_norm(expected)
expected = fit(expected, mse, in_order(X, Y), epochs=2)
""",
        check=True,
    )
    train(nb, "old train_set --epochs 2")
    assert nb.eval("float((old(X) - expected(X)).abs().max())") < 1e-5


@pytest.mark.parametrize(
    "wrap, called",
    [
        ("nn.DataParallel(inner)", "DataParallel"),
        ("torch.compile(inner)", "torch.compile"),
        ("nn.DataParallel(torch.compile(inner))", "torch.compile"),
    ],
)
def test_a_wrapped_model_is_unwrapped_and_its_inner_one_trained(nb, wrap, called):
    nb.run(f"inner = nn.Linear(4, 2)\nwrapped = {wrap}\nexpected = fit(inner, mse, in_order(X, Y))", check=True)
    cell = train(nb, "wrapped train_set")
    assert f"wrapped was wrapped in {called}: unwrapped" in cell.text.splitlines()
    assert nb.eval("apart(inner, expected)") < 1e-6


def test_a_model_in_ddp_is_unwrapped(nb):
    nb.run(
        """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inner = nn.Linear(4, 2)
wrapped = nn.parallel.DistributedDataParallel(inner)
expected = fit(inner, mse, in_order(X, Y))
""",
        check=True,
    )
    try:
        cell = train(nb, "wrapped train_set")
    finally:
        nb.run("dist.destroy_process_group()", check=True)
    assert "wrapped was wrapped in DistributedDataParallel: unwrapped" in cell.text.splitlines()
    assert nb.eval("apart(inner, expected)") < 1e-6


def test_a_class_that_was_defined_again(nb):
    """An object of the new class trains by the new definition, one of the old class by the old."""
    define = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return {} * self.layer(x)
"""
    nb.run(define.format(1), check=True)
    nb.run("old_net = Net()\nassert isinstance(old_net, Net)", check=True)
    nb.run(define.format(3), check=True)
    nb.run("new_net, slowly = Net(), BY_HAND.replace('0.05', '0.01')", check=True)
    nb.run("expected_new, expected_old = (fit(net, mse, in_order(X, Y), lr=0.01) for net in (new_net, old_net))", check=True)
    body = "def training_step(model, batch):\n    assert isinstance(model, Net) is {}\n    return mse(model, batch)"
    nb.run(f"%%ddp_train new_net train_set {{slowly}}\n{body.format(True)}", check=True)
    nb.run(f"%%ddp_train old_net train_set {{slowly}}\n{body.format(False)}", check=True)
    assert nb.eval("apart(new_net, expected_new)") < 1e-6
    assert nb.eval("apart(old_net, expected_old)") < 1e-6
    assert nb.eval("type(new_net) is Net and type(old_net) is not Net") is True
