"""Metrics are what `metrics.jsonl` says now, however it was written, cut back, or replaced."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.runs.lock import HOLDER_FILE, RunLock
from tunesmith.collect.store.metric_log import METRICS_FILE, MetricLog, heartbeat_of, run_state


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "20260101-120000-ppo-ab12"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("algorithm: ppo\n")
    return folder


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def append(run, *lines):
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def read(log, name="reward"):
    return [(one.step, one.value) for one in log.series(name, points=5_000).points]


def test_each_number_of_each_line_is_a_metric_of_its_step(run):
    append(run, line(1, reward=0.5, kl=2, refused=True, note="words", bad=None), line(2, reward=-1.5))
    log = MetricLog(run)
    assert read(log) == [(1, 0.5), (2, -1.5)]
    assert (read(log, "kl"), read(log, "bad"), read(log, "unknown")) == ([(1, 2.0)], [(1, None)], [])
    assert log.names() == ["bad", "kl", "reward"]
    assert (log.last_id(), log.last_step()) == (2, 2)


def test_times_add_up_from_the_start_of_the_run(run):
    append(run, line(1, **{"time/step_s": 2.0}), line(2, **{"time/step_s": 3.5}))
    first, second = MetricLog(run).series("time/step_s").points
    assert first.time == pytest.approx((run / "recipe.yaml").stat().st_mtime + 2.0)
    assert second.time - first.time == pytest.approx(3.5)


def test_a_line_without_its_end_waits_for_it(run):
    log = MetricLog(run)
    append(run, line(1, reward=1.0), '{"step": 2, "rew')
    assert read(log) == [(1, 1.0)]
    append(run, 'ard": 2.0}\n')
    assert read(log) == [(1, 1.0), (2, 2.0)]


def test_a_file_that_is_not_there_yet_is_waited_for(run):
    log = MetricLog(run)
    assert (log.names(), log.last_id(), log.last_step(), log.after(0, 10)) == ([], 0, None, ([], 0))
    append(run, line(1, reward=1.0))
    assert read(log) == [(1, 1.0)]


def test_lines_and_names_that_no_page_can_show_are_left_out(run):
    with (run / METRICS_FILE).open("wb") as file:
        file.write(b"no json\n[1]\n\xff\xfe\n")
        file.write(b'{"step": 3, "reward": 1.0, "lone \\ud800": 2.0, "nul \\u0000": 1.0, "": 4.0}\n')
        file.write(b'{"step": 4, "reward": NaN, "long": 1e400, "huge": 1' + b"0" * 400 + b"}\n")
    log = MetricLog(run)
    assert read(log) == [(3, 1.0), (4, None)]
    assert read(log, "long") == read(log, "huge") == [(4, None)]
    assert log.names() == ["huge", "long", "reward"]


def test_what_is_new_comes_in_whole_rows(run):
    append(run, line(1, reward=1.0, kl=0.0), line(2, reward=2.0, kl=0.5, loss=3.0), line(3, kl=1.0))
    log = MetricLog(run)
    found, num_left = log.after(0, 3)
    assert [(one.id, one.name) for one in found] == [(1, "reward"), (1, "kl")]
    assert num_left == 4
    found, num_left = log.after(1, 1)  # a row that is larger than the limit comes all the same
    assert ([one.step for one in found], num_left) == ([2, 2, 2], 1)
    assert [one.step for one in log.after(0, 100)[0]] == [1, 1, 2, 2, 2, 3]
    assert log.after(3, 100) == ([], 0)
    assert {name: (one.step, one.value) for name, one in log.recent(1).items()} == {"kl": (3, 1.0)}
    assert set(log.recent(4)) == {"kl", "reward", "loss"}


@pytest.mark.parametrize("added", [0, 3, 8])
def test_a_run_that_was_cut_back_is_read_anew_and_its_ids_go_on(run, added):
    log = MetricLog(run)
    lines = [line(step, reward=float(step)) for step in range(1, 7)]
    append(run, *lines)
    before = log.series("reward").last_id
    kept = lines[:4] if added != 3 else []
    (run / METRICS_FILE).write_text("".join(kept))
    append(run, *(line(step, reward=10.0 * step) for step in range(len(kept) + 1, len(kept) + 1 + added)))
    expected = [json.loads(text) for text in (run / METRICS_FILE).read_text().splitlines()]
    assert read(log) == [(row["step"], row["reward"]) for row in expected]
    assert [one.value for one in log.after(before, 100)[0]] == [row["reward"] for row in expected]
    assert log.last_id() == before + len(expected)


def test_a_point_has_the_same_id_in_another_process(run):
    append(run, line(1, reward=1.0), line(2, reward=2.0))
    log = MetricLog(run)
    first = log.last_id()
    append(run, line(3, reward=3.0))
    assert log.after(first, 10) == MetricLog(run).after(first, 10)


def test_a_file_that_cannot_be_read_is_said_once_and_holds_nothing(run, caplog):
    (run / METRICS_FILE).mkdir()
    log = MetricLog(run)
    assert log.names() == log.names() == []
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


def test_a_short_series_is_whole_and_goes_on_where_it_ended(run):
    append(run, *(line(step, loss=float(step), kl=0.0) for step in range(10)))
    log = MetricLog(run)
    first = log.series("loss", points=10)
    assert (len(first.points), first.is_sampled, first.num_points) == (10, False, 10)
    assert log.series("loss", after_id=first.last_id).points == ()
    append(run, line(10, loss=10.0))
    assert [one.step for one in log.series("loss", after_id=first.last_id).points] == [10]


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.one_of(st.none(), st.integers(-5, 5).map(float)), min_size=30, max_size=200),
    points=st.integers(2, 20),
)
def test_a_thinned_series_keeps_ends_extremes_and_gaps(tmp_path_factory, values: list[float | None], points: int):
    run = tmp_path_factory.mktemp("run")
    append(run, *(line(step, loss=value) for step, value in enumerate(values)))
    found = MetricLog(run).series("loss", points=points)
    steps = [one.step for one in found.points]
    assert found.is_sampled
    assert found.num_points == len(values)
    assert steps == sorted(set(steps))
    assert all(one.value == values[one.step] for one in found.points)
    assert {0, len(values) - 1} <= set(steps)
    assert len(steps) <= 3 * max(1, points // 2) + 2
    known = [value for value in values if value is not None]
    kept = [one.value for one in found.points if one.value is not None]
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))
    assert (None in values) == any(one.value is None for one in found.points)


def test_the_state_of_a_run_follows_from_its_lock_and_its_files(run):
    assert run_state(run) == "stopped"
    with RunLock(run):
        assert run_state(run) == "running"
        assert (heartbeat_of(run).pid, heartbeat_of(run).state) == (os.getpid(), "running")
    (run / HOLDER_FILE).write_text("{}")
    assert run_state(run) == "died"
    append(run, line(1, reward=1.0))
    assert heartbeat_of(run).time == (run / METRICS_FILE).stat().st_mtime
    (run / "result.json").write_text("{}")
    assert run_state(run) == "finished"


numbers = st.one_of(st.none(), st.floats(-100, 100))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(numbers, min_size=1, max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, 6)),
        st.tuples(st.just("read"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(actions)
def test_whatever_happens_to_the_file_the_log_is_what_it_says_in_the_end(tmp_path_factory, actions):
    folder = tmp_path_factory.mktemp("run")
    lines, log, number, last = [], MetricLog(folder), 0.0, 0
    for kind, argument in actions:
        if kind == "append":
            for value in argument:
                # No two lines are ever equal, as with the times that a trainer writes.
                number += 1
                lines.append(line(len(lines) + 1, reward=value, number=number))
            (folder / METRICS_FILE).write_text("".join(lines))
        elif kind == "cut":
            lines = lines[:argument]
            (folder / METRICS_FILE).write_text("".join(lines))
        else:
            assert log.last_id() >= last
            last = log.last_id()
    expected = [json.loads(text) for text in lines]
    assert read(log, "number") == [(row["step"], row["number"]) for row in expected]
    assert read(log) == [(row["step"], row["reward"]) for row in expected]
    assert all(value is None or math.isfinite(value) for _, value in read(log))
