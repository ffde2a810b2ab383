"""Which checkpoint `--resume` means, what is taken over of its options, what may change, and what is left to do."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbddp import checkpoint
from nbddp.config import TrainConfig
from nbddp.errors import CheckpointError, ConfigError
from nbddp.kernel import resume, resume_rules
from nbddp.planning import Machine, make_plan
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.stage import Stage

N = 100


class Net(nn.Linear):
    def __init__(self, width=2):
        super().__init__(width, 1)


def write(path: Path, *, epoch=3, step=30, done=None, config=None, model=None, **facts: Any) -> Path:
    """A checkpoint such as a rank writes; by default at the end of epoch 3 of 10 steps of 10 samples."""
    model = model or Net()
    done = epoch if done is None else done
    early_stop = {"without_gain": 0, "fresh": None, "last": None, "validated_at": -1}
    best = {"name": "val_loss", "mode": "min", "min_delta": 0.0, "value": None, "epoch": 0, "step": 0}
    content = {
        "model": checkpoint.model_state(model),
        **{"optimizer": {"state": {}, "param_groups": []}, "scheduler": None, "scaler": None, "comm_hook": None, "precision": "fp32", "lr": 1e-3},
        "rng": [{"torch": torch.get_rng_state()}] * 2,
        **{"epoch": epoch, "step": step, "epochs_done": done, "stage": 0, "stage_name": "0", "stage_step": step, "stage_epochs_done": done},
        "sampler": {"seed": 0, "stage": 0, "epoch": epoch, "step": step % 10 or 10, "samples": (step % 10 or 10) * 10, "n": N},
        **{"values": {}, "metrics": {}, "elapsed_s": 12.0},
        "epoch_sums": {"loss": 0.0, "weight": 0.0, "scalars": {}, "samples": 0, "steps": 0, "times": [0.0] * 3},
        "config": {"nproc": 2, "batch_size": 10, "epochs": 10, **(config or {})},
        **{"matmul_precision": "highest", "world_size": 2, "versions": {"nbddp": "0.1", "torch": "2"}, "run": path.parent.parent.name},
        **{"value": None, "finite": True, "pause_s": 0.0},
        **facts,
        "best": {**best, **facts.get("best", {})},
        "early_stop": {**early_stop, **facts.get("early_stop", {})},
    }
    checkpoint.write(path, content)
    return path


@dataclass
class Runs:
    root: Path

    def add(self, name="net", *, files=("last",), live=False, spec=None, **facts: Any) -> RunDir:
        run = RunDir.create(self.root, name)
        run.write_spec({"name": None, "model_type": "Net", "hooks": ["loss"], "host": "here", "kernel": None, **(spec or {})})
        for file in ("initial", *files):
            write(run.checkpoints / f"{file}.pt", **facts)
        if live:
            run.write_supervisor(ProcessId.current())
        else:
            run.write_result({"state": "finished"})
        return run


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path / "nbddp_runs")


def find(runs, which="last", *, name=None, model=None):
    return resume.find(str(which), root=runs.root, name=name, model=model or Net())


def tail(run):
    return run.id[-4:]


# -- which


def test_last_is_the_latest_run_of_the_same_class_of_model(runs):
    runs.add()
    run = runs.add()
    runs.add(spec={"model_type": "Other"})
    point = find(runs)
    assert (point.path, point.run.path, point.parent, point.notes) == (run.checkpoints / "last.pt", run.path, run.id, ())
    assert point.line == f"resumes run {tail(run)} (Net), epoch 3, step 30, last.pt"
    assert point.to_spec() == {"parent": run.id, "resume": str(run.checkpoints / "last.pt"), "resume_step": 30, "resume_best": None}
    assert not {"model", "optimizer", "rng"} & set(point.facts)


def test_with_a_name_last_is_the_latest_run_of_that_name(runs):
    run = runs.add(spec={"name": "digits", "model_type": "Net"})
    runs.add()
    point = find(runs, name="digits")
    assert point.parent == run.id
    assert point.line.startswith(f"resumes run {tail(run)} (digits), ")
    assert find(runs).parent != run.id
    with pytest.raises(
        ConfigError, match=rf"resume=last: no run called digit in .* has a checkpoint to go on from; there are .*: --resume {tail(find(runs).run)}"
    ):
        find(runs, name="digit")


def test_a_later_run_that_left_nothing_is_passed_over_and_said(runs):
    run = runs.add()
    empty, failed = runs.add(files=()), runs.add()
    shutil.rmtree(failed.checkpoints)
    point = find(runs)
    assert point.parent == run.id
    assert point.notes == tuple(f"run {tail(other)} is later and left no checkpoint: passed over" for other in (failed, empty))


def test_there_is_nothing_to_resume(runs):
    with pytest.raises(ConfigError, match=r"resume=last: no run of a model of class Net in .*nbddp_runs has a checkpoint to go on from$"):
        find(runs)
    run = runs.add(spec={"model_type": "Other", "name": "huge"})
    with pytest.raises(ConfigError, match=rf"; there are {tail(run)} \(huge\): --resume {tail(run)}$"):
        find(runs)


@pytest.mark.parametrize("how", ["id", "tail", "part", "directory", "relative", "file", "home"])
def test_a_run_or_a_file_can_be_named(runs, how, monkeypatch):
    run = runs.add("digits", spec={"name": "digits"})
    runs.add("other")
    monkeypatch.chdir(runs.root.parent)
    monkeypatch.setenv("HOME", str(runs.root))
    names = {
        "id": run.id,
        "tail": tail(run),
        "part": "digits",
        "directory": run.path,
        "relative": f"nbddp_runs/{run.id}",
        "file": run.checkpoints / "last.pt",
        "home": f"~/{run.id}/checkpoints/last.pt",
    }
    point = find(runs, names[how])
    assert (point.path, point.parent, point.run.path) == (run.checkpoints / "last.pt", run.id, run.path)


def test_a_file_is_taken_as_it_is(runs):
    run = runs.add(files=("last", "best"))
    (run.checkpoints / "last.pt").write_bytes(b"half of it")
    with pytest.raises(CheckpointError, match=r"last\.pt is not a complete checkpoint|last\.pt can't be read"):
        find(runs, run.checkpoints / "last.pt")
    assert find(runs, run.checkpoints / "best.pt").path.name == "best.pt"


def test_a_file_away_from_its_run(runs, tmp_path):
    path = write(tmp_path / "kept.pt", run="20261129-130501-digits-k3f9", stage_name="head")
    point = find(runs, path)
    assert (point.run, point.parent) == (None, "20261129-130501-digits-k3f9")
    assert point.line == f"resumes run k3f9 (digits), epoch 3, step 30, stage head, {path}"


def test_what_is_misspelt_is_refused_with_suggestions(runs):
    run = runs.add("digits", files=("last", "best"))
    for given, says in {
        "latest": "resume=latest: no such run in .* Did you mean last",
        f"digit-{tail(run)}": rf"no such run in .* Did you mean digits-{tail(run)}",
        f"{run.checkpoints}/bets.pt": rf"resume=.*: {run.checkpoints} has no bets.pt. Did you mean best.pt\?",
        f"{run.path}/checkpoint/last.pt": rf"resume=.*: there is no folder {run.path}/checkpoint$",
        f"{runs.root}/{run.id[:-1]}x": rf"{runs.root} has no {run.id[:-1]}x. Did you mean {run.id}\?",
        "model.ckpt": r"resume=model.ckpt: \. has no model.ckpt",
        "": "resume is empty: give last, a run, a run directory or a checkpoint file",
        str(runs.root): "is a folder without spec.json, not a run directory: give last, a run, a run directory or a checkpoint file",
    }.items():
        with pytest.raises(ConfigError, match=says):
            find(runs, given)
    runs.add("digits")
    with pytest.raises(ConfigError, match="2 runs match digits"):
        find(runs, "digits")


def test_a_run_that_goes_on_still_is_refused(runs):
    runs.add()
    run = runs.add(live=True)
    for which in ("last", tail(run), run.path, run.checkpoints / "last.pt"):
        with pytest.raises(ConfigError, match=rf"run {run.id} goes on still, .*: %ddp_stop {tail(run)} first, or --init {tail(run)}"):
            find(runs, which)


# -- incomplete, foreign, not fitting


def truncate(path):
    """Without changing what other names of the file hold."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("damage", [truncate, lambda path: (path.unlink(), torch.save([1], path)), lambda path: path.write_bytes(b""), Path.unlink])
