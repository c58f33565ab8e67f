"""`benchmarks.first_word` with a tiny model, in a real browser and a real terminal."""

import json

import pytest

from benchmarks.first_word import main


@pytest.mark.nightly
@pytest.mark.browser
def test_a_first_word_comes_in_the_arena_and_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--rounds", "2", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 < facts["arena"]["first_word_s"] <= facts["arena"]["other_word_s"]
    assert facts["arena"]["loading"]["first_word_s"] > 0
    assert {weights for weights, one in facts["chat"].items() if one["first_word_s"] > 0} == {"model", "int8"}
