"""The verdict on a reward model: the worst that its figures say, from enough pairs."""

import numpy as np
import pytest

from tunesmith.learn.evaluation.reward_quality import DecidedPair, RewardQuality, quality
from tunesmith.learn.evaluation.reward_verdict import verdict

GOOD = {"eval/accuracy": 0.7, "eval/num_pairs": 100.0, "eval/longer_wins": 0.6, "eval/std_reward": 0.5}


def name_of(row: dict[str, float]) -> str:
    found = verdict(row, 10)
    return "none" if found is None else found.name


@pytest.mark.parametrize(
    ("share", "num_pairs", "name"),
    [
        (0.43, 100, "chance"),
        (0.54, 100, "chance"),
        (0.56, 100, ""),
        (0.52, 2500, ""),
        (0.0, 19, "none"),
        (0.5, 20, "chance"),
    ],
)
def test_chance_is_a_standard_error_around_a_half_of_enough_pairs(share: float, num_pairs: int, name: str) -> None:
    row = {**GOOD, "eval/accuracy": share, "eval/num_pairs": float(num_pairs), "eval/longer_wins": 0.4}
    assert name_of(row) == name


@pytest.mark.parametrize(
    ("deviation", "num_pairs", "name"), [(0.001, 100, "hardly_learnt"), (0.1, 100, ""), (0.001, 19, "none")]
)
def test_rewards_that_are_all_alike_are_those_of_a_model_that_has_hardly_learnt(
    deviation: float, num_pairs: int, name: str
) -> None:
    assert name_of({**GOOD, "eval/std_reward": deviation, "eval/num_pairs": float(num_pairs)}) == name


def test_a_model_that_is_right_on_fewer_than_the_longer_answer_is_told_on_which_pairs() -> None:
    good, few = {"accuracy": 0.7, "longer_wins": 0.6}, {"accuracy": 0.5, "longer_wins": 0.6, "num_pairs": 12.0}
    bad = {"accuracy": 0.55, "longer_wins": 0.58, "num_pairs": 40.0}
    row = {**GOOD, **{f"eval/own/{key}": value for key, value in {**good, "num_pairs": 60.0}.items()}}
    row |= {f"eval/few/{key}": value for key, value in few.items()}
    assert name_of(row) == ""
    found = verdict({**row, **{f"eval/other/{key}": value for key, value in bad.items()}}, 10)
    assert found is not None
    assert found.name == "length"
    assert found.text == 'worse than "longer wins" on other'
    assert "(other: 55% against 58%)" in found.warning
    of_all = verdict({**GOOD, "eval/longer_wins": 0.72}, 10)
    assert of_all is not None
    assert "all held-out pairs: 70% against 72%" in of_all.warning
    assert name_of({**GOOD, "eval/longer_wins": 0.7}) == "", "where length is what people prefer, both are right"


def judged(num_right: int, num_of_words: int) -> RewardQuality:
    """The quality on 100 pairs of a model, and of TF-IDF, that are right on so many, the first ones."""
    pairs = [DecidedPair(str(i), (1, 2), (1, 3)) for i in range(100)]
    place_N = np.arange(100)
    own_N, of_words_N = (np.where(place_N < num, 1.0, -1.0) for num in (num_right, num_of_words))
    return quality(own_N, pairs, of_words_N, num_tfidf_pairs=50)


@pytest.mark.parametrize(("num_right", "num_of_words", "name"), [(70, 80, "words"), (70, 72, ""), (70, 60, "")])
def test_a_model_that_single_words_beat_by_more_than_chance_is_told(
    num_right: int, num_of_words: int, name: str
) -> None:
    found = verdict(GOOD, 10, judged(num_right, num_of_words))
    assert found is not None
    assert found.name == name
    if not name:
        than = "about as many as" if num_of_words > num_right else "more than"
        assert found.text == f'right on 70% of 100 held-out pairs, {than} "longer wins" and TF-IDF'
