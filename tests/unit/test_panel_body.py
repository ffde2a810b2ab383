"""What is known of a body that is not run."""

from __future__ import annotations

import functools

import pytest
from torch import nn
from torch.nn import functional

import nbddp
from nbddp.errors import ConfigError
from nbddp.kernel.hooks import ARGUMENTS, check_hooks
from nbddp.kernel.panel_body import STAND_INS, bound_names, found_loss, literal_stages, stages_text, stand_ins, syntax_error, unknown_hooks


@pytest.mark.parametrize(
    "body, names",
    [
        ("loss = nn.MSELoss()", {"loss"}),
        ("a, (b, *c) = d = x.y\ne: int = 3\nf[0] = g.h = 1\n", {"a", "b", "c", "d", "e"}),
        ("def loss(output, target):\n    inner = 1\n    return inner\nclass C: x = 1\nasync def f(): pass", {"loss", "C", "f"}),
        ("import a.b, c as d\nfrom e import f as g, h", {"a", "d", "g", "h"}),
        ("def loss(", set()),
        ("", set()),
        ("for i in range(3): pass\nprint(1)", set()),
    ],
)
def test_bound_names(body, names):
    assert bound_names(body) == names


def test_stand_ins_are_for_the_hooks_that_are_there_and_pass_for_them():
    assert set(stand_ins("loss = 1\noptimizer = scheduler = 2\nother = 3")) == {"loss", "optimizer", "scheduler"}
    assert set(stand_ins("metrics = {}")) == {"on_epoch_end"}  # which says that any name may be recorded
    assert set(STAND_INS) == set(ARGUMENTS)
    check_hooks({name: hook for name, hook in STAND_INS.items() if name != "training_step"}, nn.Linear(1, 1))


def mse_loss(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "names, body",
    [
        ({"criterion": nn.MSELoss(), "train_loss": mse_loss, "net": nn.Linear(1, 1)}, "loss = criterion"),
        ({"my_loss": mse_loss, "nll": nn.NLLLoss()}, "loss = nll"),
        ({"my_loss": mse_loss}, "loss = my_loss"),
        ({"weighted_loss": functools.partial(functional.mse_loss, reduction="mean")}, "loss = weighted_loss"),
        ({"loss": mse_loss, "criterion": nn.MSELoss()}, "loss = loss"),
        ({"training_step": mse_loss, "loss": mse_loss}, "training_step = training_step"),
        ({"LossNet": nn.MSELoss, "_loss": mse_loss, "losses": [1.0], "net": nn.Linear(1, 1)}, ""),
    ],
)
def test_a_loss_of_the_notebook_is_found(names, body):
    assert found_loss(names) == body


def test_stages_are_code_that_is_read_without_being_run():
    stages = [nbddp.Stage("head", freeze="backbone.*", epochs=3), nbddp.Stage("all", train_only=["a", "b"], lr=1e-4, optimizer="sgd")]
    scope = {}
    exec(stages_text(stages), scope)
    assert [repr(stage) for stage in scope["stages"]] == [repr(stage) for stage in stages]
    assert [repr(stage) for stage in literal_stages(stages_text(stages))] == [repr(stage) for stage in stages]


@pytest.mark.parametrize(
    "body, unknown",
    [
        ("loss = f", []),
        ("stages = make()", ["stages"]),
        ("stages = [nbddp.Stage(epochs=n)]", ["stages"]),
        ("stages = [nbddp.Stage(epochs=3, 5)]", []),  # no Python
        ("stages = [nbddp.Stage('a', 'b')]", ["stages"]),
        ("stages = [Stage(epochs=3), other]", ["stages"]),
        ("from nbddp import Stage\nstages = [Stage(epochs=3)]", []),
        ("stages = []\nsampler = f", ["sampler"]),
    ],
)
def test_what_only_the_body_knows(body, unknown):
    assert unknown_hooks(body) == unknown


def test_a_wrong_stage_is_said():
    with pytest.raises(ConfigError, match="epochs=0"):
        literal_stages("stages = [nbddp.Stage(epochs=0)]")


def test_magics_are_no_syntax_errors():
    body = "%matplotlib inline\nfiles = !ls\nloss = f"
    assert bound_names(body) >= {"files", "loss"}
    assert syntax_error(body) == ""
    assert syntax_error("loss = (") == "SyntaxError: '(' was never closed (line 1 of the body)"
