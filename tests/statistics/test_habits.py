"""Patterns of votes that hardly come from reading, and that people's votes do not show them."""

import random

import pytest

from tunesmith.collect.statistics.habits import Look, habits


def person(seed: int, num: int = 200) -> list[Look]:
    """Somebody who reads: sides by chance, times by length with a spread."""
    dice = random.Random(seed)
    found: list[Look] = []
    for _ in range(num):
        length = dice.randrange(100, 2000)
        found.append(Look(dice.choice((-1, 1)), 1000 * (2 + length / 40) * dice.lognormvariate(0, 0.4), length))
    return found


def names(looks: list[Look]) -> list[str]:
    return [one.name for one in habits(looks)]


def test_people_show_no_habit() -> None:
    assert [names(person(seed)) for seed in range(50)] == [[]] * 50


def test_one_side_with_its_figures() -> None:
    looks = [Look(1 if number % 10 else -1, None, 100) for number in range(50)]
    (found,) = habits(looks)
    assert (found.name, found.figures) == ("one_side", "the left answer in 45 of 50 votes")
    assert habits([Look(-1, None, 100)] * 30)[0].figures == "the right answer in 30 of 30 votes"


def test_less_time_than_reading_takes() -> None:
    looks = [Look(one.side, 900.0 + 50 * place % 700, 1500) for place, one in enumerate(person(1, 40))]
    assert names(looks) == ["too_fast"]
    assert habits(looks)[0].figures == "less time than reading takes in 40 of 40 votes"


def test_the_same_time_for_all() -> None:
    looks = [Look(one.side, 30_000.0 + place, one.num_characters) for place, one in enumerate(person(2, 40))]
    assert names(looks) == ["even_pace"]
    assert "30.0 s, for all 40 votes" in habits(looks)[0].figures


@pytest.mark.parametrize(("sides", "words"), [([1, -1] * 20, "changed 39 times"), ([1] * 20 + [-1] * 20, "stayed")])
def test_sides_in_a_regular_order(sides: list[int], words: str) -> None:
    (found,) = habits([Look(side, None, 100) for side in sides])
    assert found.name == "regular_sides"
    assert words in found.figures


def test_few_votes_and_unknown_sides_and_times_show_nothing() -> None:
    assert habits([Look(1, 1.0, 1000)] * 19) == ()
    assert habits([Look(0, None, 1000)] * 500) == ()
