"""The order in which given items are asked, and the reason that stays with each."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tunesmith.base.core.errors import StoreError
from tunesmith.collect.store.asking import AskedItem
from tunesmith.collect.store.inbox import Chore
from tunesmith.collect.store.records import Candidate, NewItem, Offer
from tunesmith.collect.store.votes import VoteStore

Pairs = Callable[..., list[NewItem]]
MakeCampaign = Callable[..., int]
MakeRater = Callable[[str], int]


def prompts_shown(store: VoteStore, rater: int, asked: int, count: int) -> list[object]:
    return [one.prompt for one in store.next_presentations(rater, asked, count, now=1.0)]


def test_raters_are_asked_in_the_order_that_was_set_and_others_come_last(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign()
    ids = store.add_items(asked, pairs(6))
    order = [AskedItem(ids[4], "drts 1.5"), AskedItem(ids[2], "random")]
    assert store.select(asked, "drts", order) == {"num_placed": 2, "num_gone": 0}
    store.add_items(asked, pairs(1, first=6))
    offer = Offer(
        1, "offered", (Candidate("a"), Candidate("b")), id=9, created_at=0.0, retires_before=0, selection="infomax 0.2"
    )
    store.ingest(asked, [offer], now=0.0)
    ann = rater("ann")
    shown = prompts_shown(store, ann, asked, 8)
    assert shown == ["offered", "prompt 4", "prompt 2", "prompt 0", "prompt 1", "prompt 3", "prompt 5", "prompt 6"]
    for one in store.next_presentations(ann, asked, 8, now=1.0):
        store.vote(one.token, ann, "left", now=1.0)
    reasons = {str(row.prompt): row.selection for row in store.reader.export()}
    assert reasons == {
        "offered": "infomax 0.2",
        "prompt 4": "drts 1.5",
        "prompt 2": "random",
        **{f"prompt {number}": "" for number in (0, 1, 3, 5, 6)},
    }
    assert {vote.selection for vote in store.reader.votes_after(0)} == set(reasons.values())
    (entry,) = [one for one in store.reader.audit() if one.kind == "pairs selected"]
    assert entry.detail == {"campaign": "default", "selection": "drts", "num_placed": 2}


def test_another_order_replaces_the_one_before_but_not_the_reason_of_what_was_shown(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann, bob = campaign(overlap=2), rater("ann"), rater("bob")
    ids = store.add_items(asked, pairs(5))
    store.select(asked, "infomax", [AskedItem(ids[3], "infomax 0.4"), AskedItem(ids[1], "infomax 0.3")])
    (first,) = store.next_presentations(ann, asked, 1, now=1.0)
    assert first.prompt == "prompt 3"
    store.vote(first.token, ann, "left", now=1.0)
    again = [AskedItem(ids[3], "d_optimal 9"), AskedItem(ids[0], "d_optimal 2"), AskedItem(ids[4], "x" * 80)]
    assert store.select(asked, "d_optimal", again) == {"num_placed": 2, "num_gone": 1}
    # What was begun is finished first.
    shown = store.next_presentations(bob, asked, 5, now=2.0)
    assert [one.prompt for one in shown] == ["prompt 3", "prompt 0", "prompt 4", "prompt 1", "prompt 2"]
    for one in shown:
        store.vote(one.token, bob, "left", now=2.0)
    reasons = {(row.rater, str(row.prompt)): row.selection for row in store.reader.export()}
    assert reasons["ann", "prompt 3"] == reasons["bob", "prompt 3"] == "infomax 0.4"
    assert [reasons["bob", f"prompt {number}"] for number in (0, 1, 2, 4)] == ["d_optimal 2", "", "", "x" * 64]


def test_only_given_items_that_nobody_was_shown_wait_and_can_be_placed(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, other, ann = campaign(), campaign(name="other"), rater("ann")
    elsewhere = store.add_items(other, pairs(1, first=50))
    shown, gold, heldout, free = pairs(4)
    store.add_items(asked, [shown])
    store.next_presentations(ann, asked, 1, now=1.0)
    ranking = NewItem("ranked", tuple(Candidate(text) for text in "abc"), kind="ranking")
    ids = store.add_items(asked, [shown, replace(gold, gold=0), replace(heldout, heldout=True), free, ranking])
    offer = Offer(1, "offered", (Candidate("a"), Candidate("b")), id=9, created_at=0.0, retires_before=0)
    store.ingest(asked, [offer], now=0.0)
    store.judge("judge j", [])  # a machine, whose votes show nothing to people
    waiting = list(store.reader.waiting_items(asked))
    assert [(one.prompt, one.kind, one.heldout) for one in waiting] == [
        ("prompt 2", "pair", True),
        ("prompt 3", "pair", False),
        ("ranked", "ranking", False),
    ]
    assert [one.id for one in waiting] == ids[2:] and waiting[1].answers == ("good 3", "poor 3!")
    order = [{"item_id": item_id, "reason": "random"} for item_id in (*ids, *elsewhere, 999)]
    done = store.do(Chore("select", {"campaign_id": asked, "method": "random", "order": order}))
    assert done == {"num_placed": 3, "num_gone": 4}
    with pytest.raises(StoreError, match="no campaign 77"):
        store.select(77, "random", [])
