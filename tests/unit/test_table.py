from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nbddp.errors import ConfigError
from nbddp.kernel.entry import RunEntry, read_entry
from nbddp.kernel.follow import fold_all
from nbddp.kernel.options import RUNS_COLUMNS
from nbddp.kernel.table import KEEP, OLDER_THAN_DAYS, ORDERS, CheckpointTable, RunTable
from nbddp.process import ProcessId
from support.fake_run import FakeRun, finished


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


# -- in other orders


def entry(name: str, **values: Any) -> RunEntry:
    given: dict[str, Any] = {
        "state": "finished",
        "started": 0.0,
        "duration_s": 1.0,
        "step": 1,
        "best": None,
        "loss": 1.0,
        "differs": {},
        "size": 1,
        "note": None,
    }
    return RunEntry(id=name, dir=Path(name), **{**given, **values})


def names(table: RunTable) -> str:
    return "".join(row.id for row in table)


TABLE = RunTable(
    [
        entry("a", started=30.0, duration_s=None, loss=0.5, size=20, differs={"lr": 0.1, "precision": "fp32"}, best=("val_loss", 0.4, 1), step=5),
        entry("b", started=20.0, duration_s=9.0, loss=math.nan, size=30, differs={"lr": 0.003}, best=("val_loss", 0.3, 1), step=None, state="failed"),
        entry("c", started=None, duration_s=11.0, loss=0.25, size=10, note="the long one", best=("accuracy", 0.8, None), largest=True, step=100),
        entry("d", started=10.0, duration_s=7.0, loss=None, size=20, differs={"lr": 1.0}, note="", best=("accuracy", 0.9, None), largest=True, step=20),
    ]
)


@pytest.mark.parametrize(
    "by, order, reverse",
    [
        ("started", "abdc", "dbac"),
        ("best", "dcba", "abcd"),
        ("loss", "cabd", "acbd"),
        ("duration", "cbda", "dbca"),
        ("steps", "cdab", "adcb"),
        ("size", "badc", "cdab"),
        ("note", "cabd", "cabd"),
        ("state", "bacd", "dcab"),
        ("run", "abcd", "dcba"),
        ("lr", "badc", "dabc"),
        ("precision", "bcda", "adcb"),
    ],
)
def test_sorted(by: str, order: str, reverse: str) -> None:
    assert names(TABLE.sorted(by)) == order
    assert names(TABLE.sorted(by, reverse=True)) == reverse
    assert names(TABLE) == "abcd", "the table itself stays as it is"


def test_a_column_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sort=bets: not a column and not an option\. Did you mean best.*\? Columns that sort: run, state, started, .*size$"):
        RunTable.of(tmp_path).sorted("bets")


def test_the_line_offers_the_columns_that_sort() -> None:
    assert sorted(ORDERS) == list(RUNS_COLUMNS)
    assert set(ORDERS) <= set(RunTable.HEADER)


def script(html: str) -> tuple[dict[str, list[Any]], list[Any]]:
    """The orders that the page sorts by, and which it begins with."""
    found = re.search(r"orders = (\{.*?\}), shown = (\[.*?\]), rows", html)
    assert found is not None
    return json.loads(found[1]), json.loads(found[2])


def test_the_page_sorts_as_python_does() -> None:
    orders, shown = script(TABLE._repr_html_())
    assert shown == ["", True]
    assert set(orders) == set(ORDERS) == set(re.findall(r'data-order="([^"]+)"', TABLE._repr_html_())) - {"differs by"}
    for name, order in ORDERS.items():
        first, rest, ascends = orders[name]
        assert "".join(TABLE[row].id for row in [*first, *rest]) == names(TABLE.sorted(name))
        assert ascends is order.ascends
    assert script(TABLE.sorted("size")._repr_html_())[1] == ["size", False]
    assert script(TABLE.sorted("size", reverse=True)[1:]._repr_html_())[1] == ["size", True]
    assert script(TABLE.sorted("lr")._repr_html_())[1] == ["", True]
    assert "<script" not in TABLE[:1]._repr_html_(), "one run is in order"


# -- curves, sizes, old runs


def test_curves_are_pictures_with_a_text_and_blocks(tmp_path: Path) -> None:
    finished(tmp_path, epochs=2, steps_per_epoch=50)
    FakeRun(tmp_path).end("failed")
    table = RunTable.of(tmp_path)
    header, empty, row, _ = repr(table).splitlines()
    at = header.index("curve")
    assert re.match(r"[▁▂▃▄▅▆▇█]{12} ", row[at:])
    assert not re.search("[▁▂▃▄▅▆▇█]", empty)
    html = table._repr_html_()
    assert html.count("<img ") == 1
    assert re.search(r'<img alt="loss from \d\.\d+ to 0\.\d+ in 100 steps"', html)
    assert html.count('<th scope="col"') == 6, "no run has a note"


def test_what_matters_most_comes_first_and_what_is_long_comes_last() -> None:
    columns = re.findall(r'data-order="([^"]+)"', TABLE._repr_html_())
    assert columns == ["run", "started", "state", "size", "best", "duration", "steps", "loss", "differs by", "note"]
    header, *rows, _ = repr(TABLE).splitlines()
    assert header.split() == ["run", "state", "best", "duration", "started", "loss", "steps", "size", "note", "differs", "by"]
    assert all(len(row) <= len(header) + 30 for row in rows)
    at = header.index("size") + len("size")
    assert [row[:at].split()[-2:] for row in rows] == [["20", "B"], ["30", "B"], ["10", "B"], ["20", "B"]], "sizes stand below each other"


def test_an_option_and_its_value_stay_on_one_line_and_long_ones_break() -> None:
    long = {f"blocks.{index}.*": "sync" for index in range(9)}
    html = RunTable([entry("a", differs={"base_batch_size": 48, "norm": long, "lr": 1e-4}, note="two\nlines <b>")])._repr_html_()
    spans = re.findall(r'<span style="margin-right:9px;([^"]+)"><span style="[^"]+">(\w+)=</span>', html)
    assert spans == [("white-space:nowrap", "base_batch_size"), ("overflow-wrap:anywhere", "norm"), ("white-space:nowrap", "lr")]
    assert "two lines &lt;b&gt;" in html
    text = repr(RunTable([entry("a", note="two\nlines")]))
    assert len(text.splitlines()) == 3


def test_rows_that_wrap_are_still_a_table_to_whoever_hears_it() -> None:
    html = TABLE._repr_html_()
    roles = {name: len(re.findall(f'role="{name}"', html)) for name in ("table", "rowgroup", "row", "columnheader", "cell")}
    assert roles == {"table": 1, "rowgroup": 2, "row": 5, "columnheader": 7, "cell": 28}


def test_what_could_be_deleted_is_said(tmp_path: Path) -> None:
    for index in range(KEEP + 3):
        run = FakeRun(tmp_path, name=f"r{index}")
        run.end("stopped")
        if index < 2:
            then = time.time() - (OLDER_THAN_DAYS + 1) * 86400
            os.utime(run.run_dir.path, (then, then))
    table = RunTable.of(tmp_path)
    assert [row.prunable for row in table] == [False] * (KEEP + 1) + [True] * 2
    assert re.fullmatch(r"23 runs · \d+ KiB · 2 older than 30 days \(\d\.\d KiB\): %ddp_runs --prune names them", table.summary())
    assert table.summary() in table._repr_html_()
    assert repr(table).splitlines()[-1] == table.summary()
    assert re.fullmatch(r"1 run · \d{3} B", table[:1].summary())
