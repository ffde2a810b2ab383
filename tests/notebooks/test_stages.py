"""Stages in the body of a cell: what the plan says of them, what is refused before anything starts, and what net, history, card and picture have of them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel

# `by_hand` is what a user would write: one loop after the other.
SETUP_OF_STAGES = """
def make_net():
    torch.manual_seed(3)
    return nn.Sequential(collections.OrderedDict(backbone=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 2)))

def by_hand():
    one = make_net()
    one.backbone.requires_grad_(False)
    one = fit(one, mse, in_order(X, Y), epochs=2)
    one.backbone.requires_grad_(True)
    return fit(one, mse, in_order(X, Y), lr=0.01)

net = make_net()
"""

STAGES = """
stages = [
    nbddp.Stage("head", freeze="backbone.*", epochs=2),
    nbddp.Stage("all", lr=0.01, patience=5),
]
loss = nn.MSELoss()
"""


@pytest.fixture(scope="module", autouse=True)
def stages(shared_kernel):
    shared_kernel.run(SETUP_OF_STAGES, check=True)


def refused(nb, body, line="net train_set"):
    """Run a cell that must be refused; check that it left nothing and return its one line."""
    files, standby, last = nb.eval("run_files()"), nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")
    cell = nb.run(f"%%ddp_train {line} -n 2\n{body}\nloss = nn.MSELoss()")
    assert cell.error is not None, cell.text
    assert cell.error.ename == "ConfigError", cell.error.traceback
    assert nb.eval("run_files()") == files
    assert (nb.eval("standby_pid()"), nb.eval("nbddp.last_run and nbddp.last_run.id")) == (standby, last)
    assert cell.text == ""
    assert "\n" not in cell.error.traceback
    return cell.error.traceback.removeprefix("ConfigError: ")


def test_a_cell_trains_in_stages(nb):
    nb.run("net = make_net()", check=True)
    cell = nb.run(f"%%ddp_train net train_set --val train_set {nb.eval('BY_HAND')}\n{STAGES}", check=True)
    lines = cell.text.splitlines()
    assert lines[0].startswith("2 x CPU ranks · 2 stages · 12 steps · data ")
    assert lines[1:3] == [
        "stage head: 2 epochs · 16 = 2 x 8 · 4 steps/epoch · lr 0.05 · fp32 (auto) · sgd · freezes backbone.*",
        "stage all: 1 epoch · 16 = 2 x 8 · 4 steps/epoch · lr 0.01 · fp32 (auto) · sgd",
    ]
    assert nb.eval("apart(net, by_hand())") < 1e-6
    assert nb.eval("[run.history['stage'].tolist(), run.epochs['stage'].tolist(), run.epochs['epoch'].tolist()]") == [[0] * 8 + [1] * 4, [0, 0, 1], [1, 2, 3]]
    assert nb.eval("run.history['lr'].tolist()") == [0.05] * 8 + [0.01] * 4
    assert {"stage-0", "stage-1", "last", "best"} <= set(nb.eval("[entry.name for entry in run.checkpoints]"))
    assert nb.eval("[text.get_text() for text in run.plot().axes[0].texts]") == ["head", "all"]
    (card,) = cell.shown("text/plain")[-1:]
    assert "12 · epoch 3 of 3" in card
    assert lines[-1].startswith("net: epoch 3 (val_loss ")


def test_weights_of_a_stages_end_are_there_to_load(nb):
    nb.run("net = make_net()", check=True)
    nb.run(f"%%ddp_train net train_set {nb.eval('BY_HAND')}\n{STAGES.replace(', patience=5', '')}", check=True)
    nb.run("of_stage = torch.load(run.dir / 'checkpoints' / 'stage-0.pt', weights_only=True)['model']", check=True)
    assert nb.eval("bool(torch.equal(of_stage['backbone.weight'], make_net().backbone.weight))") is True
    assert nb.eval("bool(torch.equal(of_stage['head.weight'], make_net().head.weight))") is False
    assert nb.eval("bool(torch.equal(net.backbone.weight, make_net().backbone.weight))") is False


def test_what_the_user_had_frozen_is_frozen_afterwards_as_well(nb):
    nb.run("net = make_net()\nnet.backbone.bias.requires_grad_(False)", check=True)
    nb.run(f"%%ddp_train net train_set {nb.eval('BY_HAND')}\nstages = [nbddp.Stage(train_only='head.*')]\nloss = nn.MSELoss()", check=True)
    assert nb.eval("[name for name, parameter in net.named_parameters() if not parameter.requires_grad]") == ["backbone.bias"]
    assert nb.eval("bool(torch.equal(net.backbone.weight, make_net().backbone.weight))") is True


def test_functions_of_a_stage_travel_and_from_python_dicts_do(nb):
    source = """
