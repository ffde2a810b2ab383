from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from nbddp.kernel.interrupt import Interrupts


def interrupt(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_until_the_launch_an_interrupt_ends_the_cell_in_one_line():
    with Interrupts().taken(), pytest.raises(KeyboardInterrupt) as caught:
        interrupt()
    assert type(caught.value).__name__ == "KeyboardInterrupt"
    assert caught.value._render_traceback_() == ["KeyboardInterrupt: stopped before the run was started; nothing is left of it"]


def test_one_that_the_users_code_swallowed_ends_the_cell_all_the_same():
    with Interrupts().taken() as interrupts:
        with contextlib.suppress(BaseException):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.hold()


def test_what_was_begun_is_cleared_away_whatever_comes():
    cleared = []

    def clear():
        interrupt(2)
        cleared.append(True)

    with Interrupts().taken() as interrupts:
        interrupts.clear_away(clear)
    assert cleared == [True]


def test_afterwards_each_is_handled_once_and_by_its_number():
    seen = []
    with Interrupts().taken() as interrupts:
        interrupts.hold()
        interrupt(2)
        interrupts.handle(seen.append)
        assert seen == [1, 2]
        done = threading.Event()

        def handle(number):
            seen.append(number)
            done.set()

        interrupt()
        interrupts.wait(done, handle)
        interrupts.handle(seen.append)
    assert seen == [1, 2, 3]


def test_the_handler_of_before_is_put_back():
    hits = []
    before = signal.signal(signal.SIGINT, lambda *_: hits.append(1))
    try:
        with contextlib.suppress(ZeroDivisionError), Interrupts().taken() as interrupts:
            interrupts.hold()
            interrupt()
            raise ZeroDivisionError
        interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (hits, interrupts.count) == ([1], 1)


def test_another_thread_leaves_the_main_threads_handler_alone():
    before, during = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupts().taken() as interrupts:
            during.append(signal.getsignal(signal.SIGINT))
            interrupts.hold()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during == [before]
