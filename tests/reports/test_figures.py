import json
import math
import subprocess
import sys

import pytest

from tunesmith.observe.reports.chart import DARK, LIGHT, dark_of_light
from tunesmith.observe.reports.comparison_figures import dumbbell, histogram
from tunesmith.observe.reports.figures import (
    bucket_means,
    curves,
    downsample,
    evenly,
    line_chart,
    numeric_keys,
    series,
    stage_chart,
)
from tunesmith.observe.reports.views import run_tiles


def contrast(first, second):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("name", ["ink", "muted", "before", "after", "good", "bad"])
def test_text_colours_have_the_contrast_that_wcag_asks_for(palette, name):
    assert min(contrast(palette[name], palette[ground]) for ground in ("paper", "card")) >= 4.5


def test_each_light_colour_has_one_dark_one():
    assert LIGHT.keys() == DARK.keys() and len(dark_of_light()) == len(LIGHT)


def test_every_chart_of_a_run_is_strict_json_with_words_and_numbers(synthetic):
    drawn = curves(synthetic.ppo_metrics(), prefix="ppo-")
    assert [chart.id for chart in drawn.main] == [
        f"ppo-{name}" for name in ("reward", "kl", "entropy", "lengths", "losses")
    ]
    assert {chart.id for chart in drawn.more} >= {"ppo-clipping", "ppo-gradient", "ppo-rate", "ppo-speed", "ppo-memory"}
    for chart in drawn.all:
        json.dumps(chart.figure, allow_nan=False)
        assert chart.description and chart.rows and len(chart.columns) == len(chart.rows[0])


def test_figures_are_valid_for_plotly(synthetic):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    compared = synthetic.comparison()
    charts = [*curves(synthetic.ppo_metrics(500)).all, *curves(synthetic.reward_metrics()).all]
    charts += [dumbbell("d", "d", compared["rows"]), histogram("h", "h", [0.1], [0.5])]
    for chart in charts:
        graph_objects.Figure(chart.figure)


def test_ten_thousand_steps_draw_at_most_a_thousand_points_a_line(synthetic):
    for chart in curves(synthetic.ppo_metrics(10_000)).all:
        assert max(len(trace["y"]) for trace in chart.figure["data"]) <= 1_000


def test_not_finite_values_are_left_out_and_reported():
    chart = line_chart("kl", "KL", [{"step": 1, "kl": 1.0}, {"step": 2, "kl": math.nan}], {"kl": "kl"})
    assert chart.figure["data"][0]["y"] == [1.0, None]
    assert chart.note.startswith("1 values were not finite")


def test_nothing_to_draw_is_no_chart():
    assert line_chart("kl", "KL", [{"kl": math.nan}], {"kl": "kl"}) is None
    assert stage_chart("t", [{"step": 1}]) is None
    assert histogram("h", "h", [None], []) is None
    assert dumbbell("d", "d", [{"prompt": "x", "mean_before": None, "mean_after": 1.0}]) is None
    assert curves([]).all == ()


def test_stages_leave_out_nested_spans_and_the_total(synthetic):
    chart = stage_chart("t", synthetic.ppo_metrics())
    assert {row[0] for row in chart.rows} == {"rollout", "score", "reference", "update", "other"}
    assert chart.figure["data"][0]["type"] == "scatter"
    assert stage_chart("t", synthetic.ppo_metrics(10)).figure["data"][0]["type"] == "bar"


def test_waiting_for_tools_is_a_stage_beside_drawing():
    rows = [{"step": 1, "time/rollout_s": 5.0, "time/rollout/reply_s": 3.0}, {"step": 2, "time/rollout_s": 5.0}]
    chart = stage_chart("t", rows)
    assert {row[0]: row[2] for row in chart.rows} == {"rollout": "7.0", "waiting for tools": "3.0"}


def test_many_stages_are_merged_in_the_picture_and_kept_in_the_table():
    rows = [{"step": step, **{f"time/stage{k}_s": float(k + 1) for k in range(12)}} for step in range(3)]
    chart = stage_chart("t", rows)
    assert len(chart.figure["data"]) == 8 and len(chart.rows) == 12
    assert sum(trace["y"][0] for trace in chart.figure["data"]) == sum(range(1, 13))


def test_histogram_counts_every_finite_score_once():
    chart = histogram("h", "Scores", [-1.0, 0.0, 1.0, math.nan], [0.99, 1.0])
    assert sum(int(row[2]) for row in chart.rows) == 3 and sum(int(row[3]) for row in chart.rows) == 2
    assert sum(int(row[3]) for row in histogram("h", "h", [], [2.0, 2.0]).rows) == 2


def test_labels_hold_no_markup(synthetic):
    chart = dumbbell("d", "d", [{"prompt": synthetic.HOSTILE, "mean_before": 0.0, "mean_after": 1.0}])
    assert "<" not in chart.figure["layout"]["annotations"][0]["text"]
    assert chart.rows[0][0] == synthetic.HOSTILE


def test_metrics_with_the_same_last_name_keep_their_whole_name():
    chart = curves([{"step": 1, "loss": 1.0, "eval/loss": 2.0, "loss/value": 3.0}]).main[0]
    assert chart.columns == ("step", "loss", "eval/loss", "value")


def test_reports_load_nothing_heavy():
    heavy = ("torch", "numpy", "plotly", "transformers")
    code = f"import sys, tunesmith.observe.reports.html; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_accuracies_before_and_after_stand_in_one_tile_each():
    result = {"accuracy_before": 0.29, "accuracy_after": 0.78, "greedy_before": 0.44, "greedy_after": 0.81}
    tiles = {tile.name: tile.value for tile in run_tiles([{"reward": 0.2}, {"reward": 0.7}], result)}
    assert tiles["Right answers, sampled"] == "29\u202f% → 78\u202f%"
    assert tiles["Right answers, greedy"] == "44\u202f% → 81\u202f%"


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
