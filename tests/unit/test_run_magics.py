"""The line magics about runs, on run directories that a supervisor could have left."""

from __future__ import annotations

import os
import time

import pytest
import safetensors.torch
import torch
from torch import nn

from nbddp import checkpoint, prune, runs
from nbddp.errors import ConfigError
from nbddp.kernel.completion import CHECKPOINTS, complete
from nbddp.kernel.run import Run
from nbddp.kernel.text import bytes_text
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


def tail(run_dir):
    return f"digits-{short(run_dir)}"


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


def test_runs_are_sorted(shell, root):
    runs = [finished(root, epochs=1, steps_per_epoch=steps, config={"lr": lr, "per_rank_batch_size": 4}) for steps, lr in ((20, 0.1), (30, 0.3), (10, 0.2))]

    def order(line):
        shell.run(line)
        places = {shell.output.index(run.id): number for number, run in enumerate(runs)}
        return [places[place] for place in sorted(places)]

    assert order("%ddp_runs") == order("%ddp_runs --sort started") == [2, 1, 0]
    assert order("%ddp_runs --reverse") == [0, 1, 2]
    assert order("%ddp_runs --sort steps") == [1, 0, 2]
    assert order("%ddp_runs --sort lr --reverse") == [1, 2, 0]
    assert order("%ddp_runs --sort per-rank-batch-size --reverse false") == [2, 1, 0], "equal ones stay in their order"
    assert {"best", "size"} <= {offer for offer, _ in complete("ddp_runs", "--sort ", {})[1]}


def test_pruning_names_and_only_then_deletes(shell, root):
    old, new = sorted((finished(root, epochs=1, steps_per_epoch=10) for _ in range(2)), key=lambda run: run.id)  # ids of one second are in any order
    aged(old, days=31)
    shell.run("%ddp_runs --prune")
    assert shell.output.startswith("nothing to prune in ")
    shell.run("%ddp_runs --prune --keep 1")
    size = bytes_text(old.bytes())
    assert shell.output.splitlines() == [f"1 run ({size}) would be deleted; --no-dry-run deletes them:", f"  {old.id}  finished  {size}"]
    assert old.path.exists()
    shell.run("%ddp_runs --prune --keep 1 --older-than-days 30.5 --no-dry-run")
    assert shell.output.splitlines() == [f"1 run ({size}) deleted:", f"  {old.id}  finished  {size}"]
    assert [old.path.exists(), new.path.exists()] == [False, True]


def test_runs_that_are_named_are_pruned_however_young(shell, root):
    one, other, third = (finished(root, epochs=1, steps_per_epoch=10, note=note) for note in ("a\nnote", None, None))
    child = FakeRun(root)
    child.run_dir.write_spec({**(child.run_dir.read_spec() or {}), "parent": one.id})
    child.end("stopped")
    size = bytes_text(one.bytes())
    remark = f"{tail(child.run_dir)} goes on from {tail(one)}: its curves would begin where it went on"
    shell.run(f"%ddp_runs --prune {short(one)}")
    assert shell.output.splitlines() == [f"1 run ({size}) would be deleted; --no-dry-run deletes them:", f"  {one.id}  finished  {size}  a note", remark]
    assert one.path.exists()
    shell.ip.user_ns["rest"] = runs()[-2:]
    named = {run.id for run in shell.ip.user_ns["rest"]}
    shell.run(f"%ddp_runs --prune rest {child.run_dir.path} --no-dry-run")
    gone = {*named, child.run_dir.id}
    assert shell.output.startswith(f"{len(gone)} runs (")
    assert " deleted:" in shell.output
    left = {run.id for run in (one, other, third)} - gone
    assert {row.id for row in runs()} == left
    assert prune(runs=list(left), dry_run=False) == list(left)
    assert not left or len(runs()) == 0


