"""`python -m benchmarks.int8_base` on small sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import int8_base


@pytest.mark.nightly
def test_all_figures_are_there(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--json", "--quiet", "--rounds", "1", "--steps", "2", "--dtype", "float32"]
    assert int8_base.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 < facts["base"]["kl_per_token"] < 0.1
    assert facts["base"]["perplexity_ratio"] == pytest.approx(1, abs=0.02)
    for algorithm in ("grpo", "ppo"):
        of_base = facts["trainings"][algorithm]
        assert all(of_base[base]["logp_diff_max"] == [0.0] for base in int8_base.BASES)
        assert of_base["peak_ratio_median"] > 0
