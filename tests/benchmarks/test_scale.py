"""The benchmark of rollout workers: figures for JSON, from real processes."""

import json

import pytest

from benchmarks import scale


def test_a_smoke_run_gives_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--quiet", "--json", "--rounds", "1", "--model", "tiny:llama", "--uneven-model", "tiny:llama"]
    assert scale.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rollout"]["ratio_2"] > 0
    assert facts["uneven"]["queue_share"] > 0 and facts["uneven"]["static_share"] > 0
    assert facts["rollout"]["load"] and facts["commit"]