def test_a_run_that_goes_on_is_not_pruned_and_neither_are_those_named_beside_it(shell, root, live):
    ended = finished(root, epochs=1, steps_per_epoch=10)
    for line in (f"%ddp_runs --prune {short(ended)} {short(live.run_dir)} --no-dry-run", f"%ddp_runs --prune {short(live.run_dir)}"):
        name = tail(live.run_dir)
        assert refused(shell, line) == f"{name} is not over yet, and nothing was deleted: %ddp_stop {name} ends it"
    with pytest.raises(ConfigError, match="is not over yet"):
        prune(runs=Run(live.run_dir), dry_run=False)
    assert prune(keep=0, older_than_days=0) == [ended.id]
    assert ended.path.exists()
    assert live.run_dir.path.exists()


def test_what_can_not_be_deleted_is_said(shell, root, monkeypatch):
    import shutil

    run = finished(root, epochs=1, steps_per_epoch=10)

    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    shell.run(f"%ddp_runs --prune {short(run)} --no-dry-run")
    assert shell.output.strip() == f"{run.id} could not be deleted: [Errno 13] Permission denied: '{run.path}'"
    assert prune(runs=run.path, dry_run=False) == []


@pytest.mark.parametrize(
    "line, said",
    [
        ("%ddp_runs all", "all: too many words; write %ddp_runs [--root DIR]"),
        ("%ddp_runs --keep 3", "--keep goes with --prune"),
        ("%ddp_runs --no-dry-run", "--dry-run goes with --prune"),
        ("%ddp_runs --prune --sort size", "--sort arranges the list of runs: leave it out with --prune"),
        ("%ddp_runs --prune --reverse", "--reverse arranges the list of runs: leave it out with --prune"),
        ("%ddp_runs --sort", "--sort needs a value (COLUMN): order of the runs"),
        ("%ddp_runs --sort siez", "sort=siez: not a column and not an option. Did you mean size?"),
        ("%ddp_runs --reverse=maybe", "--reverse=maybe: write --reverse alone, or true or false after it"),
        ("%ddp_runs --prune --keep few", "--keep few: must be a whole number, 0 or more"),
        ("%ddp_runs --prune --keep 1.5", "--keep 1.5: must be a whole number, 0 or more"),
        ("%ddp_runs --prune --older-than-days -1", "--older-than-days -1: must be a number, 0 or more"),
        ("%ddp_runs --prune nowhere --no-dry-run", "no run nowhere in"),
        ("%ddp_runs --prune net", "no run net in"),
        ("%ddp_runs --prune a --keep 3", "--keep chooses among all runs, and a names one: leave one of the two out"),
        ("%ddp_attach", "something is missing: write %ddp_attach RUN [--as NAME]"),
        ("%ddp_attach a b", "b: too many words; write %ddp_attach RUN [--as NAME]"),
        ("%ddp_attach a --as 3x", "no run a in"),
        ("%ddp_attach {missing}", "{missing}: missing is not defined in the notebook."),
        ("%ddp_stop", "no run was started in this kernel: name one; %ddp_runs lists them"),
        ("%ddp_stop nowhere", "no run nowhere in"),
        ("%ddp_stacks --all", "--all is not an option of %ddp_stacks. %ddp_stacks -h lists the options."),
        ("%ddp_load", "something is missing: write %ddp_load MODEL [RUN|PATH] [--which last|best|initial|EPOCH] [--no-strict] [--no-w"),
        ("%ddp_load net a b", "b: too many words; write %ddp_load MODEL [RUN|PATH]"),
        ("%ddp_load net nowhere", "no run nowhere in"),
        ("%ddp_load net --strict=maybe", "--strict=maybe: write --strict alone, or true or false after it"),
        ("%ddp_load net --no-strikt", "--no-strikt is not an option of %ddp_load. Did you mean --strict?"),
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


def test_a_checkpoint_file_is_loaded(shell, tmp_path, monkeypatch):
    wanted = nn.Linear(2, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(wanted.state_dict(), tmp_path / "net.pt")
    torch.save(wanted.state_dict(), tmp_path / "my net.pt")
    shell.ip.user_ns["where"] = tmp_path / "net.pt"
    for path, said in (
        (f"{tmp_path}/net.pt", f"{tmp_path}/net.pt"),
        ("net.pt", "net.pt"),
        ("./net.pt", "net.pt"),
        ("~/net.pt", f"{tmp_path}/net.pt"),
        ("'my net.pt'", "my net.pt"),
        ('"~/my net.pt"', f"{tmp_path}/my net.pt"),
        ("{where}", f"{tmp_path}/net.pt"),
        ("$where", f"{tmp_path}/net.pt"),
        ("where", f"{tmp_path}/net.pt"),
    ):
        nn.init.zeros_(shell.ip.user_ns["net"].weight)
        shell.run(f"%ddp_load net {path}  # the one of yesterday")
        assert torch.equal(shell.ip.user_ns["net"].weight, wanted.weight)
        assert shell.output == f"net: {said}\n"
    assert "is one checkpoint file; leave --which out" in refused(shell, f"%ddp_load net {tmp_path}/net.pt --which best")


def test_what_was_loaded_and_how_is_said(shell, tmp_path):
    net = nn.DataParallel(nn.Linear(2, 1).double())
    torch.save({"model": net.state_dict(), "model_ema": net.state_dict(), "epoch": 3, "global_step": 120}, tmp_path / "x.ckpt")
    shell.run(f"%ddp_load net {tmp_path}/x.ckpt")
    assert shell.output == (
        f"net: {tmp_path}/x.ckpt; epoch 3, step 120; names without module.; 2 from float64 to float32; from its entry model, not model_ema\n"
    )
    safetensors.torch.save_file({"weight": torch.ones(1, 2), "more": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"step": "7"})
    assert refused_file(shell, f"%ddp_load net {tmp_path}/x.safetensors").splitlines()[1:] == [
        "  missing     bias  in the model alone",
        "  unexpected  more  in the file alone",
    ]
    shell.run(f"%ddp_load net {tmp_path}/x.safetensors --no-strict")
    assert shell.output == (
        f"net: {tmp_path}/x.safetensors; step 7; 1 entry loaded, left out:\n  missing     bias  in the model alone\n  unexpected  more  in the file alone\n"
    )


def refused_file(shell, source):
    shell.run(source, check=False)
    assert type(shell.error).__name__ == "CheckpointError", shell.output
    return shell.output.strip().removeprefix("CheckpointError: ")


def test_pickled_objects_are_loaded_where_that_is_asked_for(shell, tmp_path):
    wanted = nn.Linear(2, 1)
    torch.save({"state_dict": wanted.state_dict(), "path": tmp_path}, tmp_path / "x.pt")
    for word in ("", " --weights-only", " --weights-only true"):
        assert "holds pickled objects beside tensors (pathlib.PosixPath)" in refused_file(shell, f"%ddp_load net {tmp_path}/x.pt{word}")
    shell.run(f"%ddp_load net {tmp_path}/x.pt --no-weights-only")
    assert torch.equal(shell.ip.user_ns["net"].weight, wanted.weight)


def test_a_path_that_is_not_there_lists_those_that_are(shell, tmp_path):
    torch.save({}, tmp_path / "net.pt")
    assert refused_file(shell, f"%ddp_load net {tmp_path}/nett.pt") == f"no checkpoint {tmp_path}/nett.pt; {tmp_path} has net.pt"
    said = refused_file(shell, f"%ddp_load net {tmp_path}")
    assert said == f"{tmp_path} is a folder, not a run directory; name one of its files: net.pt"


def test_a_run_that_is_not_there_names_the_nearest(shell, root):
    run = finished(root, epochs=1, steps_per_epoch=10)
    near = f"{short(run)[:3]}{'x' if short(run)[3] != 'x' else 'y'}"
    assert refused(shell, f"%ddp_load net {near}") == f"no run {near} in {root}; %ddp_runs lists them. Did you mean {short(run)}?"
    assert refused(shell, "%ddp_load net digitz").startswith(f"no run digitz in {root}; %ddp_runs lists them. Did you mean digits")
    other = finished(root, epochs=1, steps_per_epoch=10)
    said = refused(shell, "%ddp_load net digits")
    assert said.startswith("2 runs match digits: ")
    assert said.endswith("; %ddp_runs lists them")
    assert run.id in said
    assert other.id in said


@pytest.fixture
def kept(root):
    """A run with a last and a best checkpoint of a model with one output."""
    run = finished(root, epochs=1, steps_per_epoch=10)
    for name in ("last", "best"):
        content = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "model": checkpoint.model_state(nn.Linear(2, 1))}
        checkpoint.write(run.checkpoints / f"{name}.pt", {**content, "epoch": 1, "epochs_done": 1, "step": 10})
    return run


def test_a_checkpoint_of_a_run_is_loaded(shell, kept):
    shell.ip.user_ns["run"] = Run(kept)
    for words, name in ((short(kept), "last"), (str(kept.path), "last"), ("run --which best", "best"), (f"{kept.id} --which best", "best")):
        shell.run(f"%ddp_load net {words}")
        assert torch.equal(shell.ip.user_ns["net"].weight, checkpoint.load_checkpoint(kept.checkpoints / f"{name}.pt")["weight"])
        assert kept.id in shell.output
    assert "has no checkpoint 7: it has best, last" in refused_file(shell, "%ddp_load net run --which 7")


def test_of_a_run_what_fits_is_loaded_where_that_is_asked_for(shell, kept):
    shell.ip.user_ns["net"] = nn.ModuleDict({"weight": nn.Linear(1, 1)})
    assert "does not fit ModuleDict; the model is unchanged" in refused_file(shell, f"%ddp_load net {short(kept)} --no-strict")
    net = shell.ip.user_ns["net"] = nn.Linear(2, 3)
    assert "does not fit Linear" in refused_file(shell, f"%ddp_load net {short(kept)}")
    net.weight = nn.Parameter(torch.zeros(1, 2))
    shell.run(f"%ddp_load net {short(kept)} --no-strict --which best")
    assert shell.output == (f"net: {kept.checkpoints}/best.pt; epoch 1, step 10; 1 entry loaded, left out:\n  shape  bias  the model has (3,), the file (1,)\n")
    assert torch.equal(net.weight, checkpoint.load_checkpoint(kept.checkpoints / "best.pt")["weight"])


def test_tab_offers_options_and_files(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("a.pt", "b.safetensors", "notes.txt", "models/c.ckpt"):
        (tmp_path / name).touch()
    assert [offer for offer, _ in complete("ddp_load", "net --no", {})[1]] == ["--no-strict", "--no-weights-only"]
    assert [offer for offer, _ in complete("ddp_load", "net ", {})[1]] == ["a.pt", "b.safetensors"]
    assert [offer for offer, _ in complete("ddp_load", "net a.", {})[1]] == ["a.pt"]
    assert [offer for offer, _ in complete("ddp_load", "net m", {})[1]] == ["models/"]
    assert [offer for offer, _ in complete("ddp_load", "net ./models/c", {})[1]] == ["./models/c.ckpt"]
    assert {*CHECKPOINTS, ".tar"} == set(checkpoint.SUFFIXES)


def test_tab_offers_the_runs(root, live):
    other = finished(root, epochs=1, steps_per_epoch=10)
    for magic, text in (("ddp_attach", ""), ("ddp_stop", "2"), ("ddp_load", "net "), ("ddp_train", "net data --init 2")):
        assert {offer for offer, _ in complete(magic, text, {})[1]} == {live.run_dir.id, other.id}


def test_a_text_that_can_not_be_a_path_is_no_traceback(shell, root):
    for word in ("x" * 300, "{net}", "''"):
        shell.run(f"%ddp_load net {word}", check=False)
        assert type(shell.error).__name__ == "ConfigError"
