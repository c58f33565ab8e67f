"""`benchmarks.reasons`: votes with reasons against votes without."""

import json

import pytest

from benchmarks.reasons import ARMS, Reasons, main


def test_a_reason_names_what_the_lexicon_saw() -> None:
    reasons = Reasons()
    texts = (" a wonderful film, great and great.", " a dull mess.")
    assert reasons.of(*texts, is_right=True) == "I like: great, wonderful. I do not like: dull, mess."
    assert reasons.of(*reversed(texts), is_right=False) == "I like: dull, mess. I do not like: great, wonderful."
    assert reasons.of(" a film", " the film", is_right=True) == ""


@pytest.mark.nightly
def test_a_quick_run_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--seeds", "1", "--pairs", "40", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(facts["arms"]) == set(ARMS)
    for one in facts["arms"].values():
        assert 0 <= one["low"] <= one["win_rate"] <= one["high"] <= 1 and len(one["of_seeds"]) == 1
