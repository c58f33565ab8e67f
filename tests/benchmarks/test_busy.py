"""The benchmark of a busy machine has the share of each side."""

import json

import pytest

from benchmarks import busy

pytest.importorskip("trl")


@pytest.mark.nightly
def test_a_smoke_run_measures_every_side_alone_and_beside_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny:llama", "--threads", "1", "--rounds", "1", "--quick", "--spin", "100", "--json"]
    assert busy.main(words) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(facts["sides"]) == {"ours", "before", "spin 100", "trl"}
    assert all(
        facts[stage]["share"] > 0 and facts[stage]["quiet_median"] > 0 for stage in ("rollout", "update", "step")
    )
    assert facts["sides"]["trl"]["step"]["share"] > 0
