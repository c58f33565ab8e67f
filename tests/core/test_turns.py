"""Calls of one object: in turn, refused from within each other, and none is left half entered by Ctrl-C."""

import signal
import threading
from types import FrameType

import pytest

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.turns import Turns


def test_threads_wait_for_their_turn_and_a_call_within_a_call_is_refused() -> None:
    turns, order = Turns("engine"), list[str]()

    def call() -> None:
        with turns.next():
            order.append("second")

    with turns.next():
        other = threading.Thread(target=call)
        other.start()
        with pytest.raises(InputError, match="the engine was called from within a call of it"):
            call()
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_a_call_is_refused_however_deep_within_another_it_is() -> None:
    turns = Turns("engine")

    def call(depth: int) -> None:
        if depth:
            call(depth - 1)
        else:
            with turns.next():
                reply()

    def reply() -> None:
        with pytest.raises(InputError, match="the engine was called from within a call of it"):
            call(3)

    call(3)
    call(0)


def test_a_lock_that_an_interrupt_left_taken_is_freed_by_the_next_call() -> None:
    turns = Turns("engine")

    def interrupted() -> None:
        turns.next().__enter__()  # and no block, as when a signal is handled between the two

    def call() -> None:
        with turns.next():
            pass

    for _ in range(2):
        interrupted()
        call()
    other = threading.Thread(target=call, daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


def test_an_interrupt_at_any_instant_leaves_the_object_free() -> None:
    turns, num_interrupts = Turns("engine"), 0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def call() -> None:
        with turns.next():
            pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while num_interrupts < 5_000:  # the timer of pytest-timeout, whose limit does not count here
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5)
                while True:
                    call()
            except KeyboardInterrupt:
                num_interrupts += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    call()
    entered = threading.Event()

    def enter() -> None:
        with turns.next():
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    assert entered.wait(60)
