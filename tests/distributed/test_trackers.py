"""Trackers beside rank 0: real ones, and packages of the same name that raise, crash or hang."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from nbddp.config import TrainConfig
from nbddp.events import Event, EventReader, EventWriter
from nbddp.process import ProcessId
from nbddp.rundir import RunDir
from nbddp.state import PHASES
from nbddp.worker import trackers as module
from nbddp.worker.position import Position
from nbddp.worker.tracker import GONE_S, values_of
from nbddp.worker.trackers import Trackers
from support.wandb_file import read_wandb_file

WANDB = "project=digits,group=lab,tags=a+b,name=mine"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SERVICE", "of another run")


@pytest.fixture
def tracked(tmp_path):
    """Makes the rank's side of a run: ``tracked(wandb=..., tensorboard=...)``. The processes it starts are gone at the end."""
    made = []

    def make(attempt=0, **options):
        made.append(Tracked(tmp_path, attempt, options))
        return made[-1]

    yield make
    for each in made:
        each.events.close()
        assert all(process.poll() is not None for process in each.trackers._processes.values())


class Tracked:
    def __init__(self, folder, attempt, options):
        self.run = RunDir.create(folder / "runs", "net")
        config = TrainConfig(epochs=2, **options)
        spec = {"config": config.to_json(), "note": "a note", "parent": "parent-run", "host": "here", "model_type": "Net", "plan": {"nproc": 2}}
        self.run.write_spec(spec)
        self.events = EventWriter(self.run.rank_events(0, attempt), run=self.run.id, rank=0, attempt=attempt)
        self.position = Position()
        self.trackers = Trackers(self.run, config, self.events, attempt)

    def train(self, first=1, steps=6):
        """Two reports of three steps, an epoch and a validation."""
        for step in range(first, first + steps, 3):
            self.events.emit("steps", **columns(list(range(step, step + 3))))
        self.events.emit("epoch", epoch=1, step=first + steps - 1, stage=0, loss=0.25, values={"score": 7.0}, duration_s=1.5)
        self.events.emit("reported", epoch=1, step=first + steps - 1, stage=0, values={"size": 3})
        self.events.emit("validation", epoch=1, step=first + steps - 1, stage=0, values={"val_loss": 0.5, "val_accuracy": math.nan})

    def finish(self, *, stopped=False, reason=None):
        began = time.monotonic()
        self.trackers.finish(self.position, stopped=stopped, reason=reason)
        return time.monotonic() - began

    def messages(self, level="warning"):
        found = EventReader(self.run.events).poll()
        return [event.data["text"] for event in found if event.kind == "message" and event.data["level"] == level]

    def tensorboard(self, folder):
        (path,) = (folder / self.run.id).iterdir()
        read = EventAccumulator(str(path), size_guidance={"scalars": 0})
        read.Reload()
        return read

    def wandb(self):
        (path,) = self.run.path.glob("wandb/offline-run-*/run-*.wandb")
        return read_wandb_file(path)


def columns(steps):
    count = len(steps)
    times = {f"{name}_s": [0.001 * step for step in steps] for name in ("data", "forward", "backward", "sync", "optimizer", "network", "wait")}
    times = {**times, "warmup": [0] * count, "slowest_rank": [0] * count}
    phases = {f"{phase}_s": 0.001 for phase in PHASES}
    return {
        "step": steps,
        "epoch": [1] * count,
        "stage": [0] * count,
        "loss": [1 / step for step in steps],
        "lr": [0.1] * count,
        "samples": [8] * count,
        "scalars": {"accuracy": [step / 100 for step in steps]},
        "ranks": [{"rank": 0, "samples_per_s": 10.0, **phases}, {"rank": 1, "samples_per_s": 20.0, **phases}],
        **times,
    }


def text_of(read, tag):
    return read.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


# -- the real ones


def test_both_record_every_value_at_its_step(tracked, tmp_path):
    run = tracked(wandb=WANDB, tensorboard=tmp_path / "boards")
    run.train()
    run.train(first=7)
    run.finish()
    assert run.messages() == []
    written, board = run.wandb(), run.tensorboard(tmp_path / "boards")
    expected = {
        "train/loss": {step: 1 / step for step in range(1, 13)},
        "train/lr": dict.fromkeys(range(1, 13), 0.1),
        "train/accuracy": {step: step / 100 for step in range(1, 13)},
        "train/epoch": dict.fromkeys(range(1, 13), 1),
        "train/stage": dict.fromkeys(range(1, 13), 0),
        "time/forward_s": {3: 0.002, 6: 0.005, 9: 0.008, 12: 0.011},
        "throughput/samples_per_s": dict.fromkeys([3, 6, 9, 12], 30),
        "epoch/loss": dict.fromkeys([6, 12], 0.25),
        "epoch/size": dict.fromkeys([6, 12], 3),
        "epoch/score": dict.fromkeys([6, 12], 7),
        "epoch/duration_s": dict.fromkeys([6, 12], 1.5),
        "val/loss": dict.fromkeys([6, 12], 0.5),
    }
    for name, values in expected.items():
        assert written.column(name) == pytest.approx(values), name
        assert {scalar.step: scalar.value for scalar in board.Scalars(name)} == pytest.approx(values), name
    assert [math.isnan(float(value)) for value in written.column("val/accuracy").values()] == [True, True]
    assert [math.isnan(scalar.value) for scalar in board.Scalars("val/accuracy")] == [True, True]


