"""The runs that a run goes on from, and where they are said: history, card, table."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from nbddp.kernel.ancestry import Ancestry, parent_text
from nbddp.kernel.run import Run
from nbddp.kernel.table import RunTable
from nbddp.rundir import RunDir
from support.fake_run import FakeRun

if TYPE_CHECKING:
    from pathlib import Path


def run(root: Path, parent: FakeRun | None = None, *, steps: int = 30, until: int = 0) -> FakeRun:
    """A run of three epochs of ten steps, which goes on from a step of another."""
    made = FakeRun(root, epochs=3, steps_per_epoch=10, report_steps=5)
    if parent is not None:
        spec = made.run_dir.read_spec() or {}
        last = parent.run_dir.checkpoints / "last.pt"
        made.run_dir.write_spec({**spec, "parent": parent.run_dir.id, "resume": str(last), "resume_step": until})
        made.step, made.epoch = until, until // 10 + 1
    made.start()
    made.train(steps)
    made.end()
    return made


def of(made: FakeRun) -> Ancestry:
    return Ancestry.of(made.run_dir, made.run_dir.read_spec() or {})


def test_a_run_that_began_anew_has_no_parents(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert of(made) == Ancestry()
    assert parent_text({"parent": None}) is parent_text({}) is None


def test_parents_of_parents_up_to_the_step_that_was_gone_on_from(tmp_path: Path) -> None:
    first = run(tmp_path)
    second = run(tmp_path / "elsewhere", first, until=20, steps=10)
    third = run(tmp_path / "elsewhere", second, until=25, steps=5)
    found = of(third)
    assert [(ancestor.run.path, ancestor.until) for ancestor in found.parents] == [(first.run_dir.path, 20), (second.run_dir.path, 25)]
    assert found.missing is None


def test_runs_that_were_moved_together_find_each_other(tmp_path: Path) -> None:
    first = run(tmp_path / "old")
    second = run(tmp_path / "old", first, until=20, steps=10)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = RunDir(tmp_path / "new" / second.run_dir.id)
    assert [ancestor.run.root for ancestor in Ancestry.of(moved, moved.read_spec() or {}).parents] == [tmp_path / "new"]


def test_a_run_that_claims_to_be_its_own_parent(tmp_path: Path) -> None:
    made = run(tmp_path)
    spec = made.run_dir.read_spec() or {}
    made.run_dir.write_spec({**spec, "parent": made.run_dir.id, "resume": "", "resume_step": 3})
    assert of(made) == Ancestry((), made.run_dir.id)


def test_a_run_joins_the_history_of_its_parents_and_says_what_is_missing(tmp_path: Path) -> None:
    first = run(tmp_path)
    second = run(tmp_path, first, until=20, steps=10)
    third = run(tmp_path, second, until=25, steps=5)
    there = Run(third.run_dir)
    assert there.parent == second.run_dir.id
    assert there.history["step"].tolist() == list(range(1, 31))
    assert there.epochs["step"].tolist() == [10, 20, 30]
    assert (there.history["loss"][:20] == Run(first.run_dir).history["loss"][:20]).all()
    assert Run(first.run_dir).parent is None

    shutil.rmtree(first.run_dir.path)
    again = Run(third.run_dir)
    with pytest.warns(UserWarning, match=f"the directory of run {first.run_dir.id} is gone, .*: the history of run {third.run_dir.id} begins later") as caught:
        assert again.history["step"].tolist() == list(range(21, 31))
    assert caught[0].filename == __file__
    assert again.epochs["step"].tolist() == [30], "said once"


def test_the_card_and_the_table_say_the_parent(tmp_path: Path) -> None:
    first = run(tmp_path)
    second = run(tmp_path, first, until=20, steps=10)
    text = f"digits-{first.run_dir.id[-4:]}, step 20"
    assert parent_text(second.run_dir.read_spec() or {}) == text
    card = Run(second.run_dir).card()
    assert f"  goes on from  {text}" in card.text.splitlines()
    assert text in card.html
    assert "goes on from" not in Run(first.run_dir).card().text
    table = RunTable.of(tmp_path)
    assert [entry.parent for entry in table] == [first.run_dir.id, None]
    header, row, other, _ = repr(table).splitlines()
    at = header.index("goes on from")
    assert row[at:].startswith(f"digits-{first.run_dir.id[-4:]} ")
    assert other[at:].startswith("   ")
    assert f"from {first.run_dir.id[-4:]}</div>" in table._repr_html_()