def test_the_newest_complete_checkpoint_takes_the_place_of_last(runs, damage):
    run = runs.add()
    for name, step in (("best", 10), ("epoch-0002", 20), ("stage-0", 20), ("epoch-0003", 30)):
        write(run.checkpoints / f"{name}.pt", step=step, epoch=step // 10)
    truncate(run.checkpoints / "epoch-0003.pt")
    damage(run.checkpoints / "last.pt")
    point = find(runs)
    assert (point.path.stem in ("epoch-0002", "stage-0"), point.facts["step"]) == (True, 20)
    (note,) = point.notes
    assert note.startswith(f"run {tail(run)} goes on from {point.path.name}, its newest complete checkpoint: ")
    assert "last.pt" in note


@pytest.mark.parametrize("state, file", [("stopped", "best"), ("failed", "best"), ("finished", "last")])
def test_a_run_that_was_cut_off_has_come_to_its_newest_file(runs, state, file):
    run = runs.add(files=("last",), live=True)
    write(run.checkpoints / "best.pt", step=40, epoch=4)
    (run.path / "supervisor.json").unlink()
    run.write_result({"state": state, "time": 1.0})
    assert find(runs, tail(run)).path == checkpoint.located(run.path) == checkpoint.of_the_end(run) == run.checkpoints / f"{file}.pt"
    truncate(run.checkpoints / "best.pt")
    assert checkpoint.of_the_end(run) == run.checkpoints / "last.pt"
    (run.checkpoints / "last.pt").unlink()
    write(run.checkpoints / "epoch-0001.pt", step=10, epoch=1)
    assert checkpoint.of_the_end(run).stem == ("last" if state == "finished" else "epoch-0001")


def test_never_the_initial_one(runs):
    run = runs.add(files=("last", "best"))
    for name in ("last", "best"):
        truncate(run.checkpoints / f"{name}.pt")
    with pytest.raises(CheckpointError, match=rf"run {run.id} has no checkpoint to go on from: .*last.pt.*; no other file of it is complete"):
        find(runs)
    only = runs.add(files=())
    with pytest.raises(CheckpointError, match=rf"run {only.id} has no checkpoint to go on from: it ended before its first one"):
        find(runs, tail(only))
    model = checkpoint.model_state(Net())
    checkpoint.write(only.checkpoints / "initial.pt", {"model": model, "epoch": 0, "step": 0, "stage": 0, "value": None, "finite": True})
    with pytest.raises(CheckpointError, match="--init"):
        find(runs, only.checkpoints / "initial.pt")


def test_bare_weights_are_for_init(runs, tmp_path):
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt.*--init"):
        find(runs, tmp_path / "weights.pt")


def test_a_model_that_it_does_not_fit(runs):
    run = runs.add()
    with pytest.raises(CheckpointError) as caught:
        find(runs, model=Net(3))
    path = run.checkpoints / "last.pt"
    assert str(caught.value) == (f"{path} does not fit Net, so that nothing can go on from it:\n  shape  weight  the model has (1, 3), the file (1, 2)")
    big = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    with pytest.raises(CheckpointError, match=r"and 10 more$"):
        find(runs, path, model=big)


def test_weights_that_are_not_finite(runs):
    bad = Net()
    bad.weight.data[0, 0] = float("nan")
    run = runs.add(model=bad, finite=False)
    with pytest.raises(CheckpointError, match=r"last.pt is not finite \(weight\), and training does not recover from that$"):
        find(runs)
    write(run.checkpoints / "best.pt")
    with pytest.raises(CheckpointError, match=rf"; best.pt is: --resume {run.checkpoints}/best.pt$"):
        find(runs)


def test_a_buffer_may_hold_infinities(runs):
    masked = Net()
    masked.register_buffer("mask", torch.full((2,), float("-inf")))
    runs.add(model=masked, finite=False)
    assert find(runs, model=masked).facts["step"] == 30


def test_bytes_that_went_wrong_on_the_disk_are_noticed(runs):
    run = runs.add()
    last = run.checkpoints / "last.pt"
    data = bytearray(last.read_bytes())
    place = bytes(data).index(torch.load(last, weights_only=True)["model"]["weight"].numpy().tobytes())
    data[place] ^= 1
    last.write_bytes(data)
    write(run.checkpoints / "epoch-0002.pt", epoch=2, step=20)
    assert find(runs).path.name == "epoch-0002.pt"
    with pytest.raises(CheckpointError, match=r"last\.pt"):
        find(runs, last)


# -- the best


def best(value, step):
    return {"value": value, "epoch": step // 10, "step": step}


def test_the_best_weights_come_along(runs):
    run = runs.add(best=best(0.25, 20))
    assert find(runs).to_spec()["resume_best"] is None
    assert find(runs).notes == ("the best weights so far, of epoch 2 (0.25), are not there any more: the best starts anew",)
    path = write(run.checkpoints / "best.pt", step=20, epoch=2, best=best(0.25, 20))
    assert (find(runs).best, find(runs).notes) == (path, ())
    assert find(runs, path).best == path
    write(run.checkpoints / "epoch-0001.pt", step=10, epoch=1, best=best(0.5, 10))
    early = find(runs, run.checkpoints / "epoch-0001.pt")
    assert early.best == early.path, "the later one is not the best of what went before"
    write(path, step=25, epoch=3, best=best(0.2, 25))
    assert find(runs).best is None


# -- options


def options(runs, brought=None, /, *, config=None, spec=None, facts=None, **given):
    runs.add(config=config, spec=spec, **(facts or {}))
    return resume_rules.merge(find(runs), brought=brought or {}, given=TrainConfig(resume="last", **given))


def test_the_cell_wins_over_a_loader_and_that_over_the_checkpoint(runs):
    stored = {"lr": 1e-3, "batch_size": 20, "num_workers": 2, "seed": 5, "name": "digits", "resume": "older", "run_root": "/elsewhere", "load": "best"}
    merged = options(runs, {"batch_size": 32, "num_workers": 4, "shuffle": False}, config=stored, lr=0.01, num_workers=6, epochs=20)
    config = merged.config
    assert (config.lr, config.batch_size, config.num_workers, config.seed, config.epochs, config.nproc) == (0.01, 32, 6, 5, 20, 2)
    assert (config.name, config.resume, config.run_root, config.load, config.init, config.shuffle) == ("digits", "last", None, "best", "current", False)
    assert merged.changes == (
        "batch_size 20 -> 32 (of the DataLoader)",
        "epochs 10 -> 20",
        "shuffle true -> false (of the DataLoader)",
        "num_workers 2 -> 6",
        "lr 0.001 -> 0.01",
    )


def test_without_anything_new_nothing_differs(runs):
    assert options(runs, {"batch_size": 10}, lr=1e-3).changes == ()


def test_how_values_are_shown(runs):
    merged = options(runs, clip_norm=1.5, devices="cpu", max_steps=500, val_every="5 steps", momentum=0.9, optimizer="sgd", compile=True)
    assert merged.changes == (
        "devices auto -> cpu",
        "max_steps none -> 500",
        "optimizer adamw -> sgd",
        "momentum default -> 0.9",
        "clip_norm none -> 1.5",
        "compile false -> true",
        "val_every 1 epoch -> 5 steps",
    )


@pytest.mark.parametrize(
    "config, given, expected",
    [
        ({"batch_size": 10}, {"per_rank_batch_size": 4}, (None, 4)),
        ({"batch_size": None, "per_rank_batch_size": 4}, {"batch_size": 16}, (16, None)),
    ],
)
def test_one_kind_of_batch_size_gives_way_to_the_other(runs, config, given, expected):
    merged = options(runs, config=config, **given).config
    assert (merged.batch_size, merged.per_rank_batch_size) == expected


def test_a_loader_gives_way_to_the_cell_of_the_other_kind(runs):
    assert options(runs, {"batch_size": 8}, per_rank_batch_size=4).config.batch_size is None
    assert options(runs, {"per_rank_batch_size": 8}, batch_size=4).config.per_rank_batch_size is None


def test_ranks_and_devices_give_way_to_each_other(runs):
    assert options(runs, config={"nproc": 4}, devices="0,1").config.nproc is None
    merged = options(runs, config={"nproc": None, "devices": (0, 1)}, nproc=1).config
    assert (merged.devices, merged.nproc) == ("auto", 1)
    assert options(runs, config={"nproc": 2, "devices": "cpu"}, nproc=3).config.devices == "cpu"


@pytest.mark.parametrize("given, expected", [({}, 64), ({"nproc": 4}, 64), ({"nproc": 3}, None), ({"accumulate": 3}, None), ({"batch_size": 48}, 48)])
def test_a_batch_that_was_the_default_stays_where_it_divides(runs, given, expected):
    spec = {"plan": {"nproc": 2, "stages": [{"batch_size": 64}]}}
    merged = options(runs, config={"batch_size": None}, spec=spec, **given)
    assert merged.config.batch_size == expected
    assert any(line.startswith("batch_size") for line in merged.changes) is ("batch_size" in given)


@pytest.mark.parametrize(
    "config, given, facts, expected",
    [
        ({"max_steps": 30, "epochs": 1}, {"max_steps": 60}, {}, {"max_steps": 60, "epochs": 1}),
        ({"max_steps": 30}, {"epochs": 20}, {}, {"epochs": 20, "max_steps": None}),
        ({"max_steps": 40}, {"epochs": 20}, {}, {"epochs": 20, "max_steps": 40}),
        ({"epochs": 3}, {"max_time": 60}, {}, {"max_time": 60.0}),
        ({"max_time": 10}, {"epochs": 20}, {}, {"max_time": None, "epochs": 20}),
        ({"epochs": 3}, {"lr": 0.1}, {}, {"epochs": 3}),
    ],
)
def test_a_limit_that_was_reached_gives_way_to_another(runs, config, given, facts, expected):
    merged = options(runs, config=config, facts=facts, **given)
    assert {name: getattr(merged.config, name) for name in expected} == expected
    gone = {"max_steps", "max_time"} & {name for name, value in expected.items() if value is None}
    assert all(f"{name} {config[name]} -> none (reached)" in merged.changes for name in gone)
    if "max_time" in given:
        assert "epochs" not in merged.config.given
        assert "epochs 3 -> none (reached)" in merged.changes


def test_options_that_exclude_each_other_say_where_they_come_from(runs):
    with pytest.raises(ConfigError, match=r"static_graph .* give one of the two \(with the options of run \w{4}, which hold where the cell gives no others\)"):
        options(runs, config={"static_graph": True}, find_unused_parameters=True)


def test_options_of_another_version_that_cannot_be_read(runs):
    with pytest.raises(CheckpointError, match=r"the options in .*last.pt, which nbddp 0.1 wrote, can't be read: sharding is not an option"):
        options(runs, config={"sharding": "full"})


# -- what may change, and what is left


def check(runs, *, stages=(), sampler=None, n=N, config=None, spec=None, given=None, **facts):
    runs.add(config=config, spec=spec, **facts)
    point = find(runs)
    merged = resume_rules.merge(point, brought={}, given=TrainConfig(**(given or {}))).config
    plan = make_plan(merged, n_train=n, n_val=10, machine=Machine((), 2), stages=stages)
    return resume_rules.check(point, merged, plan, stages=stages, sampler=sampler)


MIDDLE = {"epoch": 3, "step": 24, "done": 2}


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 20},
        {"accumulate": 5},
        {"nproc": 1},
        {"drop_last": False},
        {"num_workers": 2},
        {"lr": 1.0},
        {"optimizer": "sgd"},
        {"precision": "bf16"},
    ],
)
def test_what_may_change_in_the_middle_of_an_epoch(runs, given):
    assert check(runs, given=given, **MIDDLE) == []


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"given": {"seed": 1}},
            "seed 0 -> 1 in the middle of epoch 3 (40 of 100 samples are done): the order of those that are left would be another; --seed 0, or ",
        ),
        ({"given": {"shuffle": False}}, "shuffle true -> false in the middle of epoch 3 "),
        (
            {"n": 90},
            "number of training samples 100 -> 90 in the middle of epoch 3 (40 of 100 samples are done): the order of those that are left would be ",
        ),
        ({"given": {"val_split": 0.1}}, "val_split none -> 0.1 in the middle"),
        ({"sampler": range(100)}, "sampler none -> given in the middle"),
        ({"spec": {"hooks": ["loss", "sampler"]}}, "sampler given -> none in the middle"),
        ({"config": {"shuffle": False}, "given": {"shuffle": True}}, "shuffle false -> true in the middle"),
    ],
)
def test_what_sets_the_order_may_change_at_the_end_of_an_epoch_only(runs, change, says):
    with pytest.raises(ConfigError) as caught:
        check(runs, **change, **MIDDLE)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith(f"or --init {find(runs).tail} for a new run from its weights")
    assert check(runs, **change) == []


