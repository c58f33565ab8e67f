"""Progress lines: rates count from where the work began."""

import pytest

from tunesmith.runs.progress import format_rate, progress


def test_a_resumed_run_counts_its_rate_from_where_it_went_on(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 10) as reporter:
        reporter.begin(9)
        reporter.update(10, {"reward": 0.5})
    line = capsys.readouterr().err
    assert line.startswith("train 10/10, 0 s")
    assert line.endswith("0 s left  reward 0.500\n")


def test_rates_read_well_when_they_are_small() -> None:
    assert format_rate(4, 2.0) == "2.0/s"
    assert format_rate(2, 4.0) == "2.0 s each"
    assert format_rate(0, 4.0) == ""
