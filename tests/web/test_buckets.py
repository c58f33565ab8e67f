from tunesmith.collect.web import logins
from tunesmith.collect.web.logins import RateLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_burst_then_the_rate(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(logins, "time", clock)
    limit = RateLimits(rate_per_s=2, burst=3)
    assert [limit.take("a") for _ in range(4)] == [0, 0, 0, 1]
    assert limit.take("b") == 0
    clock.now += 0.5
    assert [limit.take("a") for _ in range(2)] == [0, 1]
    clock.now += 100
    assert [limit.take("a") for _ in range(4)] == [0, 0, 0, 1]


def test_looking_uses_nothing_up(monkeypatch):
    monkeypatch.setattr(logins, "time", Clock())
    limit = RateLimits(rate_per_s=0.1, burst=1)
    assert [limit.wait_s("a") for _ in range(3)] == [0, 0, 0]
    assert limit.take("a") == 0
    assert limit.wait_s("a") == 10


def test_the_number_of_buckets_is_bounded(monkeypatch):
    monkeypatch.setattr(logins, "MAX_KEYS", 10)
    limit = RateLimits(rate_per_s=0.001, burst=1)
    limit.take("first")
    for number in range(9):
        limit.take(str(number))
    assert limit.take("first") > 0
    for number in range(10, 20):
        limit.take(str(number))
    assert len(limit._buckets) == 10 and limit.take("first") == 0
