"""The benchmark of the planner runs what it measures, and the published rows are within their bounds."""

import json

import pytest

from benchmarks.plan import main, published
from tunesmith.planning.calibration import PUBLISHED


def test_published_rows_are_predicted_from_another_row():
    rows = published()
    assert {row["nodes"]: row["published_s"] for row in rows} == PUBLISHED
    assert all(0 < abs(row["predicted_s"] / row["published_s"] - 1) < 0.1 for row in rows)


@pytest.mark.slow
def test_local_steps_are_measured_and_predicted(capsys: pytest.CaptureFixture[str]):
    assert main(["--quick", "--json", "--quiet"]) == 0
    first, second = json.loads(capsys.readouterr().out)["local"]
    assert first["predicted_s"] == pytest.approx(first["measured_s"])
    assert (first["ranks"], second["ranks"]) == (1, 2)
    assert second["measured_s"] > 0 < second["predicted_s"]
