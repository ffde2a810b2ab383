"""Whole runs with trackers, from a kernel: what they have is what the run's history has, and they never change how a run goes."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.example import EXAMPLE, run_folders
from support.wandb_file import read_wandb_file

pytestmark = pytest.mark.kernel

BODY = """
def training_step(model, batch):
    x, y = batch
    output = model(x)
    return {"loss": F.cross_entropy(output, y), "accuracy": (output.argmax(1) == y).float().mean()}
"""

KILLED = """
def training_step(model, batch):
    if rank() == 0 and list(Path("nbddp_runs").glob("*-killed-*/wandb/*/*.wandb")):
        os.kill(os.getpid(), 9)
    return step(model, batch)
"""
WITHOUT = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "tensorboard" else find(name)
"""


@pytest.fixture(scope="module", autouse=True)
def example(shared_kernel):
    shared_kernel.run(EXAMPLE, check=True)
    shared_kernel.run("os.environ.update(WANDB_MODE='offline', WANDB_ERROR_REPORTING='false')", check=True)


def wandb_of(folder):
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return read_wandb_file(path)


def board_of(folder, run):
    read = EventAccumulator(str(folder / run.name), size_guidance={"scalars": 0})
    read.Reload()
    return read


def columns(nb, table, *names):
    """Columns of ``run.history`` or ``run.epochs`` by step, as JSON can hold them."""
    return {name: dict(nb.eval(f"[(int(s), float(v)) for s, v in zip(run.{table}['step'], run.{table}['{name}'])]")) for name in names}


def test_they_have_what_the_history_has(nb):
    nb.run(f"%%ddp_train net samples --val held_out -n 2 --batch-size 64 --epochs 3 --wandb project=p,tags=a+b --tensorboard boards{BODY}", check=True)
    folder = run_folders(nb)[-1]
    written, board = wandb_of(folder), board_of(nb.folder / "boards", folder)
    expected = {f"train/{name}": values for name, values in columns(nb, "history", "loss", "lr", "accuracy").items()}
    epochs = columns(nb, "epochs", "loss", "val_loss", "val_accuracy")
    expected |= {"epoch/loss": epochs["loss"], "val/loss": epochs["val_loss"], "val/accuracy": epochs["val_accuracy"]}
    assert len(expected["train/loss"]) == 24
    for name, values in expected.items():
        assert written.column(name) == pytest.approx(values), name
        assert {scalar.step: scalar.value for scalar in board.Scalars(name)} == pytest.approx(values), name
    assert (written.exit_code, written.summary["state"]) == (0, "finished")
    assert (written.config["batch_size"], written.config["plan"]["nproc"]) == (64, 2)
    assert "wandb" not in nb.run("print(run.log())").text
    assert nb.eval("run.state") == "finished"


def test_a_resumed_run_goes_on_with_its_step_numbers(nb):
    nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 --epochs 1 --name going --tensorboard boards{BODY}", check=True)
    first = run_folders(nb)[-1]
    nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 --epochs 2 --name going --tensorboard boards --resume last{BODY}", check=True)
    second = run_folders(nb)[-1]
    steps = [[scalar.step for scalar in board_of(nb.folder / "boards", folder).Scalars("train/loss")] for folder in (first, second)]
    assert steps == [list(range(1, 9)), list(range(9, 17))]
    assert first.name in board_of(nb.folder / "boards", second).Tensors("run")[0].tensor_proto.string_val[0].decode()


def test_one_that_fails_changes_nothing(nb):
    fake = nb.folder / "elsewhere"
    fake.mkdir()
    (fake / "wandb.py").write_text("raise RuntimeError('no luck')")
    nb.run(f"os.environ['PYTHONPATH'] = {str(fake)!r}\nnet = make_net()\nbefore = weights(net)", check=True)
    cell = nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 --max-steps 5 --wandb project=p{BODY}", check=True)
    nb.run("del os.environ['PYTHONPATH']", check=True)
    assert nb.eval("run.state == 'finished' and len(run.history['loss']) == 5 and not same(weights(net), before)") is True
    assert "wandb is switched off, training goes on: RuntimeError: no luck" in cell.shown("text/html")[-1]


def test_a_killed_rank_leaves_none_behind(nb):
    cell = nb.run(f"%%ddp_train net samples -n 2 --batch-size 64 --max-time 60 --name killed --wandb project=p{KILLED}")
    assert cell.error.ename == "WorkerLost"
    assert "rank 0 was killed by signal 9" in cell.error.traceback


def test_a_package_that_is_missing_is_an_error_before_anything_starts(nb):
    runs = run_folders(nb)
    nb.run(WITHOUT, check=True)
    cell = nb.run(f"%%ddp_train net samples --tensorboard boards{BODY}")
    nb.run("importlib.util.find_spec = find", check=True)
    assert (cell.error.ename, cell.error.evalue) == ("ConfigError", "--tensorboard: the package tensorboard is not installed: pip install 'nbddp[trackers]'")
    assert run_folders(nb) == runs
