"""The engine's threads: as many as there are free cores."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tunesmith.base.runs.environment import CoreSeconds, core_numbers, core_seconds
from tunesmith.engine.rollout import threads
from tunesmith.engine.rollout.threads import FreeThreads, adapted


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("number", "free", "most", "expected"),
    [
        pytest.param(2, 2.0, 2, 2, id="nothing else runs"),
        pytest.param(2, 1.3, 2, 1, id="a busy program that two threads keep from a whole core"),
        pytest.param(1, 1.0, 2, 1, id="the same beside one thread"),
        pytest.param(2, 1.5, 2, 2, id="half a core does not stop a thread"),
        pytest.param(1, 1.5, 2, 1, id="nor does it start one"),
        pytest.param(1, 2.0, 2, 2, id="the program has ended"),
        pytest.param(4, -0.5, 4, 1, id="one thread at least"),
        pytest.param(2, 15.0, 2, 2, id="no more than torch has"),
        pytest.param(8, 8.0, 4, 4, id="torch has fewer than before"),
        pytest.param(16, 6.2, 16, 6, id="many cores, many programs"),
    ],
)
def test_there_are_as_many_threads_as_free_cores(number: int, free: float, most: int, expected: int):
    assert adapted(number, free, most) == expected


def test_the_time_of_the_cores_is_counted():
    busy_s, wall_s = sum(core.busy for core in core_seconds()), time.monotonic()
    while time.monotonic() - wall_s < 0.3:
        pass
    assert sum(core.busy for core in core_seconds()) - busy_s > 0.1


def test_the_number_follows_what_others_use_within_the_block_alone(monkeypatch: pytest.MonkeyPatch):
    """Clock and counters are replaced: a test's own machine is busy with other tests."""
    now = {"wall": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(threads, "core_numbers", lambda: {0, 1})
    monkeypatch.setattr(threads, "core_seconds", lambda: [CoreSeconds(busy, 0.0) for busy in (now["busy"], 0.0, 5.0)])
    monkeypatch.setattr(threads.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(threads.time, "process_time", lambda: now["own"])
    with num_threads(2):
        free = FreeThreads()

        def used(others: float, own: float) -> int:
            now["wall"] += 1
            now["busy"] += others + own
            now["own"] += own
            with free.used():
                inside = torch.get_num_threads()
            assert torch.get_num_threads() == 2
            return inside

        assert used(2.0, 0.0) == 2, "nothing is known at the first look"
        assert [used(0.0, 1.9), used(0.8, 1.2), used(1.0, 1.0), used(0.0, 1.0)] == [2, 1, 1, 2]
        now["wall"] += 5
        assert used(12.0, 0.0) == 2, "others were busy while the engine had nothing to do"
        assert [used(1.0, 1.0), used(0.0, 1.0)] == [1, 2]


@pytest.mark.slow  # needs the cores for itself
def test_beside_a_busy_program_there_is_one_thread_less():
    if len(core_numbers()) < 2:
        pytest.skip("one core cannot be shared")
    with num_threads(len(core_numbers())):
        free, spin = FreeThreads(), "while True: pass"
        program = subprocess.Popen([sys.executable, "-c", spin])
        try:
            with free.used():
                pass
            end_s = time.monotonic() + 2
            x = torch.randn(700, 700)
            while time.monotonic() < end_s:
                with free.used():
                    inside = torch.get_num_threads()
                    x @ x
        finally:
            program.kill()
            program.wait()
        assert inside < len(core_numbers())
