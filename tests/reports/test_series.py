import math

from tunesmith.reports.series import bucket_means, downsample, evenly, number, numeric_keys, series


def test_only_finite_numbers_count_as_numbers():
    assert [number(value) for value in (1, 2.5, True, None, "3", math.nan, math.inf)] == [1.0, 2.5] + [None] * 5


def test_a_metric_that_few_rows_record_keeps_its_own_steps():
    rows = [{"step": step, "reward": 0.1} | ({"eval/reward": step} if step % 10 == 0 else {}) for step in range(1, 31)]
    assert series(rows, "eval/reward").steps == (10.0, 20.0, 30.0)


def test_not_finite_values_are_gaps_and_counted():
    line = series([{"step": 1, "kl": 0.5}, {"step": 2, "kl": math.nan}, {"step": 3, "kl": None}], "kl")
    assert line.values == (0.5, None, None) and line.num_dropped == 2


def test_rows_without_a_step_are_numbered():
    assert series([{"a": 1.0}, {"a": 2.0}], "a").steps == (1.0, 2.0)


def test_ten_thousand_points_become_at_most_a_thousand_and_no_spike_is_lost():
    rows = [{"step": step, "loss": math.sin(step)} for step in range(1, 10_001)]
    rows[7_777]["loss"], rows[1_234]["loss"] = 50.0, -50.0
    thin = downsample(series(rows, "loss"))
    assert len(thin.values) <= 1_000
    assert (thin.steps[0], thin.steps[-1]) == (1.0, 10_000.0)
    assert max(thin.values) == 50.0 and min(thin.values) == -50.0
    assert list(thin.steps) == sorted(set(thin.steps))


def test_a_stretch_without_finite_values_stays_a_gap():
    rows = [{"step": step, "x": math.nan if 4_000 < step < 6_000 else 1.0} for step in range(1, 10_001)]
    thin = downsample(series(rows, "x"))
    assert all(value is None for step, value in zip(thin.steps, thin.values, strict=True) if 4_100 < step < 5_900)


def test_bucket_means_keep_the_mean():
    line = series([{"step": step, "x": float(step)} for step in range(1, 1_001)], "x")
    means = bucket_means(line, 100)
    assert len(means.values) == 100 and sum(means.values) / 100 == 500.5


def test_evenly_keeps_the_ends_and_numeric_keys_keep_the_order():
    assert evenly(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert evenly([1, 2], 5) == [1, 2]
    assert numeric_keys([{"step": 1, "b": 1, "a": None, "t": "x"}, {"a": 2, "flag": True}]) == ["b", "a"]
