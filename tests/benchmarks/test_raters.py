"""`python -m benchmarks.raters` on small sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import raters
from tunesmith.base.schema.records import Pair


@pytest.mark.nightly
def test_all_figures_are_there(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert raters.main(["--quick", "--json", "--quiet", "--seeds", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {name: one["accuracy"] >= one["crowd_kit_best"] for name, one in facts["crowds"].items()} == {
        "duck-identification": True,
        "jn-product": True,
    }
    assert list(facts["raters"]) == ["0%", "10%", "25%", "40%"]
    assert all(0 <= one["equal"] <= 1 and "within_interval" in one for one in facts["raters"].values())


def test_simulated_raters_vote_as_their_chances_say() -> None:
    crowd = raters.raters(0.4)
    kinds = [rater.reliability for rater in crowd]
    assert (kinds.count(0.5), kinds.count(0.85), len(kinds)) == (3, 12, 20)
    assert sum(kind == pytest.approx(0.15) for kind in kinds) == 2
    sentences = [(f"good {number}", f"poor {number}") for number in range(8000)]
    votes = raters.votes(sentences, crowd, 0)
    assert len(votes) == 12_000
    for place, rater in enumerate(crowd):
        own = [vote for vote in votes if vote.prompt.columns["rater"] == f"rater {place}"]
        for side, chance in (("left", rater.on_left), ("right", rater.on_right)):
            # The better answer was on this side where it was chosen there, or the other one on the other side.
            better = [vote for vote in own if (vote.prompt.columns["chosen_side"] == side) == is_right(vote)]
            assert sum(map(is_right, better)) / len(better) == pytest.approx(chance, abs=0.09)


def is_right(vote: Pair) -> bool:
    return str(vote.chosen).startswith("good")
