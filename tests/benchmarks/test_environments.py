"""`benchmarks.environments`: both ways draw the same, nothing is computed twice, and log-probs are the trainer's."""

import json

import pytest

from benchmarks.environments import main


@pytest.mark.nightly
def test_a_smoke_run_has_the_figures_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny:llama", "--dtype", "float32", "--quick", "--no-step", "--rounds", "1", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["recomputed_tokens"] <= 0
    assert found["exactness"]["largest_difference"] == 0
    assert 0 < found["engine"]["lockstep_busy_share"] < 1
    assert found["engine"]["seconds"].keys() == {"ours", "rounds"}
