"""The benchmark of measuring has a figure for each side and each trainer."""

import json

import pytest

from benchmarks import overhead
from tunesmith.base.config.schema import SPECS


@pytest.mark.nightly
def test_a_smoke_run_measures_the_overhead_and_the_coverage_of_every_trainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "tiny:llama", "--threads", "1", "--rounds", "2", "--quick", "--json"]
    assert overhead.main(words) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["ratio_min"] <= facts["overhead"] + 1 <= facts["ratio_max"]
    assert set(facts["coverage"]) == set(SPECS)
    assert all(0 < share <= 1 for share in facts["coverage"].values())
    assert facts["step_s"] > 0
