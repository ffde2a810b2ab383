from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from nbddp.kernel import collection


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_while_it_is_paused_and_then_it_is_as_it_was() -> None:
    with collection.paused():
        assert not gc.isenabled()
        with collection.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with collection.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_the_last_of_several_threads_ends_the_pause() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collection.paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with collection.paused():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ZeroDivisionError), collection.paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        collection.settle()
        assert gc.get_freeze_count() == frozen > 0
    finally:
        gc.unfreeze()


def test_a_collection_ahead_is_done_once_and_not_where_it_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append(1))
    monkeypatch.setattr(gc, "get_count", lambda: (600, 5, 9))
    collection.ahead()
    assert done == [1]
    monkeypatch.setattr(gc, "get_count", lambda: (600, 5, 0))
    collection.ahead()
    monkeypatch.setattr(gc, "get_count", lambda: (600, 5, 9))
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: 10**8)
    collection.ahead()
    gc.disable()
    collection.ahead()
    assert done == [1]


FULL = """
import gc, sys
from nbddp.kernel.figure import loss_png
from nbddp.state import RunState
full = []
gc.callbacks.append(lambda phase, info: full.append(info["generation"]) if phase == "start" and info["generation"] == 2 else None)
state = RunState()
for step in range(500):
    state.train_curve.add(step, 1 / (step + 1))
held = [[] for _ in range(100_000)]
gc.collect()  # what comes before the drawing is settled
full.clear()
for _ in range(4):
    assert loss_png(state)
assert "matplotlib" in sys.modules and gc.isenabled()
for _ in range(300):
    [[] for _ in range(1000)]  # what runs then finds no full collection due
print(len(full))
"""


def test_the_first_drawings_bring_about_no_full_collection() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "0\n", done.stderr
