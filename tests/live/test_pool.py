"""The order in which pairs of a pool are asked about: chance and choice side by side."""

import itertools
from dataclasses import replace

import pytest
import torch

from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.learn.live.pool import Waiting, asking_order
from tunesmith.learn.live.selection import Beliefs, HeadBeliefs, Preferences, choose_pairs

METHODS = ("infomax", "drts", "delta_ucb", "d_optimal")


def section(method: str, share: float = 0.2) -> LiveSelectionSection:
    return LiveSelectionSection.model_validate({"method": method, "random_share": share})


def pool(num: int, num_heldout: int = 0, seed: int = 0) -> list[Waiting]:
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(num)]
    return [Waiting(i + 1, f"p{i}", None if i < num_heldout else x_2F) for i, x_2F in enumerate(features)]


@pytest.fixture(params=["posterior", "heads"])
def beliefs(request: pytest.FixtureRequest) -> Beliefs:
    if request.param == "heads":
        return HeadBeliefs(5)
    difference_NF = torch.randn(40, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return Preferences(difference_NF, torch.zeros(40, dtype=torch.bool))


@pytest.mark.parametrize("method", METHODS)
def test_the_chosen_pairs_are_those_of_the_selection_and_random_ones_lie_evenly_among_them(
    method: str, beliefs: Beliefs
):
    waiting = pool(200)
    order = asking_order(waiting, beliefs, section(method), most=50, seed=1)
    assert len(order) == 50 == len({one.id for one in order})
    random_places = [place for place, one in enumerate(order) if one.reason == "random"]
    assert 5 <= len(random_places) <= 15
    gaps = [after - before for before, after in itertools.pairwise(random_places)]
    assert max(gaps) - min(gaps) <= 2
    chosen = [one for one in order if one.reason != "random"]
    assert all(one.reason.startswith(f"{method} ") for one in chosen)
    if method != "drts":  # whose draws differ from pool to pool
        whole = asking_order(waiting, beliefs, section(method), most=200, seed=1)
        by_chance = {one.id for one in whole if one.reason == "random"}
        rest = [one for one in waiting if one.id not in by_chance]
        groups = [one.features_2F for one in rest if one.features_2F is not None]
        found = choose_pairs(groups, [{(0, 1)}] * len(rest), beliefs, section(method), 0)
        assert [one.id for one in chosen] == [rest[one.prompt].id for one in found[: len(chosen)]]


def test_pairs_asked_at_random_are_the_same_whatever_was_chosen_before(beliefs: Beliefs):
    waiting = pool(200, num_heldout=20)

    def asked_at_random(method: str, num_each: int) -> list[int]:
        left, asked = list(waiting), list[int]()
        while left:
            order = asking_order(left, beliefs, section(method), most=num_each, seed=1)
            asked += [one.id for one in order if one.reason == "random"]
            gone = {one.id for one in order}
            left = [one for one in left if one.id not in gone]
        return asked

    found = [asked_at_random(method, num) for method, num in (("drts", 20), ("infomax", 50), ("d_optimal", 200))]
    assert found[0] == found[1] == found[2]
    assert set(range(1, 21)) <= set(found[0]) and 35 <= len(found[0]) <= 80


@pytest.mark.parametrize("method", METHODS)
def test_held_out_pairs_are_asked_at_random_in_their_share_of_the_pool(method: str, beliefs: Beliefs):
    order = asking_order(pool(200, num_heldout=100), beliefs, section(method, 0.0), most=40, seed=1)
    heldout = [one for one in order if one.id <= 100]
    assert len(heldout) == 20 and {one.reason for one in heldout} == {"random"}
    assert [one.id for one in heldout] != sorted(one.id for one in heldout)


@pytest.mark.parametrize("method", METHODS)
def test_which_answer_stands_first_changes_nothing(method: str, beliefs: Beliefs):
    waiting = pool(60)
    turned = [
        replace(one, features_2F=one.features_2F[[1, 0]]) if one.features_2F is not None and one.id % 2 else one
        for one in waiting
    ]
    orders = [asking_order(of, beliefs, section(method), most=60, seed=1) for of in (waiting, turned)]
    assert [one.id for one in orders[0]] == [one.id for one in orders[1]]


def test_random_is_an_order_by_chance_of_all():
    waiting = pool(30)
    order = asking_order(waiting, None, section("random"), most=100, seed=1)
    ids = [one.id for one in order]
    assert sorted(ids) == [one.id for one in waiting] != ids and {one.reason for one in order} == {"random"}
    assert ids[:10] == [one.id for one in asking_order(waiting, None, section("random"), most=10, seed=1)]
    assert ids != [one.id for one in asking_order(waiting, None, section("random"), most=100, seed=2)]


def test_the_pairs_of_a_prompt_are_all_random_or_all_chosen():
    waiting = [Waiting(one.id, one.id // 4, one.features_2F) for one in pool(120)]
    order = asking_order(waiting, HeadBeliefs(5), section("infomax", 0.4), most=120, seed=1)
    kinds: dict[int, set[bool]] = {}
    for one in order:
        kinds.setdefault(one.id // 4, set()).add(one.reason == "random")
    assert all(len(kind) == 1 for kind in kinds.values()) and {True} in kinds.values() and {False} in kinds.values()
