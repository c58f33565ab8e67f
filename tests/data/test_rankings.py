"""Rows of ranked completions: best first, by ranks or by scores, with ties."""

from pathlib import Path

import pytest
from formats import write_all

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Pair, Prompt, Ranking
from tunesmith.collect.data.pairs import load_preferences

ROW = {"prompt": "It was", "completions": [" fine", " dull", " bad"]}


def ranks_of(**columns: object) -> tuple[int, ...]:
    (ranking,) = load_preferences([{**ROW, **columns}])
    assert isinstance(ranking, Ranking)
    return ranking.ranks


def test_completions_stand_best_first_unless_numbers_say_otherwise():
    assert ranks_of() == (1, 2, 3)
    assert ranks_of(ranks=[3, 1, 1]) == (2, 1, 1)
    assert ranks_of(ranks=[10, 20, 15.5]) == (1, 3, 2)
    assert ranks_of(scores=[0.5, 9, 0.5]) == (2, 1, 2)
    assert ranks_of(scores=None) == (1, 2, 3)


def test_other_columns_are_kept_and_rows_of_pairs_may_stand_between():
    ranking, pair = load_preferences([{**ROW, "rater": "ann"}, {"prompt": "A", "chosen": "b", "rejected": "c"}])
    assert ranking == Ranking(Prompt("pairs[0]", "It was", {"rater": "ann"}), (" fine", " dull", " bad"), (1, 2, 3))
    assert isinstance(pair, Pair)


def test_as_pairs_every_two_completions_meet_once():
    (ranking,) = load_preferences([{**ROW, "ranks": [2, 1, 2]}])
    assert isinstance(ranking, Ranking)
    pairs = ranking.pairs()
    assert [(pair.chosen, pair.rejected, pair.tie) for pair in pairs] == [
        (" dull", " fine", False),
        (" dull", " bad", False),
        (" fine", " bad", True),
    ]


def test_conversations_are_ranked_too():
    prompt = [{"role": "user", "content": "Hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in "ab"]
    (ranking,) = load_preferences([{"prompt": prompt, "completions": answers}])
    assert isinstance(ranking, Ranking) and ranking.completions[1] == tuple(answers[1])


def test_rankings_are_read_from_every_format(tmp_path: Path):
    rows = [{**ROW, "scores": [1.0, 3.0, 2.0]}, {**ROW, "scores": [1.0, 1.0, 2.0]}]
    for path in write_all(tmp_path, rows):
        assert [item.ranks for item in load_preferences(path) if isinstance(item, Ranking)] == [(3, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ...}, "no column `prompt`"),
        ({"completions": "text"}, "`completions` is text; give a list of completions, best first"),
        ({"completions": ["a"]}, "`completions` has 1; a ranking needs two or more"),
        ({"completions": ["a", ""]}, r"`completions\[1\]` is empty"),
        ({"completions": ["a", "b", "a"]}, r"`completions\[0\]` and `completions\[2\]` are the same"),
        ({"completions": ["a", [{"role": "assistant", "content": "b"}]]}, r"`prompt` is text but `completions\[1\]`"),
        ({"ranks": [1, 2]}, "`ranks` has 2 numbers for 3 completions"),
        ({"ranks": [1, 2, "3"]}, "`ranks` holds text; give finite numbers"),
        ({"scores": [1, 2, float("nan")]}, "`scores` holds nan"),
        ({"scores": [1, 2, 10**400]}, "`scores` holds an integer of too many digits"),
        ({"scores": 3}, "`scores` is a number; give one number for each completion"),
        ({"scores": [1, 2, 3], "ranks": [1, 2, 3]}, "both `ranks` and `scores` are given; keep one"),
    ],
)
def test_a_bad_ranking_is_refused_with_its_reason(changes: dict[str, object], reason: str):
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not ...}
    with pytest.raises(DataError, match=rf"(?s)1 bad row of 2 .*pairs\[1\]: .*{reason}"):
        load_preferences([ROW, row])


def test_the_same_text_twice_may_share_a_place():
    assert ranks_of(completions=["a", "b", "a"], ranks=[1, 2, 1]) == (1, 2, 1)
