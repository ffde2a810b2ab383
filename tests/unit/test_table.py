from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest

from nbddp.kernel.follow import fold_all
from nbddp.kernel.table import CheckpointTable, RunTable, read_entry
from nbddp.process import ProcessId
from support.fake_run import FakeRun, finished

if TYPE_CHECKING:
    from pathlib import Path


def test_no_runs(tmp_path: Path) -> None:
    table = RunTable.of(tmp_path / "nowhere")
    assert len(table) == 0
    assert repr(table) == "no runs here yet"
    assert "no runs here yet" in table._repr_html_()


def test_runs_newest_first_with_what_they_differ_by(tmp_path: Path) -> None:
    first = finished(tmp_path, name="first", config={"lr": 0.003, "batch_size": 128}, note="the <first> try")
    second = FakeRun(tmp_path, name="second")
    second.run_dir.path.rename(later := second.run_dir.path.with_name("29991231-235959-second-abcd"))
    table = RunTable.of(tmp_path)
    assert [entry.id for entry in table] == [later.name, first.id]
    entry = table[1]
    assert (entry.state, entry.step, entry.note, entry.dir) == ("finished", 3900, "the <first> try", first.path)
    assert entry.differs == {"nproc": 2, "batch_size": 128, "epochs": 10, "lr": 0.003}
    assert entry.size > 1000
    assert entry.started is not None
    assert entry.duration_s == pytest.approx(3900 * 4e-3)
    assert "nproc=2, batch_size=128, epochs=10, lr=0.003" in repr(table)
    assert "0:16" in repr(table).splitlines()[2]
    html = table._repr_html_()
    assert "the &lt;first&gt; try" in html
    assert "<first>" not in html
    assert list(table[1:]) == [entry]
    assert isinstance(table[1:], RunTable)


def test_the_summary_of_the_result_is_used(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    spec = run.run_dir.read_spec()
    assert spec is not None
    run.run_dir.write_spec({**spec, "plan": {"stages": [{"monitor": "val_loss"}]}})
    summary = {"step": 77, "epoch": 7, "loss": "nan", "val_loss": 0.4, "best": {"value": 0.31, "epoch": 5, "step": 50}}
    run.end("stopped", summary=summary)
    entry = read_entry(run.run_dir)
    assert (entry.state, entry.step, entry.best) == ("stopped", 77, ("val_loss", 0.31, 5))
    assert entry.loss != entry.loss
    assert "val_loss 0.31 (epoch 5)" in repr(RunTable.of(tmp_path))


def test_without_a_summary_the_end_of_the_events_is_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(390)
    run.checkpoint("best", 0.31)
    run.train(60)
    for _ in range(300):
        run.ranks[0].emit("heartbeat", step=450, phase="training", memory=1)
    with run.run_dir.rank_events(0, 0).open("ab") as file:
        file.write(b'{"kind":"steps", "half": ')
    entry = read_entry(run.run_dir)
    assert (entry.state, entry.step) == ("running", 450)
    assert entry.best is not None
    assert entry.best[1:] == (0.31, 2)
    assert entry.loss is not None
    run.end("failed")
    ended = read_entry(run.run_dir)
    assert (ended.state, ended.step, ended.best, ended.loss) == ("failed", 450, entry.best, entry.loss)


def test_a_run_that_nobody_works_on_has_failed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    assert read_entry(run.run_dir).state == "running"
    run.run_dir.write_supervisor(ProcessId(2**22 + 1, 1))
    entry = read_entry(run.run_dir)
    assert (entry.state, entry.duration_s) == ("failed", None)
    run.end()


def test_what_is_damaged_or_of_a_later_version_is_listed_all_the_same(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config={"sharding": "full"})
    assert read_entry(run.run_dir).differs == {"nproc": 2, "epochs": 10, "sharding": "full"}
    (run.run_dir.path / "spec.json").write_text("{")
    shutil.rmtree(run.run_dir.events)
    entry = read_entry(run.run_dir)
    assert (entry.started, entry.step, entry.differs) == (None, None, {})
    assert run.run_dir.id in repr(RunTable.of(tmp_path))
    run.end()


def test_a_hundred_runs_are_listed_at_once(tmp_path: Path) -> None:
    model = finished(tmp_path, epochs=60)
    assert model.rank_events(0, 0).stat().st_size > 5_000_000
    for index in range(99):
        path = tmp_path / f"20261129-1305{index % 60:02d}-copy{index}-abcd"
        path.mkdir()
        for name in ("spec.json", "result.json"):
            shutil.copy(model.path / name, path)
        (path / "events").mkdir()
        (path / "events" / "rank-00000.0.jsonl").hardlink_to(model.rank_events(0, 0))
    began = time.process_time()
    table = RunTable.of(tmp_path)
    repr(table)
    assert len(table) == 100
    assert time.process_time() - began < 1.0


def test_checkpoints_as_a_table(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.start()
    run.train(390)
    run.checkpoint("best", 0.31)
    run.checkpoint("epoch-0001", None)
    run.end()
    (run.run_dir.checkpoints / "last.pt").write_bytes(b"x" * 2048)
    (run.run_dir.checkpoints / "best.pt").write_bytes(b"x")
    table = CheckpointTable.of(run.run_dir, fold_all(run.run_dir).checkpoints)
    assert [(entry.name, entry.path, entry.step, entry.value, entry.bytes) for entry in table] == [
        ("last", run.run_dir.checkpoints / "last.pt", 390, None, 2048),
        ("best", run.run_dir.checkpoints / "best.pt", 390, 0.31, 1),
    ]
    assert "2.0 KiB" in repr(table)
    assert "best.pt" in table._repr_html_()
    assert table["best"] is table[1]
    with pytest.raises(KeyError, match="no checkpoint bast; there are last, best"):
        table["bast"]
    (run.run_dir.checkpoints / "last.pt").unlink()
    assert [entry.name for entry in CheckpointTable.of(run.run_dir, fold_all(run.run_dir).checkpoints)] == ["best"]
    assert repr(CheckpointTable([])) == "no checkpoints"
    with pytest.raises(KeyError, match="no checkpoint best; there are none"):
        CheckpointTable([])["best"]
