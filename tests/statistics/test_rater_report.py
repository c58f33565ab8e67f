"""What the votes of a store say of its raters, in figures and in words."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunesmith.collect.statistics.bradley_terry import leaderboard
from tunesmith.collect.statistics.rater_report import MIN_KNOWN, crowd_report, known_weights
from tunesmith.collect.statistics.rater_words import notes, own_words
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.store.votes import VoteStore

NAMES = ("ann", "bob", "eve", "mix")
"""The last one has the answers mixed up, and eve takes the left one."""


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VoteStore]:
    """Four raters on 60 pairs of v0 and v1, of which v1 is mostly the better one, and 8 gold items."""
    dice = random.Random(0)
    with VoteStore.open(tmp_path_factory.mktemp("votes") / "votes.db", seed=1) as store:
        asked = store.set_campaign(CampaignSettings(overlap=4, gold_share=0.2), now=0.0).id
        pairs = [
            NewItem(f"prompt {n}", (Candidate(f"good {n}", source_id="v1"), Candidate(f"poor {n}", source_id="v0")))
            for n in range(60)
        ]
        store.add_items(asked, pairs)
        gold = [NewItem(f"gold {n}", (Candidate(f"poor {n}"), Candidate(f"good {n}")), gold=1) for n in range(8)]
        store.add_items(asked, gold)
        for name in NAMES:
            rater = store.add_rater(name, now=0.0).rater.id
            while shown := store.next_presentations(rater, asked, 10, now=1.0):
                for one in shown:
                    better = "left" if one.answers[0].startswith("good") else "right"
                    other = "right" if better == "left" else "left"
                    verdict = "left" if name == "eve" else other if (name == "mix") != (dice.random() < 0.1) else better
                    store.vote(one.token, rater, verdict, dwell_ms=dice.randrange(2000, 30_000), now=1.0)
        yield store


def test_rows_have_what_estimates_need_and_no_texts(voted: VoteStore) -> None:
    rows = voted.reader.judged_pairs()
    assert len(rows) == 4 * 68
    assert [row.vote_id for row in rows] == sorted(row.vote_id for row in rows)
    ranked = [row for row in rows if row.gold_is_first is None]
    assert {row.sources for row in ranked} == {("v1", "v0")}
    assert {row.gold_is_first for row in rows if row not in ranked} == {False}
    ann, _, eve, mix = (one.id for one in voted.reader.raters())
    assert sum(bool(row.prefers_first) for row in ranked if row.rater_id == ann) > 45
    assert sum(bool(row.prefers_first) for row in ranked if row.rater_id == mix) < 15
    assert {row.side for row in rows if row.rater_id == eve} == {1}
    assert min(row.num_characters for row in rows) == len("good 0poor 0")


def test_raters_are_told_apart_and_what_votes_are_worth_is_counted(voted: VoteStore) -> None:
    report = crowd_report(voted.reader.judged_pairs())
    ann, bob, eve, mix = report.raters.values()
    assert all(one.is_known and one.num_votes == 68 and one.num_gold == 8 for one in report.raters.values())
    assert mix.reliability.high < 0.5 < ann.reliability.low
    assert bob.reliability.value > 0.75
    assert eve.left_share.low > 0.85
    assert [one.name for one in eve.habits] == ["one_side"]
    assert report.num_votes == 4 * 68
    assert report.effective is not None
    assert 0.3 * report.num_votes < report.effective < 0.8 * report.num_votes
    assert eve.effective < 0.1 * ann.effective


def test_a_leaderboard_by_weighed_votes_is_clearer(voted: VoteStore) -> None:
    report = crowd_report(voted.reader.judged_pairs())
    with VoteWatch(voted.reader.place) as watch:
        contests = watch.contests()[1]
    plain, weighed = leaderboard(contests), leaderboard(contests, known_weights(report))
    assert [one.weighed for one in plain] == [None, None]
    assert [one.name for one in weighed] == ["v1", "v0"]
    assert (plain[0].win_rate, plain[0].low) == (weighed[0].win_rate, weighed[0].low)
    assert plain[0].win_rate is not None
    assert weighed[0].weighed is not None
    assert weighed[0].weighed > plain[0].win_rate + 0.1
    assert weighed[1].weighed == 0.5


def test_words_are_exact_and_name_nobody_else(voted: VoteStore) -> None:
    report = crowd_report(voted.reader.judged_pairs())
    ann, _, eve, mix = report.raters.values()
    said = {name: " ".join(own_words(one)) for name, one in (("ann", ann), ("eve", eve), ("mix", mix))}
    right = ann.reliability
    assert "You have preferred an answer in 68 votes. 68 of them can be compared" in said["ann"]
    assert f"in about {100 * right.value:.0f} % ({100 * right.low:.0f} to {100 * right.high:.0f} %)" in said["ann"]
    assert "no sign of a favourite side" in said["ann"]
    assert "the left answer in 68 of 68 votes. Sides are drawn by chance, so please look at both" in said["eve"]
    assert "you mostly say the opposite of the others" in said["mix"]
    assert not any(re.search(rf"\b{name}\b", text) for name in NAMES for text in said.values())
    assert notes(ann) == []
    assert notes(mix) == ["contradicts the others: votes count the other way where they are weighed"]
    assert own_words(None) == own_words(None)
    assert "not preferred an answer" in own_words(None)[0]


def test_without_comparisons_nothing_is_claimed(tmp_path: Path) -> None:
    with VoteStore.open(tmp_path / "votes.db", seed=1) as store:
        asked = store.set_campaign(CampaignSettings(), now=0.0).id
        store.add_items(asked, [NewItem(f"p {n}", (Candidate("a"), Candidate("b"))) for n in range(30)])
        rater = store.add_rater("ann", now=0.0).rater.id
        while shown := store.next_presentations(rater, asked, 10, now=1.0):
            for number, one in enumerate(shown):
                store.vote(one.token, rater, "tie" if number == 0 else "left", dwell_ms=9_000, now=1.0)
        report = crowd_report(store.reader.judged_pairs())
    (ann,) = report.raters.values()
    assert ann.num_compared == 0 < MIN_KNOWN
    assert report.effective is None
    assert known_weights(report) == {}
    assert (ann.figures()["reliability"], ann.figures()["effective"]) == (None, None)
    assert "too few to say how often you agree" in " ".join(own_words(ann))
    assert crowd_report([]).raters == {}
