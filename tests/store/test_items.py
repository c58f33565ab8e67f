"""Items: what is refused, what is there already, and votes made elsewhere."""

from collections.abc import Callable

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.collect.store.records import Candidate, GivenVote, NewItem
from tunesmith.collect.store.votes import VoteStore

Pairs = Callable[..., list[NewItem]]
MakeCampaign = Callable[..., int]
MakeRater = Callable[[str], int]


def test_a_given_item_is_added_once_whatever_the_order_of_its_answers(
    store: VoteStore, campaign: MakeCampaign, pairs: Pairs
):
    asked = campaign()
    first = store.add_items(asked, pairs(3))
    turned = [NewItem(item.prompt, item.candidates[::-1]) for item in pairs(4)]
    again = store.add_items(asked, turned)
    assert again[:3] == first
    assert store.import_items(asked, pairs(5)).num_new == 1


@pytest.mark.parametrize(
    ("item", "part"),
    [
        (NewItem("p", (Candidate("a"),)), "1 answers"),
        (NewItem("p", (Candidate("a"), Candidate("a"))), "same answer twice"),
        (NewItem("p", tuple(Candidate(str(i)) for i in range(3))), "a pair has two"),
        (NewItem("p", tuple(Candidate(str(i)) for i in range(11)), kind="ranking"), "2 to 10"),
        (NewItem("p", (Candidate("a"), Candidate("b")), gold=2), "gold"),
    ],
)
def test_an_item_that_cannot_be_judged_is_refused_and_nothing_is_added(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs, item: NewItem, part: str
):
    asked = campaign()
    with pytest.raises(DataError, match=part):
        store.add_items(asked, [*pairs(1), item])
    assert store.next_presentations(rater("ann"), asked, 5) == []


def test_tokens_log_probs_and_versions_reach_the_trainer(store: VoteStore, campaign: MakeCampaign, rater: MakeRater):
    asked, ann = campaign(), rater("ann")
    prompt = ({"role": "user", "content": "Hi"},)
    answers = (Candidate("a", (1, 2), (-0.5, -1.25), 3, "policy-3"), Candidate("b", (4,), (-2.0,), 3, "policy-3"))
    store.add_items(asked, [NewItem(prompt, answers, heldout=True)])
    (shown,) = store.next_presentations(ann, asked, 1, now=0.0)
    store.vote(shown.token, ann, "left", now=1.0)
    (vote,) = store.reader.votes_after(0)
    assert {vote.chosen, vote.rejected} == set(answers)
    assert (vote.prompt, vote.heldout) == (prompt, True)
    (row,) = store.reader.export()
    assert row.chosen == ({"role": "assistant", "content": vote.chosen.text},)
    assert (row.chosen_version, row.rejected_version) == (3, 3)


def test_votes_made_elsewhere_count_once_and_close_their_items(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign()
    (item,) = pairs(1)
    store.add_items(asked, [NewItem(item.prompt, item.candidates[::-1])])
    given = [
        GivenVote(item, "much_better", 1, "ann", created_at=5.0, dwell_ms=9, reason="r"),
        GivenVote(item, "tie", 0, "bob"),
    ]
    assert store.import_votes(asked, given).num_new == 2
    assert store.import_votes(asked, given).num_there == 2
    rows = list(store.reader.export())
    assert [(row.rater, row.verdict, row.margin) for row in rows] == [("ann", "much_better", 2.0), ("bob", "tie", 0.0)]
    assert (rows[0].chosen, rows[0].rejected) == ("poor 0!", "good 0")
    assert (rows[0].created_at, rows[0].dwell_ms, rows[0].reason) == (5.0, 9, "r")
    assert store.next_presentations(rater("eve"), asked, 1) == []