net = make_net()
def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.125)
run = nbddp.train(net, train_set, loss=nn.MSELoss(), nproc=2, batch_size=16, stages=[{"optimizer": adagrad, "name": "a"}, {"train_only": "*.bias"}])
"""
    nb.run(source, check=True)
    assert nb.eval("run.history['lr'].tolist()") == [0.125] * 4 + [0.001] * 4
    assert nb.eval("run.state") == "finished"


def test_a_plan_shows_stages_and_starts_nothing(nb):
    nb.run("net = make_net()", check=True)
    files = nb.eval("run_files()")
    cell = nb.run(f"%%ddp_plan net train_set -n 2 --val train_set --lr 0.5 --epochs 3\n{STAGES}", check=True)
    assert cell.text.splitlines() == [
        "2 x CPU ranks · 2 stages · 5 steps",
        "stage head: 2 epochs · 64 = 2 x 32 (default) · 1 step/epoch · lr 0.5 · fp32 (auto) · freezes backbone.*",
        "stage all: 3 epochs · 64 = 2 x 32 (default) · 1 step/epoch · lr 0.01 · fp32 (auto)",
    ]
    assert nb.eval("run_files()") == files


@pytest.mark.parametrize(
    "body, line, message",
    [
        ("stages = [nbddp.Stage('a', freeze='backbone')]", "", "stage a: the pattern backbone matches no parameter. Did you mean backbone.*?"),
        ("stages = [nbddp.Stage(), nbddp.Stage(train_only='haed.*')]", "", "stage 1: the pattern haed.* matches no parameter. Did you mean head.*?"),
        ("stages = [nbddp.Stage(freeze='*')]", "", "stage 0: freeze=* freezes all that would train: leave something out of it"),
        ("stages = nbddp.Stage()", "", "stages is one Stage: it must be a list, stages = [Stage(...), Stage(...)]"),
        ("stages = [nbddp.Stage('a', epoch=3)]", "", "stage a: epoch is not an option. Did you mean epochs or num_epochs?"),
        ("stages = [nbddp.Stage('a', nproc=3)]", "", "stage a: nproc is an option of the whole run, not of a stage: give it to the run, beside `stages`"),
        ("stages = [nbddp.Stage(), nbddp.Stage('b', batch_size=7)]", "", "stage b: batch_size=7 is the global batch and must divide by 2 ranks: use 6 or 8"),
        (
            "optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)\nstages = [nbddp.Stage(lr=1)]",
            "",
            "stage 0: lr beside the hook optimizer, which sets all of it: give the stage an optimizer of its own",
        ),
        ("stages = [nbddp.Stage('a', patience=3)]", "", "stage a: patience=3 needs validation data (--val or --val-split), or a value of the training to "),
        ("stages = [nbddp.Stage('a', monitor='val_acc')]", "--val train_set", "stage a: monitor=val_acc is not recorded; recorded are loss, val_loss."),
        ("stages = [nbddp.Stage('a', compile=True)]", "--drop-last false", "stage a: compile=True with drop_last=False: the last batch of an epoch has "),
        ("optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)", "--lr 0.1", "lr beside the hook optimizer, which sets all of it: keep one of "),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(nb, body, line, message):
    assert refused(nb, body, f"net train_set {line}").startswith(message)
