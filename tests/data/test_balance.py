"""Weights by which the longer answer wins as often as it loses."""

import logging
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tunesmith.collect.data.balance import balanced, beside_length
from tunesmith.collect.data.collate import EncodedPreference
from tunesmith.learn.evaluation.tfidf import fit_logistic


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


def test_margins_are_what_logistic_regression_on_the_ratio_of_lengths_says_of_each_source() -> None:
    draw = random.Random(1)
    pairs = [pair(f"hh/{i}", draw.randint(2, 60) + 10 * (i % 2), draw.randint(2, 60)) for i in range(300)]
    pairs += [pair(f"rmb/{i}", draw.randint(2, 40), draw.randint(2, 60)) for i in range(200)]
    pairs = [replace(one, weight=draw.choice((0.5, 1.0, 2.0))) for one in pairs]
    pairs += [pair("hh/tie", 60, 4, tie=True)]
    found = beside_length(pairs, source_of)
    assert [replace(one, margin=None) for one in found] == pairs
    for name, sign in (("hh", 1), ("rmb", -1)):
        own = [one for one in found if source_of(one) == name and not one.is_tie]
        lengths = [one.answer_lengths for one in own]
        lengths = [one.answer_lengths for one in own]
        ratio_N = torch.tensor([math.log(better / worse) for better, worse in lengths]).double()
        weight_N = torch.tensor([one.weight for one in own]).double()
        slope = fit_logistic(ratio_N[:, None], torch.ones(len(own)).double(), weight_N=weight_N)[0]
        assert slope * sign > 0
        assert [one.margin for one in own] == pytest.approx((-slope * ratio_N).tolist(), abs=1e-6)
    assert found[-1].margin == 0


def test_one_sided_lengths_have_a_slope_and_own_margins_are_added() -> None:
    pairs = [replace(pair(f"{i}", 200 + i, 3), margin=0.5) for i in range(50)]
    alone, added = (beside_length(pairs, lambda _: "", keeps_margins=keeps) for keeps in (False, True))
    assert all(-20 < one.margin < -5 for one in alone if one.margin is not None)
    assert [b.margin - a.margin for a, b in zip(alone, added, strict=True)] == pytest.approx([0.5] * 50)  # type: ignore[operator]
