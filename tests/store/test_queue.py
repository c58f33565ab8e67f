"""The queue: who is shown what, for how long, and how often."""

from collections import Counter
from collections.abc import Callable

import pytest

from tunesmith.base.core.errors import StoreError
from tunesmith.collect.store.records import Candidate, NewItem, NewOffer, Offer
from tunesmith.collect.store.votes import VoteStore

Pairs = Callable[..., list[NewItem]]
MakeCampaign = Callable[..., int]
MakeRater = Callable[[str], int]


def offer(number: int, version: int = 1, retires_before: int = 0) -> Offer:
    made = NewOffer(version, f"asked {number}", (Candidate(f"a {number}"), Candidate(f"b {number}")))
    return Offer(version, made.prompt, made.candidates, id=number, created_at=0.0, retires_before=retires_before)


def test_a_rater_who_asks_again_gets_the_same_presentations_in_the_same_order(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(), rater("ann")
    store.add_items(asked, pairs(5))
    first = store.next_presentations(ann, asked, 2, now=1.0)
    again = store.next_presentations(ann, asked, 2, now=2.0)
    assert [one.token for one in first] == [one.token for one in again]
    assert [one.answers for one in first] == [one.answers for one in again]
    assert again[0].lease_until > first[0].lease_until


def test_a_presentation_says_nothing_about_where_its_answers_come_from(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater
):
    asked = campaign()
    store.ingest(asked, [offer(1)], now=0.0)
    (shown,) = store.next_presentations(rater("ann"), asked, 1, now=1.0)
    assert set(shown.answers) == {"a 1", "b 1"}
    assert not {"candidates", "weight_version", "source_id", "item_id"} & set(shown.__slots__)


def test_the_sides_are_drawn_anew_for_each_rater_and_item(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign(overlap=2)
    store.add_items(asked, pairs(20))
    sides: Counter[bool] = Counter()
    differ = 0
    shown = [store.next_presentations(rater(name), asked, 20, now=1.0) for name in ("ann", "bob")]
    for of_ann, of_bob in zip(*shown, strict=True):
        assert of_ann.prompt == of_bob.prompt
        sides[of_ann.answers[0].startswith("good")] += 1
        differ += of_ann.answers != of_bob.answers
    assert 4 <= sides[True] <= 16
    assert 4 <= differ <= 16


def test_no_item_has_more_raters_than_its_overlap(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign(overlap=2)
    store.add_items(asked, pairs(1))
    got = [len(store.next_presentations(rater(name), asked, 1, now=1.0)) for name in ("ann", "bob", "eve")]
    assert got == [1, 1, 0]


def test_an_expired_lease_goes_to_the_next_rater_and_its_holder_gets_another_item(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann, bob = campaign(lease_s=10.0), rater("ann"), rater("bob")
    store.add_items(asked, pairs(2))
    (of_ann,) = store.next_presentations(ann, asked, 1, now=0.0)
    (of_bob,) = store.next_presentations(bob, asked, 1, now=11.0)
    assert of_bob.prompt == of_ann.prompt
    (other,) = store.next_presentations(ann, asked, 1, now=12.0)
    assert other.prompt != of_ann.prompt


def test_an_expired_lease_that_nobody_took_stays_with_its_holder(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(lease_s=10.0), rater("ann")
    store.add_items(asked, pairs(1))
    (first,) = store.next_presentations(ann, asked, 1, now=0.0)
    (again,) = store.next_presentations(ann, asked, 1, now=100.0)
    assert again.token == first.token
    assert store.vote(again.token, ann, "left", now=101.0).revision == 1


def test_a_rater_gets_an_item_back_that_the_next_one_skipped(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann, bob = campaign(lease_s=10.0), rater("ann"), rater("bob")
    store.add_items(asked, pairs(1))
    (first,) = store.next_presentations(ann, asked, 1, now=0.0)
    (of_bob,) = store.next_presentations(bob, asked, 1, now=20.0)
    assert store.next_presentations(ann, asked, 1, now=21.0) == []
    store.vote(of_bob.token, bob, "skip", now=22.0)
    (again,) = store.next_presentations(ann, asked, 1, now=23.0)
    assert (again.token, again.answers) == (first.token, first.answers)


def test_a_skipped_item_does_not_come_back_but_is_still_asked_of_others(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(), rater("ann")
    store.add_items(asked, pairs(1))
    (shown,) = store.next_presentations(ann, asked, 1, now=0.0)
    store.vote(shown.token, ann, "skip", now=1.0)
    assert store.next_presentations(ann, asked, 1, now=2.0) == []
    assert len(store.next_presentations(rater("bob"), asked, 1, now=3.0)) == 1


def test_a_limit_counts_votes_and_what_is_held(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(max_votes_per_rater=3), rater("ann")
    store.add_items(asked, pairs(9))
    assert len(store.next_presentations(ann, asked, 9, now=0.0)) == 3
    for _ in range(3):
        (shown, *_) = store.next_presentations(ann, asked, 1, now=1.0)
        store.vote(shown.token, ann, "tie", now=1.0)
    assert store.next_presentations(ann, asked, 1, now=2.0) == []
    assert store.reader.progress(ann, asked).num_left == 0


def test_gold_items_are_mixed_in_at_about_their_share_and_look_like_others(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(gold_share=0.3), rater("ann")
    store.add_items(asked, pairs(100))
    gold = [NewItem(item.prompt, item.candidates, gold=0) for item in pairs(100, first=1000)]
    store.add_items(asked, gold)
    num_gold = 0
    for _ in range(100):
        (shown,) = store.next_presentations(ann, asked, 1, now=1.0)
        num_gold += int(str(shown.prompt).split()[1]) >= 1000
        store.vote(shown.token, ann, "left", now=1.0)
    assert 15 <= num_gold <= 45


def test_gold_items_go_to_every_rater_and_never_alone(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign(gold_share=0.5)
    store.add_items(asked, [NewItem(item.prompt, item.candidates, gold=1) for item in pairs(3)])
    assert store.next_presentations(rater("ann"), asked, 3, now=0.0) == []
    store.add_items(asked, pairs(20, first=100))
    golds = [
        sum(int(str(one.prompt).split()[1]) < 100 for one in store.next_presentations(rater(name), asked, 6, now=1.0))
        for name in ("bob", "eve", "joe")
    ]
    assert sum(golds) >= 4


def test_fresh_offers_come_before_older_ones_and_before_given_items(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign()
    store.add_items(asked, pairs(1))
    assert store.ingest(asked, [offer(1), offer(2)], now=0.0) == 2
    shown = store.next_presentations(rater("ann"), asked, 3, now=1.0)
    assert [one.prompt for one in shown] == ["asked 2", "asked 1", "prompt 0"]


def test_offers_are_ingested_once_and_stale_ones_are_retired(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater
):
    asked = campaign()
    assert store.ingest(asked, [offer(1), offer(2)], now=0.0) == 2
    assert store.ingest(asked, [offer(1), offer(2)], now=0.0) == 0
    assert store.reader.last_offer_id(asked) == 2
    assert store.ingest(asked, [offer(3, version=2, retires_before=3)], now=1.0) == 1
    shown = store.next_presentations(rater("ann"), asked, 5, now=2.0)
    assert [one.prompt for one in shown] == ["asked 3"]


def test_what_a_rater_holds_can_be_voted_on_after_it_was_retired(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater
):
    asked, ann = campaign(), rater("ann")
    store.ingest(asked, [offer(1)], now=0.0)
    (shown,) = store.next_presentations(ann, asked, 1, now=1.0)
    store.ingest(asked, [offer(2, retires_before=2)], now=2.0)
    assert store.vote(shown.token, ann, "left", now=3.0).revision == 1


def test_a_closed_campaign_asks_for_nothing(store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs):
    asked = campaign()
    store.add_items(asked, pairs(1))
    store.close_campaign(asked, now=1.0)
    assert store.next_presentations(rater("ann"), asked, 1, now=2.0) == []


def test_a_larger_overlap_opens_items_again(store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs):
    asked, ann, bob = campaign(), rater("ann"), rater("bob")
    store.add_items(asked, pairs(1))
    (shown,) = store.next_presentations(ann, asked, 1, now=0.0)
    store.vote(shown.token, ann, "left", now=0.0)
    assert store.next_presentations(bob, asked, 1, now=1.0) == []
    assert campaign(overlap=2) == asked
    assert len(store.next_presentations(bob, asked, 1, now=1.0)) == 1


def test_progress_counts_down(store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs):
    asked, ann = campaign(), rater("ann")
    store.add_items(asked, pairs(3))
    (shown,) = store.next_presentations(ann, asked, 1, now=0.0)
    before = store.reader.progress(ann, asked)
    store.vote(shown.token, ann, "left", now=1.0)
    after = store.reader.progress(ann, asked)
    assert (before.num_votes, before.num_left, before.num_items_done) == (0, 3, 0)
    assert (after.num_votes, after.num_left, after.num_items_done, after.num_items) == (1, 2, 1, 3)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"overlap": 0}, "overlap"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"undo_s": float("nan")}, "undo_s"),
        ({"gold_share": 0.9}, "gold_share"),
        ({"kind": "poem"}, "kind"),
        ({"max_votes_per_rater": -1}, "max_votes_per_rater"),
    ],
)
def test_settings_out_of_range_are_refused(campaign: MakeCampaign, settings: dict[str, object], part: str):
    with pytest.raises(StoreError, match=part):
        campaign(**settings)
