"""Requests for profiles between two processes: one at a time, answered whole, withdrawn in the end."""

import multiprocessing
import threading
from pathlib import Path

import pytest

from tunesmith.base.core.errors import RunError
from tunesmith.base.runs.lock import RunLock
from tunesmith.observe.profiling import request
from tunesmith.observe.profiling.profile import finish


def test_nobody_is_asked_where_nothing_runs(tmp_path: Path):
    with pytest.raises(RunError, match="does not run"):
        request.ask(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_taken_once(tmp_path: Path):
    with RunLock(tmp_path):
        asked = request.ask(tmp_path, 3)
        with pytest.raises(RunError, match="asked for already"):
            request.ask(tmp_path, 3)
        assert request.take(tmp_path) == asked
        assert request.take(tmp_path) is None
        request.answer(tmp_path, asked, {"stacks": []})
        assert request.read_answer(tmp_path, "another") is None
        assert request.read_answer(tmp_path, asked.id) == {"id": asked.id, "stacks": []}
        request.wait(tmp_path, asked, 0)


@pytest.mark.parametrize("text", ["", "[]", '{"id": 1}', '{"id": "a", "num_steps": "many"}'])
def test_a_damaged_request_is_ignored(tmp_path: Path, text: str):
    (tmp_path / "profile-request.json").write_text(text)
    assert request.take(tmp_path) is None


def test_a_problem_of_the_recorder_is_told(tmp_path: Path):
    with RunLock(tmp_path):
        asked = request.ask(tmp_path, 1)
        request.answer(tmp_path, asked, {"problem": "another profiler is active"})
        request.wait(tmp_path, asked, 5)
        with pytest.raises(RunError, match="another profiler is active"):
            finish(tmp_path)


def test_waiting_ends_at_the_time_limit_and_withdraws_the_request(tmp_path: Path):
    with RunLock(tmp_path):
        asked = request.ask(tmp_path, 2)
        with pytest.raises(RunError, match="no 2 steps within 0 s"):
            request.wait(tmp_path, asked, 0)
        assert request.take(tmp_path) is None


def hold(folder: Path, held, ends) -> None:
    with RunLock(folder):
        held.set()
        ends.wait(60)


def test_waiting_ends_with_the_run(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    held, ends = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, held, ends))
    process.start()
    assert held.wait(60)
    asked = request.ask(tmp_path, 2)
    threading.Timer(0.3, ends.set).start()
    with pytest.raises(RunError, match="ended before 2 more steps"):
        request.wait(tmp_path, asked, 60)
    process.join()
