"""What differs between the weights of a run and others."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nbddp import checkpoint
from nbddp.errors import CheckpointError, ConfigError
from nbddp.kernel.diff import DiffEntry, StateDiff, compare
from nbddp.kernel.run import Run
from nbddp.kernel.table import CheckpointEntry
from support.fake_run import FakeRun

NAN, INF = float("nan"), float("inf")


def differences(mine, theirs):
    return {row.name: row for row in compare(mine, theirs)}


def difference(mine, theirs):
    return differences({"x": mine}, {"x": theirs})["x"]


# -- one entry


@pytest.mark.parametrize(
    "mine, theirs, kind, largest, relative",
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]), "same", 0, 0),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), "values", 0.5, 0.1),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, 2.0]), "values", 2, INF),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "values", 0, 0),
        (torch.tensor([3.0, 4.0]).bfloat16(), torch.tensor([3.0, 4.5]).bfloat16(), "values", 0.5, 0.1),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]).double(), "dtype", 0.5, 0.1),
        (torch.tensor([3.0, 4.0]), torch.tensor([3, 4]), "dtype", 0, 0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), "values", 5, 1),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4j]), "same", 0, 0),
        (torch.tensor([3 + 4j]).conj(), torch.tensor([3 - 4j]), "same", 0, 0),
        (torch.tensor([5.0]), torch.tensor([5 + 5j]), "dtype", 5, 1),
        (torch.tensor([True, False]), torch.tensor([True, True]), "values", 1, 1),
        (torch.tensor([2**53, 7]), torch.tensor([2**53 + 1, 7]), "values", 1, 2.0**-53),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), "values", 2.0**64, 2),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 3], dtype=torch.uint64), "values", 2, 2.0**-63),
        (torch.tensor([200], dtype=torch.uint8), torch.tensor([10], dtype=torch.uint8), "values", 190, 0.95),
        (torch.zeros(0, 3), torch.ones(0, 3), "same", 0, 0),
        (torch.tensor(2.0), torch.tensor(3.0), "values", 1, 0.5),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape", None, None),
        (torch.tensor([INF, 1.0]), torch.tensor([INF, 1.0]), "same", 0, 0),
        (torch.tensor([INF, 4.0]), torch.tensor([INF, 3.0]), "values", 1, 0.25),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), "values", INF, INF),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), "same", 0, 0),
        (torch.eye(2).to_sparse(), torch.eye(2), "same", 0, 0),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.full((2,), 2.0).to(torch.float8_e4m3fn), "values", 1, 1),
    ],
)
def test_tensors_of_every_kind_are_compared(mine, theirs, kind, largest, relative):
    row = difference(mine, theirs)
    assert (row.kind, row.max_abs) == (kind, largest)
    assert row.relative == (None if relative is None else pytest.approx(relative))


def test_nan_at_the_same_places_is_the_same_and_said():
    row = difference(torch.tensor([NAN, 1.0, NAN]), torch.tensor([NAN, 1.0, NAN]))
    assert (row.kind, row.max_abs, row.detail) == ("same", 0, "nan at 2 places of both")
    row = difference(torch.tensor([NAN, 3.0]), torch.tensor([NAN, 4.0]))
    assert (row.kind, row.max_abs, row.detail) == ("values", 1, "nan at 1 place of both")
    row = difference(torch.tensor([NAN, 3.0]), torch.tensor([2.0, 3.0]))
    assert (row.kind, math.isnan(row.max_abs), math.isnan(row.relative), row.detail) == ("values", True, True, "nan at 1 place of one alone")
    row = difference(torch.tensor([complex(NAN, 1), 1]), torch.tensor([complex(NAN, 1), 1]))
    assert row.kind == "same"
    assert difference(torch.tensor([NAN]), torch.tensor([NAN])).kind == "same"


class Stubborn:
    """Does not compare, as some classes of users don't."""

    def __eq__(self, other):
        raise TypeError

    __hash__ = None


@pytest.mark.parametrize(
    "mine, theirs, kind",
    [
        ({"a": [1, torch.ones(2)]}, {"a": [1, torch.ones(2)]}, "same"),
        ({"a": [1, torch.ones(2)]}, {"a": [1, torch.zeros(2)]}, "values"),
        ({"a": 1}, {"a": 1, "b": 2}, "values"),
        ((1, 2), (1, 2, 3), "values"),
        (1, True, "values"),
        (torch.ones(1), 1, "values"),
        (np.ones(2), torch.ones(2, dtype=torch.float64), "same"),  # as a checkpoint holds it
        ({"a": np.ones(2)}, {"a": np.zeros(2)}, "values"),
        ({"a": [math.nan, complex(0, math.nan)]}, {"a": [math.nan, complex(0, math.nan)]}, "same"),
        (math.nan, 1.0, "values"),
        (collections.deque([1]), [1], "same"),
        (Stubborn(), Stubborn(), "values"),
    ],
)
def test_extra_states_are_compared_too(mine, theirs, kind):
    row = differences({"x._extra_state": mine}, {"x._extra_state": theirs})["x._extra_state"]
    assert (row.kind, row.max_abs) == (kind, None)