def test_an_end_of_an_epoch_that_is_there_is_offered(runs):
    runs.add(**MIDDLE)
    point = find(runs)
    path = write(point.run.checkpoints / "best.pt", epoch=2, step=20)
    merged = resume_rules.merge(point, brought={}, given=TrainConfig(seed=1)).config
    plan = make_plan(merged, n_train=N, n_val=0, machine=Machine((), 2))
    with pytest.raises(ConfigError, match=rf"or --resume {path}, which is of the end of an epoch$"):
        resume_rules.check(point, merged, plan)


def test_a_sampler_that_was_there_and_is(runs):
    spec = {"hooks": ["sampler"]}
    assert check(runs, spec=spec, sampler=range(N), **MIDDLE) == []


def test_a_seed_that_splits_the_data_anew_is_said(runs):
    assert check(runs, config={"val_split": 0.1}, given={"seed": 1}) == [
        "seed 0 -> 1 draws another val_split: samples that were validated on are trained on now, and the other way round"
    ]


TWO = [Stage("head", epochs=3), Stage("all", epochs=5, max_steps=60)]
LEFT = [
    ({"epoch": 10, "step": 100}, {}, "10 of 10 epochs done: --epochs 20"),
    ({"epoch": 10, "step": 100}, {"given": {"epochs": 4}}, "10 of 4 epochs done: --epochs 14"),
    ({"step": 30}, {"config": {"max_steps": 30}}, "30 of 30 steps done: --max-steps 60"),
    ({"step": 30, "elapsed_s": 61.0}, {"config": {"max_time": 60}}, "61 of 60 s are over: --max-time 121"),
    (
        {"early_stop": {"without_gain": 3}, "best": best(0.5, 10)},
        {"config": {"patience": 3}},
        "val_loss was not better 3 times in a row, and patience is 3: --patience 6",
    ),
    (
        {"stage": 1, "stage_name": "all", "stage_epochs_done": 5, "stage_step": 50},
        {"stages": TWO},
        "5 of 5 epochs done, in stage all, the last: epochs=10 in it",
    ),
    (
        {"stage": 1, "stage_name": "all", "stage_epochs_done": 4, "stage_step": 60},
        {"stages": TWO},
        "60 of 60 steps done, in stage all, the last: max_steps=120 in it",
    ),
]


