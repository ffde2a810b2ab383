"""``--config`` from a kernel: stages of a file train, the line and the cell win, and what a file can't have is listed under the plan."""

from __future__ import annotations

import pytest

from support.example import EXAMPLE

pytestmark = pytest.mark.kernel

OURS = """
nproc: 2
batch_size: 64
stages:
  - {name: head, freeze: "layers.0.*", epochs: 1, lr: 0.01}
  - {name: all, epochs: 2, optimizer: sgd, lr: 0.1}
"""

LOCAL = """
local: {device: cpu, num_workers: 2, ddp_port: 12355}
data: {train_fraction: 0.75}
training:
  stage_0:
    epochs: 2
    batch_size: 64
    freeze_rb_layer: true
    optimizer: {type: adam, lr: 0.001, betas: [0.9, 0.99]}
    scheduler: {type: cosine, T_max: 2}
  stage_1:
    epochs: 1
    batch_size: 32
    optimizer: {type: sgd, lr: 0.01, momentum: 0.9}
"""

TRAINER = """
device: cpu
dataloaders:
  train: {config: {batch_size: 64, shuffle: true, num_workers: 1, drop_last: true}}
  test: {config: {batch_size: 32}}
optimizer: {module: torch.optim, type: SGD, config: {lr: 0.1}}
trainer: {config: {epochs: 2, precision: fp32, keep_best_on: accuracy}}
"""

LOSS = "loss = nn.CrossEntropyLoss()"


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)
    for name, text in (("ours.yaml", OURS), ("local.yaml", LOCAL), ("trainer.yaml", TRAINER)):
        (shared_kernel.folder / name).write_text(text)


@pytest.fixture(autouse=True)
def fresh(nb):
    nb.run("net = make_net()\nbefore = weights(net)", check=True)


def column(nb, name):
    return nb.eval(f"run.history[{name!r}].tolist()")


def test_stages_of_our_file(nb):
    nb.run(f"%%ddp_train net samples --config ours.yaml\n{LOSS}", check=True)
    assert column(nb, "stage") == [0] * 8 + [1] * 16
    assert column(nb, "lr") == [0.01] * 8 + [0.1] * 16
    assert nb.eval("run.config.nproc") == 2


def test_the_line_wins_over_the_stages_of_a_file(nb):
    cell = nb.run(f"%%ddp_train net samples --config ours.yaml -n 1 --epochs 1 --lr 0.5\n{LOSS}", check=True)
    assert column(nb, "lr") == [0.5] * 16
    assert "ours.yaml: in every stage epochs, lr of the line" in cell.text


def test_a_file_with_local_and_training(nb):
    cell = nb.run(f"%%ddp_train net samples --config local.yaml -n 2 --freeze-rb-layer layers.0.*\n{LOSS}", check=True)
    assert column(nb, "stage") == [0] * 12 + [1] * 12
    assert column(nb, "samples") == [64] * 12 + [32] * 12
    assert nb.eval("run.config.val_split") == 0.25
    assert nb.eval("len(run.epochs['val_loss'])") == 3
    for note in (
        "local.yaml: not mapped: local.ddp_port: not needed, a free port is taken",
        "local.yaml: not mapped: training.stage_0.optimizer.betas: an optimizer hook sets it",
        "local.yaml: not given there, so as by default there: drop_last false, precision fp32",
    ):
        assert note in cell.text


def test_a_file_with_dataloaders_and_trainer(nb):
    cell = nb.run(f"%%ddp_train net samples --val held_out --config trainer.yaml -n 2\n{LOSS}", check=True)
    assert nb.eval("run.config.to_json()").items() >= {"devices": "cpu", "batch_size": 64, "val_batch_size": 32, "num_workers": 2, "lr": 0.1}.items()
    assert column(nb, "lr") == [0.1] * 16
    assert "trainer.yaml: not mapped: trainer.config.keep_best_on" in cell.text
    assert "trainer.yaml: num_workers 1 per rank, 2 over 2 ranks" in cell.text


def test_hooks_and_validation_data_win(nb):
    body = f"{LOSS}\ndef optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.25)"
    cell = nb.run(f"%%ddp_train net samples --val held_out --config local.yaml --epochs 1 --freeze-rb-layer layers.0.*\n{body}", check=True)
    assert "local.yaml: training.stage_1.optimizer is left out: the hook makes it" in cell.text
    assert "local.yaml: its split of the training data is left out: validation data is given" in cell.text
    assert set(column(nb, "stage")) == {0, 1}


def test_the_plan_lists_it_too(nb):
    cell = nb.run("%ddp_plan net samples --config local.yaml", check=True)
    assert "local.yaml: not mapped: training.stage_0.freeze_rb_layer: say which parameters are meant: --freeze-rb-layer PATTERN" in cell.text


def test_from_python(nb):
    nb.run("run = nbddp.train(net, samples, loss=nn.CrossEntropyLoss(), config='ours.yaml', epochs=1)", check=True)
    assert column(nb, "stage") == [0] * 8 + [1] * 8
    nb.run("run = nbddp.train(net, samples, loss=nn.CrossEntropyLoss(), config={'n': 2, 'stages': [{'epochs': 1}]}, max_steps=2)", check=True)
    assert column(nb, "step") == [1, 2]
    nb.run("run = nbddp.train(net, samples, loss=nn.CrossEntropyLoss(), config='local.yaml', freeze_rb_layer='layers.0.*', epochs=1)", check=True)
    assert set(column(nb, "stage")) == {0, 1}


@pytest.mark.parametrize(
    "line, said",
    [
        ("--config nowhere.yaml", "--config nowhere.yaml: there is no such file."),
        ("--config ours.yaml --freeze-rb-layer rb.*", "freeze_rb_layer is given in the call"),
        ("--freeze-rb-layer rb.*", "--freeze-rb-layer goes with --config"),
        ("--config local.yaml --freeze-rb-layer rb.*", "the pattern rb.* matches no parameter"),
        ("--config local.yaml --epochs many", "epochs='many'"),
    ],
)
def test_refusals_before_the_body_runs_or_anything_starts(nb, line, said):
    error = nb.run(f"%%ddp_train net samples {line}\n{LOSS}").error
    assert error.ename == "ConfigError"
    assert said in error.evalue


def test_stages_in_both_places_are_refused(nb):
    error = nb.run(f"%%ddp_train net samples --config ours.yaml\n{LOSS}\nstages = [nbddp.Stage(epochs=1)]").error
    assert (error.ename, error.evalue) == ("ConfigError", "--config ours.yaml: the file has stages, and so has the cell: keep one of the two")
