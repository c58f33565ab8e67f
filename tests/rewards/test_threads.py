import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from tunesmith.base.core.errors import RewardError
from tunesmith.learn.rewards.threads import EventLoop, HangError, Worker


def test_a_worker_gives_back_what_the_call_returns_or_raises():
    worker = Worker("f")
    assert worker.run(lambda: 3, timeout_s=60) == 3
    for error in (KeyError("k"), TimeoutError("own"), SystemExit(2)):
        with pytest.raises(type(error)) as caught:
            worker.run(lambda error=error: raise_(error), timeout_s=60)
        assert caught.value is error
    assert worker.run(lambda: 4, timeout_s=60) == 4


def raise_(error: BaseException) -> None:
    raise error


def test_threads_that_hang_have_an_end():
    release = threading.Event()
    worker = Worker("f")
    try:
        for _ in range(7):
            with pytest.raises(HangError, match="is left behind"):
                worker.run(release.wait, timeout_s=0.01)
        with pytest.raises(RewardError, match=r"8 threads hang .* tunesmith-reward-f-8; give the function a time"):
            worker.run(release.wait, timeout_s=0.01)
    finally:
        release.set()


def test_calls_that_are_late_but_end_leave_no_threads():
    worker = Worker("late")
    for _ in range(20):
        release = threading.Event()
        with pytest.raises(HangError):
            worker.run(release.wait, timeout_s=0.01)
        release.set()
        for thread in [t for t in threading.enumerate() if t.name.startswith("tunesmith-reward-late")]:
            thread.join()


def test_signals_reach_the_main_thread_while_it_waits():
    """Within the time limit of this test run, not after the 900 seconds that the call may take."""

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        release.wait()

    class ArrivedError(Exception):
        pass

    def arrive(number: int, frame: object) -> None:
        release.set()
        raise ArrivedError

    release = threading.Event()
    before = signal.signal(signal.SIGUSR1, arrive)
    try:
        with pytest.raises(ArrivedError):
            Worker("f").run(interrupt, timeout_s=900)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_thread_that_hangs_does_not_keep_the_process():
    code = """
from tunesmith.learn.rewards.threads import HangError, Worker
import threading
try:
    Worker("f").run(threading.Event().wait, timeout_s=0.05)
except HangError:
    print("left")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "left\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_worker_and_loop_work_in_a_forked_process():
    code = """
import asyncio, os
from tunesmith.learn.rewards.threads import EventLoop, Worker
worker, loop = Worker("f"), EventLoop()
async def two(): return 2
assert (worker.run(lambda: 1, 60), loop.run(two(), 60)) == (1, 2)
child = os.fork()
if child == 0:
    ok = (worker.run(lambda: 1, 60), loop.run(two(), 60)) == (1, 2)
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=300, check=True)


def test_a_blocked_loop_is_left_behind_and_the_next_call_has_a_fresh_one():
    release = threading.Event()

    async def blocks() -> bool:
        return release.wait()

    async def quick() -> int:
        return 5

    before = {t for t in threading.enumerate() if t.name == "tunesmith-rewards"}
    loop = EventLoop()
    try:
        with pytest.raises(HangError, match="an `async def` blocks the event loop"):
            loop.run(blocks(), timeout_s=0.05)
        left_behind = {t for t in threading.enumerate() if t.name == "tunesmith-rewards"} - before
        assert loop.run(quick(), timeout_s=60) == 5
    finally:
        release.set()
    for thread in left_behind:
        thread.join()


def test_a_loop_that_is_busy_but_answers_is_waited_for():
    async def slow() -> int:
        for _ in range(20):
            await asyncio.sleep(0.01)
        return 6

    assert EventLoop().run(slow(), timeout_s=0.02) == 6
