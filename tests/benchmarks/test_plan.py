"""The benchmark of the planner runs what it measures, and the published rows are within their bounds."""

import json

import pytest

from benchmarks.plan import main, published, queue_ratios
from tunesmith.observe.planning.calibration import PUBLISHED


def test_published_rows_are_predicted_from_another_row():
    rows = published()
    assert {row["nodes"]: row["published_s"] for row in rows} == PUBLISHED
    assert all(0 < abs(row["predicted_s"] / row["published_s"] - 1) < 0.1 for row in rows)


def test_our_queue_keeps_engines_busy_if_it_knows_the_lengths():
    ratios = queue_ratios()
    assert ratios["rollout_known"]["2"] >= 1.85 and ratios["rollout_known"]["4"] >= 3.5
    assert all(ratios["rollout_known"][n] > ratios["rollout_unknown"][n] for n in ("2", "4"))


@pytest.mark.slow
def test_local_steps_are_measured_and_predicted(capsys: pytest.CaptureFixture[str]):
    assert main(["--quick", "--json", "--quiet"]) == 0
    first, second = json.loads(capsys.readouterr().out)["local"]
    assert (first["ranks"], second["ranks"]) == (1, 2)
    assert min(first["measured_s"], first["predicted_s"], second["measured_s"], second["predicted_s"]) > 0
