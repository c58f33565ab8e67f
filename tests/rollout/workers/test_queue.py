"""The work queue by itself: whatever dies and whenever, every lease is answered; order, copies, rates."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.engine.rollout.workers.queue import WorkQueue


def test_the_longest_lease_comes_first_and_equal_ones_in_order() -> None:
    queue = WorkQueue([3, 9, 3, 7])
    assert [queue.take(worker, 0.0) for worker in range(4)] == [1, 3, 0, 2]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_every_lease_is_answered_once_whatever_dies(work: list[int], num_workers: int, data: st.DataObject) -> None:
    queue = WorkQueue(work)
    held: dict[int, int] = {}
    answers = [0] * len(work)
    for now in range(400):
        worker = data.draw(st.integers(0, num_workers - 1))
        if worker not in held:
            lease = queue.take(worker, now)
            if lease is not None:
                assert answers[lease] == 0, "what is answered is not handed out"
                held[worker] = lease
        elif data.draw(st.booleans()):
            answers[held.pop(worker)] += queue.finish(worker, now, work=1.0)
        else:
            del held[worker]
            queue.release(worker)
        assert queue.is_done == all(answers)
        if queue.is_done:
            break
    now = 1000.0
    for worker in [*held, 99]:  # what is left is still there for one that lives
        queue.release(worker)
    while not queue.is_done:
        lease = queue.take(99, now)
        assert lease is not None, "a lease is lost"
        answers[lease] += queue.finish(99, now + 1, work=work[lease])
        now += 1
    assert answers == [1] * len(work)


def test_a_second_answer_does_not_count() -> None:
    queue = WorkQueue([4, 4], rates={0: 1.0, 1: 1.0, 2: 8.0})
    assert (queue.take(0, 0.0), queue.take(1, 0.0)) == (0, 1)
    assert queue.take(2, 1.0) == 0, "the fast one copies what would end last"
    assert queue.finish(2, 1.5, work=4) and not queue.finish(0, 4.0, work=4)
    assert queue.num_stolen == 1 and not queue.is_done
    assert queue.finish(1, 4.0, work=4) and queue.is_done


def test_a_slow_worker_copies_nothing_that_the_holder_ends_sooner() -> None:
    queue = WorkQueue([8], rates={0: 4.0, 1: 1.0})
    queue.take(0, 0.0)
    assert queue.take(1, 1.0) is None, "8 s for it, 1 s for the holder"
    assert queue.take(1, 20.0) == 0, "the holder is late by far: it may hang"


def test_only_one_copy_is_made_and_it_outlives_the_first_holder() -> None:
    queue = WorkQueue([8])
    assert [queue.take(worker, now) for worker, now in ((0, 0.0), (1, 9.0), (2, 9.0))] == [0, 0, None]
    queue.release(0)
    assert queue.take(0, 10.0) == 0, "handed out as a copy of the one that lives, not lost"
    assert queue.finish(1, 11.0, work=8) and queue.is_done
    assert not queue.finish(0, 12.0, work=8)


def test_a_worker_holds_one_lease_at_a_time() -> None:
    queue = WorkQueue([1, 1])
    queue.take(0, 0.0)
    with pytest.raises(ValueError, match="worker 0 holds lease 0"):
        queue.take(0, 9.0)


def simulated_s(work: list[float], speeds: list[float]) -> float:
    """Seconds until all leases are answered by workers of these speeds, in tokens a second."""
    queue, now = WorkQueue(work), 0.0
    ends: list[tuple[float, int, int]] = []
    idle = set(range(len(speeds)))
    while not queue.is_done:
        for worker in sorted(idle):
            lease = queue.take(worker, now)
            if lease is not None:
                idle.discard(worker)
                heapq.heappush(ends, (now + work[lease] / speeds[worker], worker, lease))
        now, worker, lease = heapq.heappop(ends)
        queue.finish(worker, now, work=work[lease])
        idle.add(worker)
    return now


@given(st.lists(st.integers(8, 512), min_size=40, max_size=80), st.lists(st.integers(1, 4), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_uneven_work_on_uneven_workers_ends_near_the_ideal(lengths: list[int], speeds: list[int]) -> None:
    work, rates = [float(length) for length in lengths], [float(speed) for speed in speeds]
    ideal_s = sum(work) / sum(rates)
    # One lease at the end may be alone: at worst the last one of the slowest.
    assert ideal_s <= simulated_s(work, rates) + 1e-9 <= ideal_s + max(work) / min(rates)
