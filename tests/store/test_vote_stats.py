"""Statistics of a database."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.collect.store.records import Candidate, NewItem, Verdict
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

Pairs = Callable[..., list[NewItem]]
MakeCampaign = Callable[..., int]
MakeRater = Callable[[str], int]


def judge(store: VoteStore, asked: int, rater: int, choose: Callable[[tuple[str, ...]], Verdict]) -> None:
    """Let a rater judge everything there is for them."""
    while shown := store.next_presentations(rater, asked, 20, now=1.0):
        for one in shown:
            store.vote(one.token, rater, choose(one.answers), dwell_ms=1000, now=1.0)


def good(answers: tuple[str, ...]) -> Verdict:
    return "left" if answers[0].startswith("good") else "right"


def test_statistics_tell_raters_apart(store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs):
    asked = campaign(overlap=3, gold_share=0.5)
    store.add_items(asked, pairs(40))
    store.add_items(asked, [NewItem(one.prompt, one.candidates, gold=0) for one in pairs(20, first=500)])
    judge(store, asked, rater("ann"), good)
    judge(store, asked, rater("bob"), good)
    judge(store, asked, rater("left"), lambda _: "left_much")
    found = store.reader.stats(asked, now=2.0)
    ann, bob, left = found.raters
    assert (found.num_items, found.num_items_done) == (40, 40)
    assert ann.gold_accuracy == bob.gold_accuracy == 1.0
    assert left.gold_accuracy is not None
    assert left.gold_accuracy < 0.9
    assert left.left.p_value is not None
    assert left.left.p_value < 1e-6
    assert ann.left.p_value is not None
    assert ann.left.p_value > 0.001
    # The poor answers have one character more.
    assert ann.longer.share == 0.0
    kappas = {(pair.a, pair.b): pair.kappa.value for pair in found.kappas}
    assert kappas["ann", "left"] is not None
    assert kappas["ann", "left"] < 0.6
    assert found.alpha.value is not None
    assert 0 < found.alpha.value < 1
    assert (ann.median_dwell_ms, found.num_votes_last_hour) == (1000, found.num_votes)
    assert found.num_votes == sum(one.num_votes for one in found.raters)


def test_chosen_pairs_and_random_ones_have_figures_of_their_own(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked = campaign(overlap=2)
    store.add_items(asked, pairs(4))
    assert store.reader.stats(asked).asked == []
    store.add_items(asked, [replace(one, selection="random") for one in pairs(6, first=100)])
    store.add_items(asked, [replace(one, selection="drts 0.31") for one in pairs(10, first=200)])
    chosen = {one.prompt for one in pairs(10, first=200)}
    for name in ("ann", "bob"):
        reader = rater(name)
        while shown := store.next_presentations(reader, asked, 20):
            for one in shown:
                side, other = ("left", "right") if good(one.answers) == "left" else ("right", "left")
                # On what was chosen the two never agree.
                store.vote(one.token, reader, other if name == "bob" and one.prompt in chosen else side)
    found = store.reader.stats(asked)
    assert [(one.method, one.num_votes, one.longer.num) for one in found.asked] == [
        ("drts", 20, 20),
        ("random", 12, 12),
        ("", 8, 8),
    ]
    chosen_by_drts, by_chance, _ = found.asked
    assert (by_chance.longer.share, by_chance.alpha.value) == (0.0, 1.0)
    assert chosen_by_drts.longer.share == 0.5
    assert chosen_by_drts.alpha.value is not None
    assert chosen_by_drts.alpha.value < 0
    assert found.longer.num == sum(one.longer.num for one in found.asked)


def test_ties_skips_and_bad_ones_are_counted_apart(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs
):
    asked, ann = campaign(), rater("ann")
    store.add_items(asked, pairs(4))
    verdicts: list[Verdict] = ["tie", "both_bad", "skip", "left"]
    for one, verdict in zip(store.next_presentations(ann, asked, 4, now=1.0), verdicts, strict=True):
        store.vote(one.token, ann, verdict, now=1.0)
    found = store.reader.stats(now=9000.0)
    assert (found.num_votes, found.num_ties, found.num_both_bad, found.num_skips) == (3, 1, 1, 1)
    assert found.left.num == 1
    assert found.num_votes_last_hour == 0
    assert found.alpha.value is None


def test_gold_rankings_count_for_accuracy(store: VoteStore, campaign: MakeCampaign, rater: MakeRater):
    asked, ann = campaign(kind="ranking", gold_share=0.5), rater("ann")
    texts = ("best", "mid", "low")
    answers = tuple(map(Candidate, texts))
    store.add_items(asked, [NewItem(f"p{i}", answers, kind="ranking") for i in range(20)])
    store.add_items(asked, [NewItem(f"gold{i}", answers, kind="ranking", gold=0) for i in range(20)])
    for one in store.next_presentations(ann, asked, 20, now=1.0):
        store.rank(one.token, ann, [texts.index(text) + 1 for text in one.answers], now=1.0)
    found = store.reader.stats(asked, now=2.0)
    assert found.num_rankings == 20
    assert found.raters[0].num_gold >= 3
    assert found.raters[0].gold_accuracy == 1.0


def test_an_empty_or_missing_database_has_statistics_without_numbers(store: VoteStore, tmp_path: Path):
    assert store.reader.stats().alpha.reason == "no item was judged by two raters"
    with VoteReader.open(tmp_path / "none.db") as reader:
        assert reader.stats().left.share is None


@pytest.mark.parametrize("count", [2])
def test_two_campaigns_are_counted_apart(
    store: VoteStore, campaign: MakeCampaign, rater: MakeRater, pairs: Pairs, count: int
):
    ann = rater("ann")
    for number in range(count):
        asked = campaign(name=f"c{number}")
        store.add_items(asked, pairs(number + 1))
        judge(store, asked, ann, good)
    assert [store.reader.stats(one.id).num_votes for one in store.reader.campaigns()] == [1, 2]
    assert store.reader.stats().num_votes == 3