def test_both_know_the_configuration_and_how_the_run_ended(tracked, tmp_path):
    run = tracked(wandb=WANDB, tensorboard=tmp_path / "boards", lr=0.5)
    run.train()
    run.finish(stopped=True, reason="asked")
    written, board = run.wandb(), run.tensorboard(tmp_path / "boards")
    assert (written.run.run_id, written.run.display_name, written.run.project, written.run.run_group) == (run.run.id, "mine", "digits", "lab")
    assert (list(written.run.tags), written.run.notes) == (["a", "b"], "a note")
    expected = {"lr": 0.5, "epochs": 2, "precision": "auto", "run": run.run.id, "parent": "parent-run", "plan": {"nproc": 2}}
    assert {name: written.config[name] for name in expected} == expected
    assert (written.exit_code, written.summary["state"], written.summary["reason"]) == (0, "stopped", "asked")
    start = metadata.parse_session_start_info_plugin_data(board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert (start.hparams["lr"].number_value, start.hparams["shuffle"].bool_value, start.hparams["parent"].string_value) == (0.5, True, "parent-run")
    end = metadata.parse_session_end_info_plugin_data(board.SummaryMetadata("_hparams_/session_end_info").plugin_data.content)
    assert (end.status, text_of(board, "end")) == (api_pb2.STATUS_SUCCESS, "stopped: asked")
    assert 'plan: {"nproc": 2}' in text_of(board, "run")
    assert run.messages("info") == [f"wandb: offline; `wandb sync {next(run.run.path.glob('wandb/offline-run-*'))}` sends the run"]


def test_a_failure_is_told_with_its_reason(tracked, tmp_path):
    run = tracked(wandb=WANDB, tensorboard=tmp_path / "boards")
    run.train()
    run.events.emit("failed", type="KeyError", message="'sample'")
    for process in run.trackers._processes.values():
        assert process.wait(20) == 0
    assert (run.wandb().exit_code, run.wandb().summary["reason"]) == (1, "KeyError: 'sample'")
    board = run.tensorboard(tmp_path / "boards")
    end = metadata.parse_session_end_info_plugin_data(board.SummaryMetadata("_hparams_/session_end_info").plugin_data.content)
    assert (end.status, text_of(board, "end")) == (api_pb2.STATUS_FAILURE, "failed: KeyError: 'sample'")


def test_a_run_without_a_step_leaves_nothing(tracked, tmp_path):
    run = tracked(wandb=WANDB, tensorboard=tmp_path / "boards")
    run.events.emit("phase", phase="training")
    run.finish()
    assert not (run.run.path / "wandb").exists()
    assert not (tmp_path / "boards").exists()


def test_a_folder_that_is_none_is_a_warning(tracked, tmp_path):
    (tmp_path / "boards").write_text("a file")
    run = tracked(tensorboard=tmp_path / "boards")
    run.train()
    run.finish()
    (warning,) = run.messages()
    assert warning.startswith("tensorboard is switched off, training goes on: NotADirectoryError: ")


RANK = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from distributed_trackers import Tracked
run = Tracked(Path({folder!r}), 0, {options!r})
run.train()
print(run.run.path, flush=True)
time.sleep(100)
"""


def start_rank(tmp_path, **options):
    """A process that is the rank, with its trackers; returns it with its run."""
    (tmp_path / "distributed_trackers.py").write_text(Path(__file__).read_text())
    program = RANK.format(tests=str(tmp_path), folder=str(tmp_path), options=options)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    return rank, RunDir(Path(rank.stdout.readline().strip()))


def children(pid):
    """Processes that a process started, and those started by them."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*(ProcessId.of(child) for child in found), *(each for child in found for each in children(child))]


def kill(rank, until):
    """Kill a rank as soon as its trackers have come so far; return how long they outlived it."""
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = children(rank.pid)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    began = time.monotonic()
    while any(process.alive() for process in left):
        assert time.monotonic() - began < 15, left
        time.sleep(0.02)
    return time.monotonic() - began


def test_a_killed_rank_is_told_and_nothing_outlives_it_for_long(tmp_path):
    rank, run = start_rank(tmp_path, wandb=WANDB, tensorboard=str(tmp_path / "boards"))
    lasted = kill(rank, lambda: list(run.path.glob("wandb/offline-run-*/run-*.wandb")) and list((tmp_path / "boards").glob("*/*")))
    assert lasted < GONE_S + 2
    (path,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    written = read_wandb_file(path)
    assert (written.exit_code, written.summary["reason"]) == (1, "rank 0 was killed or vanished")
    assert sorted(written.column("train/loss")) == [1, 2, 3, 4, 5, 6]
    read = EventAccumulator(str(next((tmp_path / "boards" / run.id).iterdir())))
    read.Reload()
    assert text_of(read, "end") == "failed: rank 0 was killed or vanished"


# -- a package of that name that does not behave

FAKE = """
import json, os, sys, time
from pathlib import Path
{at_import}
Settings = dict
class Run:
    url, offline, summary = "https://example.org/run", False, {{}}
    def log(self, values, step):
        print("noise " * 100)
        {at_log}
    def finish(self, exit_code):
        {at_finish}
def init(**options):
    Path({folder!r}, "options.json").write_text(json.dumps(options, default=str))
    {at_init}
    return Run()
def teardown():
    pass
"""
HANG = "time.sleep(1000)"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """``fake(log="raise ...")`` puts a package called wandb before the real one."""

    def make(**code):
        folder = tmp_path / "fake"
        folder.mkdir()
        where = {f"at_{place}": code.get(place, "pass") for place in ("import", "init", "log", "finish")}
        (folder / "wandb.py").write_text(textwrap.dedent(FAKE.format(folder=str(folder), **where)))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    return make


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
@pytest.mark.parametrize(
    "code, said", [("raise RuntimeError('no luck\\nat all')", "RuntimeError: no luck"), ("raise SystemExit", "SystemExit"), ("sys.exit(0)", "SystemExit: 0")]
)
def test_whatever_it_raises_is_one_warning(tracked, fake, tmp_path, place, code, said):
    fake(**{place: code})
    run = tracked(wandb=WANDB, tensorboard=tmp_path / "boards")
    run.train()
    run.train(first=7)
    assert run.finish() < 20
    assert run.messages() == [f"wandb is switched off, training goes on: {said}"]
    assert len(run.tensorboard(tmp_path / "boards").Scalars("train/loss")) == 12


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_one_that_hangs_is_left_behind(tracked, fake, monkeypatch, place):
    fake(**{place: HANG})
    monkeypatch.setattr(module, "FINISH_S", 2.0)
    run = tracked(wandb=WANDB)
    began = time.monotonic()
    run.train()
    assert time.monotonic() - began < 1
    assert 2 <= run.finish() < 4
    assert run.messages() == ["wandb did not finish within 2 s and is left behind: the last values may be missing there"]
    assert run.position.phase == "trackers"
    assert run.position.ticks >= 3  # so that the rank does not look as if it had hung


@pytest.mark.parametrize("code, said", [("os.kill(os.getpid(), 9)", "wandb was killed by signal 9"), ("os._exit(7)", "wandb left with exit code 7")])
def test_one_that_crashes_is_a_warning_at_the_end(tracked, fake, code, said):
    fake(log=code)
    run = tracked(wandb=WANDB)
    run.train()
    run.finish()
    assert run.messages() == [f"{said}: values may be missing there; see {run.run.logs / 'tracker-wandb.log'}"]


def test_a_killed_rank_ends_one_that_hangs(tmp_path, fake):
    folder = fake(log=HANG)
    rank, _ = start_rank(tmp_path, wandb=WANDB)
    assert kill(rank, (folder / "options.json").exists) < GONE_S + 2


def test_one_whose_rank_has_failed_has_little_time_left(tracked, fake):
    fake(finish=HANG)
    run = tracked(wandb=WANDB)
    run.train()
    run.events.emit("failed", type="KeyError", message="")
    (process,) = run.trackers._processes.values()
    assert process.wait(20) == -14  # SIGALRM


def test_what_it_prints_is_kept_beside_the_ranks_log(tracked, fake, capfd):
    fake()
    run = tracked(wandb=WANDB)
    run.train()
    run.finish()
    assert "noise" in (run.run.logs / "tracker-wandb.log").read_text()
    assert capfd.readouterr() == ("", "")
    assert run.messages("info") == ["wandb: https://example.org/run"]


def test_a_restarted_group_goes_on_in_the_same_run(tracked, fake):
    folder = fake()
    run = tracked(attempt=1, wandb="project=p,mode=online,entity=e,job_type=j")
    run.train()
    run.finish()
    options = json.loads((folder / "options.json").read_text())
    picked = ("project", "mode", "entity", "job_type", "group", "tags", "id", "name", "resume")
    assert [options[name] for name in picked] == ["p", "online", "e", "j", None, None, run.run.id, run.run.id, "allow"]


def test_a_process_that_can_not_be_started_is_a_warning(tracked, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    run = tracked(wandb=WANDB)
    run.train()
    assert run.finish() < 1
    (warning,) = run.messages()
    assert warning.startswith("wandb is switched off: its process can't be started: ")


def test_without_trackers_there_is_no_process_and_no_phase(tracked):
    run = tracked()
    run.finish()
    assert EventReader(run.run.events).poll() == []


def test_other_events_record_nothing():
    assert list(values_of(Event("run", 0, 0, 0, 0.0, 0.0, "heartbeat", {"step": 3}))) == []
