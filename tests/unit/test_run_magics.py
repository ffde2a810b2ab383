"""The line magics about runs, on run directories that a supervisor could have left."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.kernel.completion import complete
from nbddp.kernel.run import Run
from support import shell as shells
from support.fake_run import FakeRun, finished


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(root))
    monkeypatch.setattr("nbddp.kernel.runs._last", [])
    return root


@pytest.fixture
def shell(tmp_path, root):
    with shells.running(tmp_path) as shell:
        shell.ip.user_ns["net"] = nn.Linear(2, 1)
        yield shell


@pytest.fixture
def live(root):
    run = FakeRun(root, epochs=1, steps_per_epoch=10)
    run.start()
    run.train(5)
    yield run
    run.end("stopped")


def refused(shell, source):
    shell.run(source, check=False)
    assert type(shell.error).__name__ == "ConfigError", shell.output
    return shell.output.strip().removeprefix("ConfigError: ")


def short(run_dir):
    return run_dir.id.rpartition("-")[2]


def aged(run_dir, days):
    then = time.time() - days * 86400
    os.utime(run_dir.path, (then, then))


def test_runs_are_listed(shell, root, tmp_path):
    run = finished(root, epochs=1, steps_per_epoch=10, note="first try")
    shell.run("%ddp_runs")
    assert run.id in shell.output
    assert "first try" in shell.output
    shell.ip.user_ns["elsewhere"] = str(tmp_path / "none")
    shell.run("%ddp_runs --root {elsewhere}")
    assert "no runs here yet" in shell.output


def test_pruning_names_and_only_then_deletes(shell, root):
    old, new = sorted((finished(root, epochs=1, steps_per_epoch=10) for _ in range(2)), key=lambda run: run.id)  # ids of one second are in any order
    aged(old, days=31)
    shell.run("%ddp_runs --prune")
    assert shell.output.startswith("nothing to prune in ")
    shell.run("%ddp_runs --prune --keep 1")
    assert shell.output.splitlines() == ["1 run would be deleted; --no-dry-run deletes them:", f"  {old.id}"]
    assert old.path.exists()
    shell.run("%ddp_runs --prune --keep 1 --older-than-days 30.5 --no-dry-run")
    assert shell.output.splitlines() == ["1 run deleted:", f"  {old.id}"]
    assert [old.path.exists(), new.path.exists()] == [False, True]


@pytest.mark.parametrize(
    "line, said",
    [
        ("%ddp_runs all", "all: too many words; write %ddp_runs [--root DIR]"),
        ("%ddp_runs --keep 3", "--keep goes with --prune"),
        ("%ddp_runs --no-dry-run", "--dry-run goes with --prune"),
        ("%ddp_runs --prune --keep few", "--keep few: must be a whole number, 0 or more"),
        ("%ddp_runs --prune --keep 1.5", "--keep 1.5: must be a whole number, 0 or more"),
        ("%ddp_runs --prune --older-than-days -1", "--older-than-days -1: must be a number, 0 or more"),
        ("%ddp_attach", "something is missing: write %ddp_attach RUN [--as NAME]"),
        ("%ddp_attach a b", "b: too many words; write %ddp_attach RUN [--as NAME]"),
        ("%ddp_attach a --as 3x", "no run a in"),
        ("%ddp_attach {missing}", "{missing}: missing is not defined in the notebook."),
        ("%ddp_stop", "no run was started in this kernel: name one; %ddp_runs lists them"),
        ("%ddp_stop nowhere", "no run nowhere in"),
        ("%ddp_stacks --all", "--all is not an option of %ddp_stacks. %ddp_stacks -h lists the options."),
        ("%ddp_load", "something is missing: write %ddp_load MODEL [RUN|PATH] [--which last|best|initial|EPOCH]"),
        ("%ddp_load nett", "nett is not defined in the notebook. Did you mean net?"),
        ("%ddp_load 5", "MODEL 5 is a int: it must be a torch.nn.Module"),
        ("%ddp_load net --which first", "--which first: must be last, best, initial or the number of an epoch"),
        ("%ddp_load net", "no run was started in this kernel"),
    ],
)
def test_refusals_name_rule_and_remedy(shell, line, said):
    assert refused(shell, line).startswith(said)


@pytest.mark.parametrize("magic", ["ddp_runs", "ddp_attach", "ddp_stop", "ddp_stacks", "ddp_load"])
def test_help_says_what_to_write(shell, magic):
    shell.run(f"%{magic} -h")
    assert shell.output.startswith(f"%{magic} ")


def test_a_run_is_attached_by_a_part_of_its_id(shell, root):
    run = finished(root, epochs=1, steps_per_epoch=10)
    shell.run(f"%ddp_attach {short(run)} --as again")
    attached = shell.ip.user_ns["again"]
    assert isinstance(attached, Run)
    assert (attached.id, attached.state) == (run.id, "finished")
    assert run.id in shell.output
    assert "run" not in shell.ip.user_ns


def test_a_run_is_stopped_by_id_and_by_variable(shell, live):
    shell.run(f"%ddp_attach {live.run_dir.id} --as mine")
    shell.run("%ddp_stop mine")
    assert shell.output == f"{live.run_dir.id} was asked to stop\n"
    assert live.run_dir.asked() == "stop"


def test_a_run_that_has_ended_is_not_asked(shell, root):
    run = finished(root, epochs=1, steps_per_epoch=10)
    shell.run(f"%ddp_stop {run.path}")
    assert shell.output == f"{run.id} has ended already: finished\n"
    assert run.asked() is None


def test_stacks_of_a_run_that_has_ended_are_none(shell, root):
    run = FakeRun(root)
    run.end("failed")
    shell.run(f"%ddp_stacks {short(run.run_dir)}")
    assert shell.output == "no rank of this run is alive on this host\n"


def test_a_checkpoint_file_is_loaded(shell, tmp_path):
    wanted = nn.Linear(2, 1)
    torch.save(wanted.state_dict(), tmp_path / "net.pt")
    shell.run(f"%ddp_load net {tmp_path}/net.pt")
    assert torch.equal(shell.ip.user_ns["net"].weight, wanted.weight)
    assert shell.output == f"net: {tmp_path}/net.pt\n"
    assert "is one checkpoint file; leave --which out" in refused(shell, f"%ddp_load net {tmp_path}/net.pt --which best")


def test_a_checkpoint_of_a_run_is_loaded(shell, root):
    run = finished(root, epochs=1, steps_per_epoch=10)
    wanted = nn.Linear(2, 1)
    content = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "model": checkpoint.model_state(wanted), "epoch": 1, "epochs_done": 1, "step": 10}
    checkpoint.write(run.checkpoints / "last.pt", content)
    shell.run(f"%ddp_load net {short(run)}")
    assert torch.equal(shell.ip.user_ns["net"].weight, wanted.weight)
    assert run.id in shell.output


def test_tab_offers_the_runs(root, live):
    other = finished(root, epochs=1, steps_per_epoch=10)
    for magic, text in (("ddp_attach", ""), ("ddp_stop", "2"), ("ddp_load", "net "), ("ddp_train", "net data --init 2")):
        assert {offer for offer, _ in complete(magic, text, {})[1]} == {live.run_dir.id, other.id}
