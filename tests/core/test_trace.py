"""Spans: names, nesting, sums, and what happens when a block fails. No amount of time is asserted."""

import threading
from types import SimpleNamespace

import pytest

from tunesmith.base.core.trace import Trace, Watcher, count, gauge, include, span, trace, watching


def test_spans_are_recorded_under_their_path():
    with trace() as record:
        with span("update"):
            with span("forward"):
                pass
            with span("backward"):
                pass
        with span("rollout"):
            pass
    assert set(record.seconds) == {"update", "update/forward", "update/backward", "rollout"}


def test_a_span_that_runs_twice_adds_up():
    with trace() as record:
        for _ in range(3):
            with span("micro"):
                pass
    assert record.num_calls == {"micro": 3}


def test_the_time_of_a_span_includes_its_inner_spans_and_fits_in_the_trace():
    with trace() as record, span("update"):
        with span("forward"):
            sum(range(1000))
        with span("backward"):
            sum(range(1000))
    assert record.seconds["update/forward"] + record.seconds["update/backward"] <= record.seconds["update"]
    assert record.seconds["update"] <= record.wall_s


def test_top_level_stages_and_other_sum_to_the_step():
    record = Trace(wall_s=10.0)
    record.add("rollout", 3.0, is_outermost=True)
    record.add("update/forward", 2.0, is_outermost=False)
    record.add("update", 5.0, is_outermost=True)
    metrics = record.metrics()
    assert metrics["time/other_s"] == pytest.approx(2.0)
    assert metrics["time/rollout_s"] + metrics["time/update_s"] + metrics["time/other_s"] == metrics["time/step_s"]
    assert metrics["time/update/forward_s"] == 2.0


def test_without_a_trace_the_block_just_runs():
    ran = False
    with span("rollout"):
        ran = True
    assert ran


def test_a_failing_block_is_recorded_and_the_next_span_has_its_own_path():
    with trace() as record:
        with pytest.raises(KeyError), span("rollout"):
            raise KeyError
        with span("update"):
            pass
    assert set(record.seconds) == {"rollout", "update"}


def test_a_trace_ends_when_its_block_fails():
    with pytest.raises(KeyError), trace() as record:
        raise KeyError
    with span("after"):
        pass
    assert record.seconds == {}
    assert record.wall_s > 0


def test_an_inner_trace_takes_its_own_spans_alone():
    with trace() as outer, span("step"):
        with trace() as inner, span("rollout"):
            pass
        with span("update"):
            pass
    assert set(inner.seconds) == {"rollout"}
    assert set(outer.seconds) == {"step", "step/update"}


def test_spans_of_another_thread_stay_out():
    def work() -> None:
        with span("elsewhere"):
            pass

    with trace() as record:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert record.seconds == {}


def test_spans_of_another_thread_are_included_below_the_current_one_and_cover_no_time():
    with trace() as other, span("length"):
        count("computed_tokens", 3)
        count("padding_share", 1, out_of=4)
    with trace() as record, span("reward"):
        include(other)
        include(other)
    assert record.seconds["reward/length"] == 2 * other.seconds["length"]
    assert record.num_calls["reward/length"] == 2
    assert record.metrics()["reward/computed_tokens"] == 6
    assert record.metrics()["reward/padding_share"] == 2 / 8
    assert record.covered_s == record.seconds["reward"]
    include(other)  # without an open trace nothing happens


def test_figures_belong_to_the_outermost_stage_and_are_sums_shares_or_means():
    with trace() as record:
        for padding, positions in ((2, 8), (0, 24)):
            with span("update/forward"):
                count("shared_tokens", 5)
                count("padding_share", padding, out_of=positions)
                count("micro_batch_tokens", positions, out_of=1)
        with span("evaluate"), span("rollout"):
            count("shared_tokens", 1)
    metrics = record.metrics()
    assert {name: value for name, value in metrics.items() if not name.startswith("time/")} == {
        "update/shared_tokens": 10,
        "update/padding_share": 2 / 32,
        "update/micro_batch_tokens": 16,
        "evaluate/shared_tokens": 1,
    }
    count("shared_tokens", 1)  # without an open trace nothing happens
    assert record.metrics() == metrics


def test_watchers_are_told_of_each_span_in_order_also_when_it_fails():
    told: list[str] = []

    class Listener(Watcher):
        def enter(self, path: str) -> None:
            told.append(f"+{path}")

        def leave(self, path: str) -> None:
            told.append(f"-{path}")

    with watching(Listener()), trace():
        with span("update"), span("forward"):
            pass
        with pytest.raises(KeyError), span("reward"):
            raise KeyError
    with trace(), span("rollout"):
        pass
    assert told == ["+update", "+update/forward", "-update/forward", "-update", "+reward", "-reward"]


def test_what_watchers_take_is_part_of_the_stage(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0

    class Slow(Watcher):
        def enter(self, path: str) -> None:
            nonlocal now_s
            now_s += 1.0

        leave = enter

    monkeypatch.setattr("tunesmith.base.core.trace.time", SimpleNamespace(perf_counter=lambda: now_s))
    with watching(Slow()), trace() as record, span("rollout"):
        now_s += 5.0
    assert record.seconds == {"rollout": 7.0}
    assert record.metrics()["time/other_s"] == 0.0


def test_watchers_are_told_values_of_gauges_inside_of_their_block():
    told: list[tuple[str, float]] = []

    class Listener(Watcher):
        def gauge(self, name: str, value: float) -> None:
            told.append((name, value))

    gauge("slots", 1)
    with watching(Listener()):
        gauge("slots", 2)
        thread = threading.Thread(target=gauge, args=("slots", 3))
        thread.start()
        thread.join()
    gauge("slots", 4)
    assert told == [("slots", 2), ("slots", 3)]