@pytest.mark.parametrize("facts, how, says", LEFT, ids=[says[:30] for _, _, says in LEFT])
def test_where_nothing_is_left(runs, facts, how, says):
    with pytest.raises(ConfigError) as caught:
        check(runs, **how, **facts)
    assert str(caught.value) == f"run {find(runs).tail} has nothing left to do: {says}"


@pytest.mark.parametrize(
    "facts, how",
    [
        ({"epoch": 10, "step": 94, "done": 9}, {}),
        ({"epoch": 10, "step": 100}, {"given": {"epochs": 11}}),
        ({"early_stop": {"without_gain": 3}, "best": best(0.5, 30)}, {"config": {"patience": 3}, "given": {"patience": 4}}),
        ({"early_stop": {"without_gain": 3}, "best": best(0.5, 30)}, {"config": {"patience": 3}, "given": {"monitor": "loss"}}),
        ({"stage": 0, "stage_name": "head", "stage_epochs_done": 3}, {"stages": TWO}),
        ({"stage": 1, "stage_name": "all", "stage_epochs_done": 4, "stage_step": 59}, {"stages": TWO}),
    ],
)
def test_where_something_is_left(runs, facts, how):
    assert check(runs, **how, **facts) == []


@pytest.mark.parametrize(
    "facts, stages, says",
    [
        ({"stage": 2, "stage_name": "2"}, TWO, "the checkpoint is in stage 2, and stages has 2: give the stages of run "),
        ({"stage": 1, "stage_name": "all"}, (), "the checkpoint is in stage all, number 2 of its run, and the cell has no stages: give the stages of run "),
        (
            {"stage": 0, "stage_name": "all"},
            TWO,
            "the checkpoint is in stage all, number 1 of its run, and all is number 2 now: those that are done stay in their places",
        ),
    ],
)
def test_stages_that_are_others(runs, facts, stages, says):
    with pytest.raises(ConfigError) as caught:
        check(runs, stages=stages, **facts)
    assert str(caught.value).startswith(says)


def test_a_stage_that_is_called_otherwise_is_said(runs):
    assert check(runs, stages=TWO, stage=0, stage_name="warm") == ["stage warm -> head"]


def test_a_point_says_whether_its_epoch_is_under_way(runs):
    runs.add(**MIDDLE)
    point = find(runs)
    assert point.within_epoch
    assert not replace(point, facts={**point.facts, "epochs_done": 3}).within_epoch


def test_the_folder_of_the_file_may_be_reached_by_a_link(runs, tmp_path):
    run = runs.add()
    (tmp_path / "shortcut.pt").symlink_to(run.checkpoints / "last.pt")
    assert find(runs, tmp_path / "shortcut.pt").parent == run.id
