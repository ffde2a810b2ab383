"""Run directories that are damaged: a row that says so, one clear error, and everything else goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

import nbddp
from nbddp.errors import ConfigError, NbddpError, UnreadableRun
from nbddp.kernel.run import Run
from nbddp.process import ProcessId
from nbddp.rundir import RunDir, find_run, run_dirs
from nbddp.runpruning import delete_runs
from nbddp.staged import release_data
from nbddp.visible import columns
from support.damage import damage
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(root))
    monkeypatch.setattr("nbddp.kernel.runs._known", {})
    return root


def of_the_past(root: Path, **options: Any) -> RunDir:
    """A run whose processes have ended: what is left of a run that nobody works on any more is killed."""
    run = finished(root, **{"steps_per_epoch": 4, "epochs": 1, **options})
    ours, gone = (json.dumps(pair, separators=(",", ":")).encode() for pair in (ProcessId.current().to_json(), [999_999_999, 1]))
    for path in (run.path / "supervisor.json", *run.events.iterdir()):
        path.write_bytes(path.read_bytes().replace(ours, gone))
    return run


@pytest.fixture
def good(root: Path) -> RunDir:
    return of_the_past(root, epochs=2, steps_per_epoch=10, report_steps=5)


def shown(thing: Any) -> str:
    """All that is displayed of something: no control characters, and not without bound."""
    bundle = thing._repr_mimebundle_() if hasattr(thing, "_repr_mimebundle_") else {"text/html": thing._repr_html_(), "text/plain": repr(thing)}
    text = bundle["text/plain"]
    assert len(text) < 60_000
    assert max(map(len, text.split("\n"))) < 1_500
    assert len(bundle["text/html"]) < 200_000
    for kind in ("text/plain", "text/html"):
        assert (found := RAW.search(bundle[kind])) is None, found
    return str(text)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "spec.json is empty"),
        (b'{"config":', "spec.json is not JSON: Expecting value in line 1"),
        (b"[1]", "spec.json must hold an object, and holds something else"),
        (b"[" * 200_000, "spec.json is nested too deeply"),
        (b'{"config": [1]}', "spec.json: config must be an object, and is a list"),
        (b'{"times": {"requested": 1e300}}', "spec.json: times.requested must be a number from 0 to 253402300799, and is 1e+300"),
        (b'{"plan": {"nproc": 1000000000}}', "spec.json: plan.nproc must be a whole number from 1 to 4096, and is 1000000000"),
        (b'{"note": {"x": 1}}', "spec.json: note must be a text, and is an object"),
    ],
)
def test_a_damaged_spec_is_a_row_and_an_error(root: Path, good: RunDir, content: bytes, why: str) -> None:
    other = of_the_past(root)
    (good.path / "spec.json").write_bytes(content)
    (good.checkpoints / "last.pt").touch()
    table = nbddp.runs()
    row = next(row for row in table if row.id == good.id)
    assert (row.state, row.damage, row.prunable) == ("unreadable", why, False)
    text = shown(table)
    assert why[:78] in text
    assert "unreadable" in table._repr_html_()
    assert len(table.sorted("lr")) == 2
    with pytest.raises(UnreadableRun) as caught:
        nbddp.attach(good.id)
    remedies = f"%ddp_runs --prune {good.id} --no-dry-run deletes it; %ddp_load MODEL {good.checkpoints}/last.pt loads its weights"
    assert str(caught.value) == f"run {good.id} can't be read: {why}; {remedies}"
    assert nbddp.attach(other.id).state == "finished"
    assert nbddp.prune(runs=good.id, dry_run=False) == [good.id]
    assert not good.path.exists()


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "result.json is empty"),
        (b"null", "result.json must hold an object, and holds something else"),
        (b'{"state": "finished"}', "result.json: time must be there, and is missing"),
        (b'{"state": "lost", "time": 1.0}', "result.json: state must be one of finished, stopped, failed, and is 'lost'"),
        (b'{"state": "failed", "time": 1.0, "error": {"rank": 0}}', "result.json: error.kind must be there, and is missing"),
    ],
)
def test_a_damaged_result_ends_a_run_that_is_unreadable(good: RunDir, content: bytes, why: str) -> None:
    attached = Run(good)  # before
    attached.follower.join()
    (good.path / "result.json").write_bytes(content)
    assert good.ended
    assert not good.live()
    assert good.read_result() is None
    (row,) = nbddp.runs()
    assert (row.state, row.damage) == ("unreadable", why)
    with pytest.raises(UnreadableRun, match=re.escape(why)):
        Run(good)
    assert attached.state == "finished", "what was read is known"


def test_a_result_that_is_damaged_when_the_run_ends_is_its_error(root: Path) -> None:
    run = FakeRun(root, epochs=1, steps_per_epoch=4)
    attached = Run(run.run_dir)
    (run.run_dir.path / "result.json").write_bytes(b"{")
    run.run_dir.supervisor()
    shutil.rmtree(run.run_dir.events)
    (run.run_dir.path / "supervisor.json").unlink()
    attached.follower.join()
    assert attached.state == "failed"
    assert str(attached.error).startswith(f"run {run.run_dir.id} can't be read: result.json is not JSON: ")
    with pytest.raises(UnreadableRun, match=r"result.json is not JSON"):
        attached.wait()
    shown(attached.card())
    run.run_dir.events.mkdir()
    run.end()


def test_a_run_without_spec_is_named_by_its_directory(root: Path, good: RunDir) -> None:
    (good.path / "spec.json").unlink()
    for name in (good.id, good.path, str(good.path)):
        assert find_run(name, root).path == good.path
        with pytest.raises(UnreadableRun, match=f"run {good.id} can't be read: it has no spec.json; "):
            nbddp.attach(name)
    shutil.rmtree(good.path)
    with pytest.raises(ConfigError, match="no run"):
        nbddp.attach(good.id)


@pytest.mark.parametrize("name", ["plan_line", "config", "times"])
def test_a_spec_that_lacks_something_is_listed_and_can_not_be_opened(good: RunDir, name: str) -> None:
    spec = json.loads((good.path / "spec.json").read_text())
    del spec[name]
    good.write_spec(spec)
    assert [row.state for row in nbddp.runs()] == ["finished"], "what the table needs is there"
    with pytest.raises(UnreadableRun, match=f"spec.json: {name} must be there, and is missing"):
        nbddp.attach(good.id)


def test_what_is_used_with_the_weights_is_asked_for_only_then(good: RunDir) -> None:
    run = Run(good)
    assert run.state == "finished"
    with pytest.raises(UnreadableRun, match=r"spec.json: model_name must be there, and is missing"):
        run.evaluate([1])


def test_options_of_another_version_are_said(good: RunDir) -> None:
    spec = json.loads((good.path / "spec.json").read_text())
    good.write_spec({**spec, "config": {"sharding": "full"}})
    assert nbddp.runs()[0].differs == {"sharding": "full"}
    with pytest.raises(UnreadableRun, match=r"spec.json: config: sharding is not an option.*, and may be of another version of nbddp; "):
        nbddp.attach(good.id)


def test_of_a_table_unreadable_runs_are_left_out_and_one_by_name_is_an_error(root: Path, good: RunDir) -> None:
    runs = [good, of_the_past(root), of_the_past(root)]
    (runs[1].path / "spec.json").unlink()
    made = nbddp.compare(nbddp.runs())
    assert [run.id for run in made.runs] == [runs[2].id, runs[0].id]
    assert made.left_out == {runs[1].id: "unreadable: it has no spec.json"}
    assert f"left out: {runs[1].id}, unreadable: it has no spec.json" in shown(made)
    with pytest.raises(UnreadableRun, match=f"run {runs[1].id} can't be read: it has no spec.json"):
        nbddp.compare(nbddp.runs(), runs[1].id)
    with pytest.raises(ConfigError, match=r"of 2 runs 1 has a loss to compare: .*, unreadable: it has no spec.json$"):
        nbddp.compare(nbddp.runs()[1:])


@pytest.mark.filterwarnings("ignore:the directory of run .* is gone")
@pytest.mark.parametrize("seed", range(80))
def test_whatever_is_damaged_nothing_but_our_errors_are_raised(root: Path, good: RunDir, seed: int) -> None:
    child = of_the_past(root, note="goes on")
    child.write_spec({**json.loads((child.path / "spec.json").read_text()), "parent": good.id, "resume_step": 10})
    sound = of_the_past(root)
    done = damage((good if seed % 3 else child).path, random.Random(seed))

    said: list[str] = []

    def attempt(what: Callable[[], object]) -> object:
        try:
            return what()
        except NbddpError as error:
            said.append(str(error))
            return None

    table = nbddp.runs()
    shown(table)
    assert next(row for row in table if row.id == sound.id).state == "finished"
    for by in ("best", "loss", "lr", "epochs", "state", "duration", "note"):
        assert len(table.sorted(by)) == 3, done
    for axis in ("step", "epoch", "time"):
        attempt(lambda axis=axis: shown(nbddp.compare(nbddp.runs(), x=axis)))  # type: ignore[misc] # bound now
    for run_dir in (good, child):
        run = attempt(lambda run_dir=run_dir: nbddp.attach(run_dir.id))  # type: ignore[misc] # bound now
        if isinstance(run, Run):
            for name in ("state", "duration_s", "timeline", "epochs", "advice", "checkpoints", "parent", "error"):
                attempt(lambda run=run, name=name: repr(getattr(run, name)))  # type: ignore[misc] # bound now
            for use in (lambda run: run.history, lambda run: run.log(0), lambda run: run.log(None), lambda run: run.stacks(), lambda run: shown(run.card())):
                attempt(lambda run=run, use=use: use(run))  # type: ignore[misc] # bound now
            run.follower.stop()
            run.follower.join()
            assert run.follower.view_error is None, done
    assert max(map(len, said), default=0) < 20_000, done
    release_data(root)
    nbddp.prune(keep=0, older_than_days=0)
    ended = [run for run in run_dirs(root) if not run.live()]
    assert sound.id in {run.id for run in ended}
    assert sorted(nbddp.prune(keep=0, older_than_days=0, dry_run=False)) == sorted(run.id for run in ended), done
    assert [run for run in run_dirs(root) if not run.live()] == []


# -- deleting


NOBODY = 65534


@pytest.fixture
def powerless() -> Iterator[None]:
    """Without root's power over files that are others'."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_link_to_a_run_is_not_said_to_be_deleted(root: Path, good: RunDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    good.path.rename(elsewhere)
    good.path.symlink_to(elsewhere)
    assert nbddp.prune(keep=0, older_than_days=0, dry_run=False) == []
    assert delete_runs(root, [good]) == {good.id: f"it is a link to {elsewhere}: delete that, and the link"}
    assert elsewhere.is_dir()


