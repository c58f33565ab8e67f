"""The record of the stage, as another process reads it."""

import os
import threading
import time
from pathlib import Path

import pytest

from tunesmith.base.core.trace import span, trace, watching
from tunesmith.observe.profiling.stage import STAGE_FILE, Record, Stage, read


def record_in(folder: Path) -> Record:
    found = read(folder)
    assert found is not None
    return found


def test_the_stage_of_the_training_thread_is_that_of_its_innermost_open_span(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with watching(stage), trace():
        with span("update"):
            before_ns = time.monotonic_ns()
            with span("forward"):
                inner = record_in(tmp_path).threads[0]
            outer = record_in(tmp_path).threads[0]
        between = record_in(tmp_path).threads[0]
    assert [thread.path for thread in (inner, outer, between)] == ["update/forward", "update", ""]
    assert inner.tid == threading.get_native_id()
    assert inner.identity == threading.get_ident()
    assert before_ns <= inner.begin_ns <= inner.last_ns <= outer.last_ns <= between.last_ns
    assert outer.begin_ns <= before_ns, "the outer stage began when it began, not when the inner one ended"


def test_an_error_leaves_the_stage_that_it_left(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with watching(stage), trace(), span("update"):
        with pytest.raises(ValueError), span("forward"):
            raise ValueError
        assert record_in(tmp_path).threads[0].path == "update"


def test_each_thread_has_a_stage_of_its_own(tmp_path: Path) -> None:
    stage, begun, ended = Stage(tmp_path), threading.Event(), threading.Event()

    def score() -> None:
        with trace(), span("judge"):
            begun.set()
            ended.wait()

    with watching(stage), trace(), span("rollout"):
        thread = threading.Thread(target=score)
        thread.start()
        begun.wait()
        leader, scorer = record_in(tmp_path).threads
        ended.set()
        thread.join()
    assert (leader.path, scorer.path) == ("rollout", "judge")
    assert scorer.tid == thread.native_id


def test_more_threads_than_slots_train_on_and_count_as_progress(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    def work(number: int) -> None:
        with trace(), span(f"work-{number}"):
            pass

    with watching(stage), trace(), span("update"):
        for number in range(40):
            thread = threading.Thread(target=work, args=(number,))
            thread.start()
            thread.join()
    assert len(record_in(tmp_path).threads) == 16
    assert stage.last_ns >= record_in(tmp_path).last_ns


def test_step_state_and_process_are_recorded(tmp_path: Path) -> None:
    stage = Stage(tmp_path, signal=10, alive_every_s=2.0)
    stage.beat(7, "waiting")
    found = record_in(tmp_path)
    assert (found.pid, found.step, found.state, found.signal) == (os.getpid(), 7, "waiting", 10)
    assert found.alive_every_ns == 2_000_000_000
    assert found.is_alive
    assert found.last_ns == found.beat_ns == stage.last_ns
    assert found.alive_ns == 0
    stage.alive()
    assert record_in(tmp_path).alive_ns >= found.beat_ns


def test_names_too_long_or_not_to_be_encoded_are_cut_and_never_raise(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with watching(stage), trace(), span("é" * 300), span("\udc80"):
        pass
    with watching(stage), trace(), span("é" * 300):
        assert record_in(tmp_path).threads[0].path == "é" * 88


def test_a_file_left_behind_is_replaced_and_the_end_of_a_run_removes_it(tmp_path: Path) -> None:
    (tmp_path / STAGE_FILE).write_bytes(b"of another release")
    assert read(tmp_path) is None
    left = (tmp_path / STAGE_FILE).open("rb")
    stage = Stage(tmp_path)
    assert left.read() == b"of another release", "a process that has the old file open must not see it change"
    stage.close()
    assert read(tmp_path) is None
    with watching(stage), trace(), span("late"):
        pass


def test_the_record_of_another_process_with_the_same_id_is_not_alive(tmp_path: Path) -> None:
    Stage(tmp_path)
    found = record_in(tmp_path)
    data = bytearray((tmp_path / STAGE_FILE).read_bytes())
    data[16:24] = (found.process_start + 1).to_bytes(8, "little")
    (tmp_path / STAGE_FILE).write_bytes(data)
    assert not record_in(tmp_path).is_alive