@given(st.lists(st.floats(width=32), min_size=1, max_size=6), st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_a_tensor_equals_itself_and_differences_are_those_of_plain_numbers(one, other):
    mine, theirs = torch.tensor(one[: len(other)]), torch.tensor(other[: len(one)])
    assert difference(mine, mine.clone()).kind == "same"
    row = difference(mine, theirs)
    pairs = list(zip(mine.tolist(), theirs.tolist(), strict=True))
    expected = [0.0 if a == b or (a != a and b != b) else abs(a - b) for a, b in pairs]
    assert row.max_abs == (NAN if any(map(math.isnan, expected)) else max(expected)) or (math.isnan(row.max_abs) and any(map(math.isnan, expected)))
    same = all((a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b)) for a, b in pairs)
    assert (row.kind == "same") == same


# -- whole state dicts


def test_entries_that_differ_most_come_first_and_equal_ones_last():
    mine = {"equal": torch.ones(2), "little": torch.ones(2), "much": torch.ones(2), "shape": torch.ones(2), "nan": torch.ones(1), "here": torch.ones(2, 3)}
    theirs = {
        "there": torch.ones(1),
        "equal": torch.ones(2),
        "little": torch.ones(2) + 1e-3,
        "much": -torch.ones(2),
        "shape": torch.ones(3),
        "nan": torch.tensor([NAN]),
    }
    table = StateDiff(compare(mine, theirs))
    assert [(row.name, row.kind) for row in table] == [
        ("shape", "shape"),
        ("here", "only here"),
        ("there", "only there"),
        ("nan", "values"),
        ("much", "values"),
        ("little", "values"),
        ("equal", "same"),
    ]
    assert (table.equal, math.isnan(table.max_abs), table["much"].max_abs, table["here"].detail) == (False, True, 2, "float32 (2, 3)")
    assert table.summary() == "1 of 7 entries is equal bitwise; 1 of another shape; 1 only here; 1 only there; 3 differ in values"
    assert len(table[:2]) == 2
    assert isinstance(table[:2], StateDiff)
    assert table[-1] == DiffEntry("equal", "same", 0.0, 0.0)
    with pytest.raises(KeyError, match="nowhere"):
        table["nowhere"]


def test_names_are_compared_without_wrappers():
    net = nn.Sequential(nn.Linear(2, 2))
    for one, other in ((net, nn.DataParallel(net)), (nn.DataParallel(net), net), (nn.DataParallel(net), nn.DataParallel(net))):
        table = StateDiff(compare(one.state_dict(), other.state_dict()))
        assert (table.equal, len(table)) == (True, 2)


def test_it_displays_as_a_table_with_what_is_equal_in_one_line():
    mine = {f"same{index}": torch.ones(1) for index in range(6)} | {"<b>": torch.tensor([3.0, 4.0]), "shape": torch.ones(2)}
    theirs = {**mine, "<b>": torch.tensor([3.0, 4.5]), "shape": torch.ones(3)}
    table = StateDiff(compare(mine, theirs), "one", "two", {"lr": (0.001, 0.01), "betas": ((0.9, 0.99), None)})
    assert repr(table).splitlines() == [
        "one → two",
        "options: lr 0.001 → 0.01, betas 0.9,0.99 → None",
        "6 of 8 entries are equal bitwise; 1 of another shape; 1 differs in values",
        "name   kind    detail       max |difference|  relative",
        "shape  shape   (2,) → (3,)",
        "<b>    values                            0.5       0.1",
        "equal: same0, same1, same2, same3 and 2 more",
    ]
    html = table._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>one → two</b>" in html
    assert html.count("<b>") == 1
    for text in ("(2,) → (3,)", "6 of 8 entries are equal bitwise", "lr 0.001 → 0.01", "equal: same0"):
        assert text in html


def test_equal_and_empty_ones_have_no_table():
    assert repr(StateDiff(compare({"x": torch.tensor([NAN])}, {"x": torch.tensor([NAN])}))) == (
        "this → the other\nthe one entry is equal bitwise, 1 with nan at the same places"
    )
    empty = StateDiff(compare({}, {}))
    assert (empty.equal, empty.max_abs, len(empty)) == (True, 0.0, 0)
    assert "all 0 entries are equal bitwise" in empty._repr_html_()


def test_of_many_entries_those_that_differ_most_are_shown():
    mine = {f"x{index}": torch.ones(1) for index in range(100)}
    theirs = {f"x{index}": torch.ones(1) + index + 1 for index in range(100)}
    table = StateDiff(compare(mine, theirs))
    lines = repr(table).splitlines()
    assert (len(lines), lines[3].split()[0], lines[-1]) == (44, "x99", "and 60 more that differ less")
    assert "and 60 more that differ less" in table._repr_html_()


