"""`benchmarks.pessimism`: votes, a reward model with heads, and trainings by its mean and by less."""

import json

import pytest

from benchmarks.pessimism import main


@pytest.mark.nightly
def test_it_trains_by_the_mean_and_by_less_and_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--quick", "--seeds", "2", "--steps", "3", "--votes", "16", "--heads", "3", "--pessimism", "worst")
    assert main([*words, "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["pessimism"]) == ["0", "worst"]
    assert facts["pessimism"]["0"]["gain"] == 0
    for training in facts["trainings"]:
        assert [len(training[kind]["points"]) for kind in ("0", "worst")] == [3, 3]
        assert all(point["spread"] > 0 for point in training["worst"]["points"])
        own = [training[kind]["points"][0]["proxy"] for kind in ("0", "worst")]
        assert own[0] == own[1], "the first step is drawn from the same policy"
