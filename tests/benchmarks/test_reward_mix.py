"""`python -m benchmarks.reward_mix` on small sizes, and the files that it makes."""

import json
from pathlib import Path

import pytest

from benchmarks import reward_mix
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import load_preferences


@pytest.mark.nightly
def test_every_ingredient_has_its_row(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reward_mix.main(["--quick", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["rows"]) == list(reward_mix.ROWS)
    for row, found in facts["rows"].items():
        others = [name for name in reward_mix.SOURCES if name != "hh"]
        assert list(found["left_out"]) == (others if row == reward_mix.ONE else ["rmb"]), row
        assert found["left_out"]["rmb"]["num_pairs"] == facts["num_pairs"]["rmb"]
        assert list(found["held_out"]) == (["hh"] if row == reward_mix.ONE else list(reward_mix.SOURCES))


def test_only_pairs_to_train_on_are_flipped_and_held_out_ones_are_the_same(tmp_path: Path) -> None:
    pairs = [Pair(Prompt(f"{i}", f"question {i // 2}"), f"good {i}", f"poor {i}") for i in range(400)]
    files = [reward_mix.written("a", pairs, tmp_path, 0, flips=flips) for flips in (False, True)]
    plain, flipped = (load_preferences(file) for file in files)
    marks = [row.prompt.columns["heldout"] for row in plain]
    assert marks == [row.prompt.columns["heldout"] for row in flipped]
    wrong = [str(row.chosen).startswith("poor") for row in flipped if isinstance(row, Pair)]
    assert not any(held and one for held, one in zip(marks, wrong, strict=True))
    assert 0.2 < sum(wrong) / (400 - sum(marks)) < 0.4
    assert 0.05 < sum(marks) / 400 < 0.3
    assert marks[::2] == marks[1::2], "both pairs of a prompt are on one side"


def test_headlines_are_pairs_of_two_edits(data_dir: Path) -> None:
    pairs = reward_mix.headlines(data_dir / "preference" / "humicroedit.dev.csv.gz")
    assert len(pairs) > 1500
    assert pairs[0].chosen == '" Nutella brownies " erupt in France over discounted chocolate spread'
    assert not any("<" in str(side) for pair in pairs for side in (pair.chosen, pair.rejected))
