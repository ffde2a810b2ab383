"""Metrics and on_epoch_end as a notebook defines them: torchmetrics, classes and functions of cells, helpers beside the hook."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.kernel

CLASSIFY = """
import torchmetrics
labels = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
train_part, val_part = TensorDataset(X[:48], labels[:48]), TensorDataset(X[48:61], labels[48:61])

class Within(nbddp.Metric):
    def __init__(self, bound):
        self.bound = bound
        self.add_state("hits", 0)
        self.add_state("n", 0)
        self.add_state("best", [], "cat")

    def update(self, output, target):
        p = chosen(output, target)
        self.hits += (p > self.bound).sum()
        self.n += len(target)
        self.best.append(p)

    def compute(self):
        return {"share": self.hits / self.n, "median": self.best.median()}

def chosen(output, target):
    return output.softmax(1).gather(1, target[:, None])[:, 0]

def correct(output, target):
    return output.argmax(1) == target
"""


@pytest.fixture(scope="module", autouse=True)
def setup(shared_kernel):
    shared_kernel.run(CLASSIFY, check=True)


BODY = """
loss = nn.CrossEntropyLoss()
metrics = {
    "correct": correct,
    "p": lambda output, target: chosen(output, target),
    "within": Within(0.4),
    "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
    "many": torchmetrics.MetricCollection([torchmetrics.F1Score(task="multiclass", num_classes=3), torchmetrics.Accuracy(task="multiclass", num_classes=3)]),
}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_of_every_kind_are_computed_over_all_validation_samples(nb, ranks):
    nb.run("torch.manual_seed(1)\nnet = nn.Linear(4, 3)", check=True)
    nb.run(f"%%ddp_train net train_part --val val_part -n {ranks} --epochs 2 --batch-size 16 --lr 0.1 --val-batch-size 8 --load last{BODY}", check=True)
    nb.run(
        """
with torch.no_grad():
    output, target = net(X[48:61]), labels[48:61]
p = chosen(output, target)
within = {"share": (p > 0.4).float().mean(), "median": p.median()}
auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)(output, target)
f1 = torchmetrics.F1Score(task="multiclass", num_classes=3)(output, target)
last = {name: column[-1] for name, column in run.epochs.items()}
""",
        check=True,
    )
    expected = {
        "val_correct": "correct(output, target).double().mean()",
        "val_p": "p.double().mean()",
        "val_within_share": "within['share']",
        "val_within_median": "within['median']",
        "val_auroc": "auroc",
        "val_many_MulticlassF1Score": "f1",
        "val_many_MulticlassAccuracy": "correct(output, target).float().mean()",
    }
    for name, value in expected.items():
        assert nb.eval(f"float(last[{name!r}])") == pytest.approx(nb.eval(f"float({value})"), abs=1e-6), name


def test_a_metric_decides_which_weights_are_the_best(nb):
    nb.run("net = nn.Linear(4, 3)", check=True)
    nb.run(
        "%%ddp_train net train_part --val val_part -n 2 --epochs 4 --batch-size 16 --lr 0.5 --monitor val_p --mode max --patience 4\n"
        "loss = nn.CrossEntropyLoss()\nmetrics = {'p': chosen}",
        check=True,
    )
    assert nb.eval("float(chosen(net(X[48:61]), labels[48:61]).double().mean())") == pytest.approx(nb.eval("float(run.epochs['val_p'].max())"), abs=1e-6)


@pytest.mark.parametrize(
    "metrics, message",
    [
        ("{'correct': Within}", "metrics: correct is the class Within, not an instance: write Within(...)"),
        ("[correct]", "metrics is a list: it must be a dict of names and metrics"),
        ("{'loss': correct}", "metrics: the name loss is taken"),
        ("{'f': lambda output: output}", "can't be called as f(output, target)"),
    ],
)
def test_wrong_metrics_start_nothing(nb, metrics, message):
    nb.run("net = nn.Linear(4, 3)\nbefore = run_files()", check=True)
    cell = nb.run(f"%%ddp_train net train_part --val val_part -n 2\nloss = nn.CrossEntropyLoss()\nmetrics = {metrics}")
    assert cell.error.ename == "ConfigError"
    assert message in cell.error.evalue
    assert nb.eval("run_files() == before") is True


def test_a_step_without_output_is_refused_in_words(nb):
    nb.run("net = nn.Linear(4, 3)", check=True)
    cell = nb.run(
        "%%ddp_train net train_part --val val_part -n 2 --batch-size 16\n"
        "def training_step(model, batch):\n    return F.cross_entropy(model(batch[0]), batch[1])\n"
        "metrics = {'correct': correct}"
    )
    assert cell.error.ename == "WorkerError"
    assert "metrics (correct) are computed from output and target, and training_step returned no output and no target" in cell.error.evalue


def test_an_exception_in_a_metric_names_cell_and_line(nb):
    nb.run("net = nn.Linear(4, 3)", check=True)
    cell = nb.run(
        "%%ddp_train net train_part --val val_part -n 2 --batch-size 16\nloss = nn.CrossEntropyLoss()\n"
        "def wrong(output, target):\n    return output @ target\nmetrics = {'wrong': wrong}"
    )
    assert cell.error.ename == "WorkerError"
    assert nb.eval("(run.error.cell, run.error.line)") == (cell.execution_count, 4)
    assert "in the metric wrong" in cell.error.traceback


def test_what_on_epoch_end_reports_is_recorded(nb):
    nb.run("net = nn.Linear(4, 3)", check=True)
    nb.run(
        """%%ddp_train net train_part --val val_part -n 2 --epochs 3 --batch-size 16 --monitor share --mode max
loss = nn.CrossEntropyLoss()
metrics = {'correct': correct}
def on_epoch_end(state):
    state.report(share=state.epoch / 10, norm=state.model.weight.norm(), again=state.values['val_correct'])
""",
        check=True,
    )
    assert nb.eval("run.epochs['share'].tolist()") == [0.1, 0.2, 0.3]
    assert nb.eval("run.epochs['again'].tolist() == run.epochs['val_correct'].tolist()") is True
    assert nb.eval("float(net.weight.detach().norm())") == pytest.approx(nb.eval("run.epochs['norm'].tolist()")[-1], abs=1e-6)


def test_an_exception_in_on_epoch_end_is_rank_0s_with_cell_and_line(nb):
    nb.run("net = nn.Linear(4, 3)", check=True)
    cell = nb.run(
        """%%ddp_train net train_part -n 2 --epochs 3 --batch-size 16
loss = nn.CrossEntropyLoss()
def on_epoch_end(state):
    if state.epoch == 2:
        {}['missing']
""",
        timeout=30,
    )
    assert cell.error.ename == "WorkerError"
    assert "rank 0 raised KeyError: 'missing'" in cell.error.evalue
    assert nb.eval("(run.error.rank, run.error.cell, run.error.line)") == (0, cell.execution_count, 5)