def test_what_may_not_be_deleted_is_said(root: Path, good: RunDir, request: pytest.FixtureRequest) -> None:
    for folder in list(root.parents)[:3]:  # pytest's own are closed to others
        if os.geteuid() == 0:
            folder.chmod(0o755)
    root.chmod(0o555)
    good.path.chmod(0o555)
    request.getfixturevalue("powerless")
    try:
        failed = delete_runs(root, [good])
        assert list(failed) == [good.id]
        assert "Permission denied" in failed[good.id]
        assert good.path.exists()
    finally:
        if os.geteuid() != NOBODY:
            root.chmod(0o755)
            good.path.chmod(0o755)


def test_a_run_that_is_written_to_meanwhile_is_gone_or_said_to_be_there(root: Path, good: RunDir) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(OSError):  # its folder is gone
                (good.logs / f"{number}.log").touch()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        failed = delete_runs(root, [good])
    finally:
        stop.set()
        writer.join()
    assert list(failed) == ([good.id] if good.path.exists() else [])


def test_a_run_that_another_kernel_deletes_is_gone(root: Path, good: RunDir) -> None:
    shutil.rmtree(good.path)
    assert delete_runs(root, [good]) == {}


# -- what comes from outside


def test_a_rank_that_there_is_none_of_is_an_error(root: Path, good: RunDir) -> None:
    run = Run(good)
    assert run.log(0).startswith("epoch 1: val_loss ")
    assert run.log(1) == "", "it has printed nothing"
    assert run.log(None) == ""
    for rank in (2, 99, -1, "0", True, 1.5):
        with pytest.raises(ConfigError, match=f"^run {good.id} has no rank {rank!r}: there are 0 and 1; None is the supervisor$"):
            run.log(rank)  # type: ignore[arg-type] # the wrong types are what is tested
    good.log(0).unlink()
    good.log(0).mkdir()
    with pytest.raises(UnreadableRun, match=r"logs/rank-00000.log can't be read: it is no file"):
        run.log(0)