# -- of a run


def kept(root, net, *, last=None, **config):
    """A run that has ended, and whose last and best checkpoint there are."""
    fake = FakeRun(root, epochs=1, steps_per_epoch=10, config=config)
    fake.start()
    fake.train(10)
    fake.end()
    facts = {"epoch": 1, "epochs_done": 1, "step": 10, "config": fake.run_dir.read_spec()["config"]}
    checkpoint.write(fake.run_dir.checkpoints / "last.pt", {"model": checkpoint.model_state(last or net), **facts})
    checkpoint.write(fake.run_dir.checkpoints / "best.pt", {"model": checkpoint.model_state(net), **facts})
    return Run(fake.run_dir)


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]


@pytest.fixture
def one(tmp_path, monkeypatch, nets):
    monkeypatch.setenv("NBDDP_RUN_ROOT", str(tmp_path))
    return kept(tmp_path, nets[0], last=nets[2], lr=0.001)


def test_a_run_is_compared_with_all_that_holds_weights(tmp_path, one, nets):
    two = kept(tmp_path, nets[1], lr=0.01, name="other")
    torch.save({"state_dict": nn.DataParallel(nets[1]).state_dict()}, tmp_path / "x.pt")
    entry = two.dir / "checkpoints" / "last.pt"
    expected = [(row.name, row.kind, row.max_abs) for row in one.diff(nets[1])]
    assert {kind for _, kind, _ in expected} == {"values", "same"}
    for other in (two, two.id, two.id[-4:], two.dir, str(two.dir), entry, str(entry), tmp_path / "x.pt", nets[1].state_dict(), nn.DataParallel(nets[1])):
        assert [(row.name, row.kind, row.max_abs) for row in one.diff(other)] == expected
    assert one.diff(two.dir / "checkpoints" / "last.pt").config == one.diff(two).config == {"lr": (0.001, 0.01)}
    assert one.diff(tmp_path / "x.pt").config == one.diff(nets[1]).config == {}
    assert repr(one.diff(two)).splitlines()[1] == "options: lr 0.001 → 0.01"


def test_which_is_of_both_runs(tmp_path, one, nets):
    two = kept(tmp_path, nets[0], last=nets[1])
    assert one.diff(two, "best").equal
    assert not one.diff(two).equal
    assert one.diff(nets[0], which="best").equal
    assert one.diff(one).equal
    assert one.diff(one.dir / "checkpoints" / "best.pt", which=1)["0.weight"].kind == "values"
    assert one.diff(CheckpointEntry("best", two.dir / "checkpoints" / "best.pt", 1, 10, None, 1), "best").equal
    assert repr(one.diff(two, "best")).splitlines()[0] == f"digits-{one.id[-4:]}, best → digits-{two.id[-4:]}, best"
    with pytest.raises(CheckpointError, match=rf"run {one.id} has no checkpoint initial: it has best, last"):
        one.diff(two, "initial")


def test_what_holds_no_weights_is_refused(tmp_path, one):
    with pytest.raises(ConfigError, match=r"run\.diff takes a run, its id or directory, a checkpoint file, a state dict or a module, not a int"):
        one.diff(5)
    for nothing in ({}, {1: torch.ones(1)}, {"a": 1}, {"model": {"a": torch.ones(1)}}, torch.optim.SGD([nn.Parameter(torch.ones(1))]).state_dict()):
        with pytest.raises(ConfigError, match=r"run\.diff was given a dict that is no state dict"):
            one.diff(nothing)
    with pytest.raises(CheckpointError, match=rf"no checkpoint {tmp_path}/none\.pt"):
        one.diff(tmp_path / "none.pt")
    with pytest.raises(ConfigError, match="no run none in"):
        one.diff("none")
    for text in ("", "~nobody-of-this-name"):
        with pytest.raises(ConfigError):
            one.diff(text)
    with pytest.raises(ConfigError, match=r"no run x{300} in"):
        one.diff("x" * 300)
    with pytest.raises(ConfigError, match=r"run\.diff: weight of Linear is on the meta device and has no values to compare"):
        one.diff(nn.Linear(2, 2, device="meta"))


def test_numbers_of_epochs_are_those_of_numpy_too(one):
    for epoch in (1, np.int64(1), np.argmax([0.0, 1.0])):
        assert one.diff(one, epoch).equal


def test_names_are_shown_in_a_line(one):
    found = one.diff({"a\n\x1b[31m": torch.ones(1), "b" * 500: torch.ones(1)})
    assert max(map(len, repr(found).splitlines())) < 220
    assert r"a\n\x1b[31m" in repr(found)


def test_what_is_on_one_side_alone_does_not_differ_less():
    found = StateDiff(compare({f"x{index}": torch.ones(1) for index in range(50)}, {}))
    assert repr(found).splitlines()[-1] == "and 10 more"
