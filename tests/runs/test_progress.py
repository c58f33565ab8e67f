"""Progress lines: rates count from where the work began."""

from types import SimpleNamespace

import pytest

from tunesmith.base.core.trace import count, span, trace, went_on
from tunesmith.base.runs.progress import Pace, format_rate, progress


def test_a_resumed_run_counts_its_rate_from_where_it_went_on(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 10) as reporter:
        reporter.begin(9)
        reporter.update(10, {"reward": 0.5})
    line = capsys.readouterr().err
    assert line.startswith("train 10/10, 0 s")
    assert line.endswith("  reward 0.500\n") and "left" not in line, "one step says nothing about the others"


def test_the_stage_of_an_item_that_takes_long_is_shown_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("tunesmith.base.runs.progress.time", SimpleNamespace(monotonic=lambda: now_s))
    with progress("train", 10) as reporter, trace():
        now_s = 20.0
        reporter.update(9)
        with span("evaluate"):
            for _ in range(179):
                now_s += 1
                went_on()
        with progress("silent", 10, enabled=False), span("judge"):
            now_s = 202.0
            count("computed_tokens", 1)
        now_s = 400.0
        went_on()  # between stages there is nothing to show
    stages = [line for line in capsys.readouterr().err.splitlines() if "9/10, 20 s" not in line]
    assert stages == [
        "train 9/10, 80 s, evaluate for 60 s",
        "train 9/10, 140 s, evaluate for 120 s",
        "train 9/10, 202 s, judge for 3 s",
    ]


def test_what_is_left_is_shown_after_two_steps_and_the_first_is_not_counted() -> None:
    pace = Pace(start_s=0.0)
    assert pace.remaining(12) == ""
    pace.note(1, 100.0)
    assert pace.remaining(12) == ""
    pace.note(2, 104.0)
    assert pace.remaining(12) == "40 s left"
    pace.note(3, 110.0)
    assert pace.remaining(12) == "45 s left"


def test_a_machine_that_stood_still_once_is_expected_to_go_on_as_before() -> None:
    pace = Pace(4, start_s=0.0)
    for step, now_s in enumerate((1.0, 3.0, 5.0, 605.0, 607.0), start=5):
        pace.note(step, now_s)
    assert pace.item_s() == (2 + 2 + 6 + 2) / 4


def test_completions_that_end_together_are_one_interval_of_many_items() -> None:
    pace = Pace(start_s=0.0)
    for done, now_s in ((128, 30.0), (256, 35.0), (384, 40.0)):
        pace.note(done, now_s)
    assert pace.remaining(512) == "5 s left"


def test_rates_read_well_when_they_are_small() -> None:
    assert format_rate(4, 2.0) == "2.0/s"
    assert format_rate(2, 4.0) == "2.0 s each"
    assert format_rate(0, 4.0) == ""
