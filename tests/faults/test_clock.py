"""A wall clock that jumps back changes nothing but the dates that are written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from jobs import TRAINERS, forked, outcome, the_run
from spoilt import rows_of, train_while_the_clock_runs_back


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_clock_that_runs_back_changes_no_figure_and_no_duration(
    trainer: str, tmp_path: Path, uninterrupted: Callable[[str], Mapping[str, object]]
) -> None:
    assert forked(train_while_the_clock_runs_back, trainer, tmp_path) == 0
    run_dir = the_run(tmp_path)
    assert outcome(run_dir) == uninterrupted(trainer)
    rows = rows_of(run_dir)
    durations = [value for row in rows for name, value in row.items() if name.startswith("time/")]
    assert durations
    assert min(durations) >= 0
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert json.loads((run_dir / "result.json").read_text())["minutes"] >= 0
