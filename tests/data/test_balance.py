"""Weights by which the longer answer wins as often as it loses."""

import logging
import random
from itertools import pairwise

import pytest

from tunesmith.collect.data.balance import balanced
from tunesmith.collect.data.collate import EncodedPreference


def pair(name: str, better: int, worse: int, *, tie: bool = False) -> EncodedPreference:
    return EncodedPreference(name, ((7,) * better, (8,) * worse), (1, 1 if tie else 2))


def source_of(item: EncodedPreference) -> str:
    return item.prompt_id.partition("/")[0]


def longer(item: EncodedPreference) -> int:
    return len(item.sequences[0]) - len(item.sequences[1])


def test_length_says_nothing_of_any_source_or_bin_and_the_mean_weight_is_1() -> None:
    draw = random.Random(0)
    pairs = [pair(f"hh/{i}", 40 + draw.choice((1, 1, 1, -1)) * draw.randint(1, 30), 40) for i in range(400)]
    pairs += [pair(f"rmb/{i}", 40 + draw.choice((1, -1, -1)) * draw.randint(1, 30), 40) for i in range(200)]
    pairs += [pair("hh/equal", 40, 40), pair("hh/tie", 60, 40, tie=True)]
    found = balanced(pairs, source_of)
    assert [one.sequences for one in found] == [one.sequences for one in pairs]
    assert [one.weight for one in found[-2:]] == [1.0, 1.0]
    assert sum(one.weight for one in found) == pytest.approx(len(pairs))
    for name in ("hh", "rmb"):
        own = [one for one in found if source_of(one) == name and longer(one) and not one.is_tie]
        own.sort(key=lambda one: abs(longer(one)))
        edges = [len(own) * number // 4 for number in range(5)]
        for start, end in pairwise(edges):
            sides = [sum(one.weight for one in own[start:end] if (longer(one) > 0) == won) for won in (True, False)]
            # Pairs of equal differences may lie on both sides of an edge.
            assert sides[0] == pytest.approx(sides[1], rel=0.25)
        sides = [sum(one.weight for one in own if (longer(one) > 0) == won) for won in (True, False)]
        assert sides[0] == pytest.approx(sides[1])


def test_earlier_weights_are_kept_and_a_source_of_one_kind_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    one_kind = [pair(f"a/{i}", 9, 5) for i in range(30)]
    with caplog.at_level(logging.WARNING, "tunesmith"):
        assert balanced(one_kind, source_of) == one_kind
    assert "a: too few pairs" in caplog.text
    mixed = [pair(f"b/{i}", 9 if i % 3 else 3, 5) for i in range(30)]
    plain = balanced(mixed, source_of)
    assert {one.weight for one in plain} == {0.75, 1.5}
    double = balanced([EncodedPreference(p.prompt_id, p.sequences, p.ranks, weight=2.0) for p in mixed], source_of)
    assert [one.weight for one in double] == [2 * one.weight for one in plain]


def test_answers_of_one_length_are_said_to_need_no_balance(caplog: pytest.LogCaptureFixture) -> None:
    pairs = [pair(f"{i}", 4 + i, 4 + i) for i in range(30)]
    assert balanced(pairs, lambda _: "") == pairs
    assert "equally long, so that nothing is to be balanced" in caplog.text
