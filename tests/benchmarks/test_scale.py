"""The benchmarks of rollout workers and of resharding: figures for JSON, from real processes."""

import json

import pytest

from benchmarks import reshard, scale


@pytest.mark.slow  # four trainings in processes of their own
def test_a_smoke_run_gives_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--quiet", "--json", "--rounds", "1", "--model", "tiny:llama", "--uneven-model", "tiny:llama"]
    words += ["--step-model", "tiny:llama"]
    assert scale.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rollout"]["ratio_2"] > 0 and facts["step"]["ratio_2"] > 0 and facts["critic"]["update_ratio"] > 0
    assert facts["uneven"]["queue_share"] > 0 and facts["uneven"]["static_share"] > 0
    assert facts["rollout"]["load"] and facts["commit"]


@pytest.mark.nightly
def test_runs_that_draw_ahead_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--part", "staleness", "--quick", "--quiet", "--json", "--rounds", "1", "--model", "tiny:llama"]
    words += ["--steps", "2"]
    assert scale.main(words) == 0
    facts = json.loads(capsys.readouterr().out)["staleness"]
    assert set(facts["by_staleness"]) == {"0", "1", "4"} and facts["by_staleness"]["0"]["step_ratio"] == 1
    for row in facts["by_staleness"].values():
        assert row["accuracy_after"] == [0.0] and row["time/step_s"] > row["rollout/wait_s"] >= 0


@pytest.mark.nightly
def test_moves_of_weights_between_stages_and_slices_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert reshard.main(["--quick", "--quiet", "--json", "--rounds", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["allowed_share"] > 1.3 and one["seconds"] > 0 for one in facts["moves"]] == [True, True]
    assert all(facts["engine"][name]["moves_s"] > 0 for name in ("kept", "unloaded"))
