import pytest

from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.vote_watch import MINUTES, Contest, VoteWatch
from tunesmith.collect.store.votes import VoteStore

NOW = 1_800_000_000.0


@pytest.fixture
def votes(place):
    with VoteStore.open(place, seed=1) as store:
        yield store


@pytest.fixture
def watch(place):
    found = VoteWatch(place)
    yield found
    found.close()


@pytest.fixture
def ask(votes):
    """A function: makes a pair of these two versions, has it voted on, and returns the token of the presentation."""
    campaign = votes.set_campaign(CampaignSettings(undo_s=1e9, gold_share=0.5), now=NOW - 9_000)
    rater = votes.add_rater("anna", "rater").rater
    number = iter(range(1_000))

    def vote(versions, winner, now=NOW, prompt=None, verdict=None, gold=None, sources=("", "")):
        place = next(number)
        answers = tuple(
            Candidate(f"{place} by {side}", weight_version=version, source_id=source)
            for side, (version, source) in enumerate(zip(versions, sources, strict=True))
        )
        votes.add_items(campaign.id, [NewItem(prompt or f"prompt {place}", answers, gold=gold)])
        (shown,) = votes.next_presentations(rater.id, campaign.id, 1, now)
        said = verdict or ("left" if shown.answers[0].endswith(f"by {winner}") else "right")
        votes.vote(shown.token, rater.id, said, "", 500, f"key {place}", now)
        return shown, rater.id

    return vote


def test_a_file_that_is_not_there_has_no_votes(watch):
    assert watch.per_minute(NOW) == [0] * MINUTES
    assert watch.contests() == (0, [])
    assert watch.total == 0


def test_votes_are_counted_in_the_minute_they_came(ask, watch):
    for ago_s in (7_200, 3_590, 130, 125, 61, 5):
        ask((1, 1), 0, now=NOW - ago_s)
    counts = watch.per_minute(NOW)
    assert {minute - MINUTES + 1: count for minute, count in enumerate(counts) if count} == {-59: 1, -2: 2, -1: 1, 0: 1}
    assert watch.total == 6


def test_later_votes_are_added_and_old_ones_leave(ask, watch):
    ask((1, 1), 0, now=NOW)
    assert watch.per_minute(NOW)[-1] == 1
    ask((1, 1), 0, now=NOW + 61)
    assert watch.per_minute(NOW + 61)[-2:] == [1, 1]
    assert sum(watch.per_minute(NOW + 3_610)) == 1
    assert sum(watch.per_minute(NOW + 7_200)) == 0
    assert watch.total == 2


def test_a_changed_vote_counts_once(ask, votes, watch):
    shown, rater_id = ask((1, 1), 0)
    watch.per_minute(NOW)
    votes.vote(shown.token, rater_id, "tie", "", 900, "again", NOW + 1)
    assert watch.per_minute(NOW + 1)[-1] == 1
    assert watch.total == 1


def test_skips_are_no_votes_and_rankings_are(ask, votes, watch):
    ask((1, 1), 0, verdict="skip")
    campaign = votes.set_campaign(CampaignSettings(name="orders", kind="ranking"), now=NOW)
    rater = votes.add_rater("bert", "rater").rater
    answers = tuple(Candidate(f"answer {number}") for number in range(3))
    votes.add_items(campaign.id, [NewItem("prompt", answers, kind="ranking")])
    (shown,) = votes.next_presentations(rater.id, campaign.id, 1, NOW)
    votes.rank(shown.token, rater.id, [1, 2, 3], now=NOW)
    assert watch.per_minute(NOW)[-1] == 1
    assert watch.total == 1


def test_a_contest_says_who_won_whatever_the_side(ask, watch):
    for _ in range(6):
        ask((0, 3), 1)
        ask((0, 3), 0)
    _, contests = watch.contests()
    assert [(one.first, one.second, one.score) for one in contests] == [("v0", "v3", 0.0), ("v0", "v3", 1.0)] * 6


def test_ties_and_two_bad_answers_are_half_a_win_and_skips_are_nothing(ask, watch):
    ask((0, 3), 0, verdict="tie")
    ask((0, 3), 0, verdict="both_bad")
    ask((0, 3), 0, verdict="skip")
    _, contests = watch.contests()
    assert [one.score for one in contests] == [0.5, 0.5]


def test_votes_within_a_version_are_left_out(ask, watch):
    ask((2, 2), 0)
    ask((None, 2), 0)
    assert watch.contests()[1] == []


def test_votes_on_gold_items_are_left_out(ask, votes, watch):
    ask((0, 1), 0)
    (campaign,) = votes.reader.campaigns()
    (rater,) = votes.reader.raters()
    pair = (Candidate("good", source_id="v0"), Candidate("bad", source_id="v1"))
    others = [NewItem(f"other {number}", (Candidate("one"), Candidate("two"))) for number in range(9)]
    # Gold items are mixed in among others.
    votes.add_items(campaign.id, [NewItem("gold", pair, gold=0), *others])
    shown = votes.next_presentations(rater.id, campaign.id, 10, NOW)
    assert "gold" in [one.prompt for one in shown]
    for one in shown:
        votes.vote(one.token, rater.id, "left", now=NOW)
    assert len(watch.contests()[1]) == 1


def test_the_trainers_names_of_sources_say_which_versions_met(ask, watch):
    ask((7, 7), 1, sources=("v0", "v7"))
    ask((7, 7), 1, sources=("v7", "v7"))
    ask((7, 7), 1, sources=("a file", "another"))
    ask((None, 7), 0, sources=("model a run", "v7"))
    found = [(one.first, one.second, one.score) for one in watch.contests()[1]]
    assert found == [("v0", "v7", 0.0), ("a run", "v7", 1.0)]


def test_votes_on_one_prompt_share_its_id(ask, watch):
    for prompt in ("one", "one", "two"):
        ask((0, 1), 1, prompt=prompt)
    ids = [one.prompt_id for one in watch.contests()[1]]
    assert ids[0] == ids[1] != ids[2]


def test_a_changed_vote_replaces_its_contest_and_an_undone_one_goes(ask, votes, watch):
    shown, rater_id = ask((0, 1), 1)
    before, (contest,) = watch.contests()
    assert contest.score == 0.0
    other = "left" if shown.answers[0].endswith("by 0") else "right"
    votes.vote(shown.token, rater_id, other, "", 900, "again", NOW + 1)
    changed, contests = watch.contests()
    assert changed > before
    assert contests == [Contest("v0", "v1", 1.0, contest.prompt_id)]
    votes.withdraw(shown.token, rater_id, NOW + 2)
    assert watch.contests()[1] == []
