"""Steps that record, print, change their mind, produce NaN or look at their own source."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.kernel


def train(nb, line, body, *, check=True):
    return nb.run(f"%%ddp_train {line} {{BY_HAND}}\n{body}", check=check)


def test_scalars_of_a_step_are_recorded(nb):
    """The mean over all samples, whichever rank had them: one entry per step, the same as in one process."""
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y), epochs=2)", check=True)
    train(
        nb,
        "net train_set --val train_set --epochs 2",
        "def training_step(model, batch):\n    return {'loss': mse(model, batch), 'first': batch[0][:, 0].mean(), 'two': 2}",
    )
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("run.history['first'].tolist()") == pytest.approx(nb.eval("[float(x[:, 0].mean()) for x, _ in in_order(X, Y)] * 2"), abs=1e-6)
    assert nb.eval("run.history['two'].tolist()") == [2.0] * 8
    assert nb.eval("run.history['step'].tolist()") == list(range(1, 9))
    assert nb.eval("run.epochs['val_two'].tolist()") == [2.0, 2.0]
    assert nb.eval("run.epochs['val_first'].tolist()") == pytest.approx([nb.eval("float(X[:, 0].mean())")] * 2, abs=1e-6)


def test_names_that_change_are_an_error_that_says_which(nb):
    nb.run("net = nn.Linear(4, 2)\nbefore = copy.deepcopy(net)", check=True)
    cell = train(
        nb,
        "net train_set",
        """
steps = []
def training_step(model, batch):
    steps.append(1)
    return {'loss': mse(model, batch), ('late' if len(steps) > 2 else 'early'): 1.0}
""",
        check=False,
    )
    assert cell.error.ename == "WorkerError"
    assert "training_step returned the scalars late, and before that the scalars early: it returns the same names in every step" in cell.error.evalue
    assert nb.eval("apart(net, before)") == 0


def test_names_that_differ_between_ranks_are_an_error_that_says_so(nb):
    cell = train(
        nb,
        "net train_set",
        "def training_step(model, batch):\n    return {'loss': mse(model, batch), 'on_' + os.environ['RANK']: 1.0}",
        check=False,
    )
    assert cell.error.ename == "WorkerError"
    assert "the scalars on_0 on rank 0 and the scalars on_1 on rank 1: it returns the same names on every rank" in cell.error.evalue


def test_a_thousand_lines_per_step_from_every_rank(nb):
    """All of them are in the logs; the notebook holds a few."""
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y))", check=True)
    cell = train(
        nb,
        "net train_set",
        """
def training_step(model, batch):
    for number in range(1000):
        print(f"line {number} " + "x" * 50)
    return mse(model, batch)
""",
    )
    assert nb.eval("apart(net, expected)") < 1e-6
    for rank in (0, 1):
        assert nb.eval(f"[line.split()[1] for line in run.log({rank}).splitlines() if line.startswith('line ')] == [str(n) for n in range(1000)] * 4") is True
    assert cell.text.count("line ") <= 20
    assert len(json.dumps(cell.outputs)) < 300_000
    assert len(json.dumps(nb.widgets)) < 300_000
    assert nb.eval("'line 999 ' in run.log(0)[-2000:]") is True


POISON = """
poisoned = X.clone()
poisoned[16:32][3, 2] = float("nan")
bad_set = TensorDataset(poisoned, Y)
net = nn.Linear(4, 2)
before = copy.deepcopy(net)
batches = in_order(X, Y)
"""


def test_a_nan_step_is_warned_of_and_never_loaded_back(nb):
    nb.run(POISON, check=True)
    cell = train(nb, "net bad_set --epochs 1", "loss = nn.MSELoss()")
    assert nb.eval("run.state") == "finished"
    assert nb.eval("apart(net, before)") == 0
    last = cell.text.splitlines()[-1]
    assert last.startswith("net is unchanged: last.pt of run ")
    assert "is not finite" in last
    assert nb.eval("np.isnan(run.history['loss']).tolist()") == [False, True, True, True]
    warned = "step 2: the loss of rank 1 is not finite; training goes on; --on-nan skip or stop keeps the weights finite"
    assert nb.eval("[m['text'] for m in run.follower.state.messages]") == [warned]
    refused = nb.run("run.load('last')").error
    assert refused.ename == "CheckpointError"
    assert "is not finite" in refused.evalue
    assert nb.eval("apart(net, before)") == 0
    assert "its initial weights of run" in nb.run("_ = run.load('initial')", check=True).text
    assert nb.eval("apart(net, before)") == 0


def test_a_nan_step_is_skipped(nb):
    nb.run(POISON + "expected = fit(net, mse, batches[:1] + batches[2:])", check=True)
    train(nb, "net bad_set --on-nan skip", "loss = nn.MSELoss()")
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("len(run.history['loss'])") == 4


def test_a_nan_step_stops_the_run_with_the_weights_before_it(nb):
    nb.run(POISON + "expected = fit(net, mse, batches[:1])", check=True)
    cell = train(nb, "net bad_set --on-nan stop --epochs 5", "loss = nn.MSELoss()")
    assert nb.eval("run.state") == "stopped"
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("len(run.history['loss'])") == 2
    assert cell.text.splitlines()[-1].startswith("net: epoch 1, step 2")


def test_a_gradient_that_is_not_finite_under_a_finite_loss(nb):
    nb.run("net = nn.Linear(4, 2)\nexpected = fit(net, mse, in_order(X, Y)[:1] + in_order(X, Y)[2:])", check=True)
    body = """
steps = []
def training_step(model, batch):
    steps.append(1)
    loss = mse(model, batch)
    return loss + (0 * model.weight.sum()).sqrt() if len(steps) == 2 else loss
"""
    train(nb, "net train_set --on-nan skip", body)
    assert nb.eval("apart(net, expected)") < 1e-6
    assert nb.eval("bool(np.isfinite(run.history['loss']).all())") is True


def test_source_of_a_function_and_of_a_method_is_found_on_the_ranks(nb):
    nb.run(
        """
import inspect
class Looker(nn.Linear):
    def forward(self, x):  # a comment of the method
        return super().forward(x)
def helper():
    return "a string of the helper"
looker = Looker(4, 2)
expected = fit(looker, mse, in_order(X, Y))
""",
        check=True,
    )
    train(
        nb,
        "looker train_set",
        """
def training_step(model, batch):
    assert "a string of the helper" in inspect.getsource(helper)
    assert "# a comment of the method" in inspect.getsource(type(model).forward)
    assert "# a comment of the step" in inspect.getsource(training_step)  # a comment of the step
    assert inspect.getsource(helper).startswith("def helper():")
    return mse(model, batch)
""",
    )
    assert nb.eval("apart(looker, expected)") < 1e-6