def test_notes_and_options_are_bounded_and_visible_in_the_table(root: Path) -> None:
    of_the_past(root, note="first\nsecond \x1b[2J\u202e" + "x" * 5000, config={"norm": {"\x1b[2J" * 100: "sync"}, "name": "y" * 500})
    text = shown(nbddp.runs())
    assert r"first second \x1b[2J\u202exxx" in text
    assert max(map(len, text.split("\n"))) < 400


def test_wide_letters_take_two_columns(root: Path) -> None:
    of_the_past(root, name="实验", note="数据")
    of_the_past(root, name="net", note="plain")
    header, *rows, _ = repr(nbddp.runs()).split("\n")
    at = columns(header[: header.index("state")])
    for row in rows:
        assert columns(row[: row.index("finished")]) == at


def test_what_the_ranks_report_is_bounded_and_visible_in_the_card(root: Path) -> None:
    run = FakeRun(root, epochs=1, steps_per_epoch=4)
    run.start()
    run.train(4)
    name = "läng" * 30
    run.ranks[0].emit("validation", epoch=1, step=4, values={name: 1.0, "\x1b[2J": 12345.0, "val_loss": 9999.9})
    run.ranks[0].emit("message", level="warning", text="\x1b[2J\u202e" + "m" * 100_000)
    error = {"kind": "WorkerError", "message": "\x1b]0;t\x07" + "e\n" * 100_000, "rank": 0, "traceback": "\x1b[31mred\x1b[0m\n" + "t\n" * 100_000}
    run.end("failed", error=error)
    attached = Run(run.run_dir)
    attached.follower.join()
    card = shown(attached.card())
    facts = dict(re.findall(r"^  (\S+)  +(.+)$", card, re.MULTILINE))
    assert facts[r"\x1b[2J"] == "12,345"
    assert facts["val_loss"].startswith("10,000")
    assert f"{name[:39]}…" in facts
    assert r"\x1b[2J\u202emmm" in card
    said = str(attached.error)
    assert said.startswith(r"\x1b]0;t\x07e")
    assert len(said) < 5_000
    assert "characters left out" in said
