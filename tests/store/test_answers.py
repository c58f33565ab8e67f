"""Votes, undo, rankings and written answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError, UnknownPresentationError, VoteConflictError, VoteError
from tunesmith.collect.store.records import VERDICTS, Candidate, NewItem, Presentation, Verdict
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

Pairs = Callable[..., list[NewItem]]
MakeCampaign = Callable[..., int]
MakeRater = Callable[[str], int]


@pytest.fixture
def asked(store: VoteStore, campaign: MakeCampaign, pairs: Pairs) -> int:
    made = campaign(lease_s=100.0, undo_s=50.0)
    store.add_items(made, pairs(5))
    return made


@pytest.fixture
def ann(rater: MakeRater) -> int:
    return rater("ann")


@pytest.fixture
def shown(store: VoteStore, asked: int, ann: int) -> Presentation:
    return store.next_presentations(ann, asked, 1, now=0.0)[0]


@pytest.fixture
def reader(path: Path) -> Iterator[VoteReader]:
    with VoteReader.open(path) as reader:
        yield reader


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_by_side_becomes_the_answer_that_stood_there(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader, verdict: Verdict
):
    store.vote(shown.token, ann, verdict, reason="so", dwell_ms=1200, now=1.0)
    votes = reader.votes_after(0)
    if verdict == "skip":
        assert votes == []
        return
    (vote,) = votes
    left, right = shown.answers
    expected = (right, left) if verdict.startswith("right") else (left, right)
    assert (vote.chosen.text, vote.rejected.text) == expected
    assert vote.margin == {"left": 1, "right": 1, "left_much": 2, "right_much": 2}.get(verdict, 0)
    assert (vote.verdict, vote.prompt, vote.rater, vote.reason) == (verdict, shown.prompt, "ann", "so")
    assert (vote.dwell_ms, vote.created_at) == (1200, 1.0)


def test_the_same_vote_twice_is_one_vote_with_one_receipt(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader
):
    first = store.vote(shown.token, ann, "left", request_key="k1", now=1.0)
    by_key = store.vote(shown.token, ann, "left", request_key="k1", now=2.0)
    by_content = store.vote(shown.token, ann, "left", request_key="k2", now=3.0)
    assert [one.is_repeat for one in (first, by_key, by_content)] == [False, True, True]
    assert {(one.id, one.revision, one.created_at) for one in (first, by_key, by_content)} == {(first.id, 1, 1.0)}
    assert len(reader.votes_after(0)) == 1


def test_a_late_retry_of_a_vote_that_was_undone_does_not_bring_it_back(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader
):
    store.vote(shown.token, ann, "left", request_key="k1", now=1.0)
    store.withdraw(shown.token, ann, now=2.0)
    assert store.vote(shown.token, ann, "left", request_key="k1", now=3.0).is_repeat
    assert [vote.verdict for vote in reader.votes_after(0)] == ["withdrawn"]


def test_a_request_key_with_another_content_is_refused(store: VoteStore, shown: Presentation, ann: int):
    store.vote(shown.token, ann, "left", request_key="k1", now=1.0)
    with pytest.raises(VoteError, match="request key"):
        store.vote(shown.token, ann, "right", request_key="k1", now=2.0)


def test_another_verdict_takes_the_place_of_the_first(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader
):
    first = store.vote(shown.token, ann, "left", now=1.0)
    (seen,) = reader.votes_after(0)
    second = store.vote(shown.token, ann, "right_much", now=2.0)
    assert second.revision == 2
    (changed,) = reader.votes_after(seen.id)
    assert (changed.revision, changed.presentation_id) == (2, seen.presentation_id)
    assert [vote.id for vote in reader.votes_after(0)] == [second.id]
    assert first.id < second.id


def test_undo_opens_the_presentation_again_and_history_is_kept(
    store: VoteStore, shown: Presentation, ann: int, asked: int, reader: VoteReader
):
    store.vote(shown.token, ann, "left", now=1.0)
    store.withdraw(shown.token, ann, now=2.0)
    assert store.withdraw(shown.token, ann, now=3.0).is_repeat
    (again,) = store.next_presentations(ann, asked, 1, now=3.0)
    assert (again.token, again.num_revisions) == (shown.token, 2)
    assert list(store.reader.export()) == []
    store.vote(shown.token, ann, "tie", now=4.0)
    (row,) = store.reader.export()
    assert (row.verdict, row.tie) == ("tie", True)
    assert [vote.revision for vote in reader.votes_after(0)] == [3]


def test_a_vote_cannot_be_changed_or_undone_after_its_time(store: VoteStore, shown: Presentation, ann: int):
    receipt = store.vote(shown.token, ann, "left", now=1.0)
    assert receipt.undo_until == 51.0
    with pytest.raises(VoteConflictError, match="50 s"):
        store.withdraw(shown.token, ann, now=52.0)
    with pytest.raises(VoteConflictError, match="50 s"):
        store.vote(shown.token, ann, "right", now=52.0)
    assert store.vote(shown.token, ann, "left", now=52.0).is_repeat


def test_a_vote_on_what_was_never_shown_to_this_rater_is_refused(
    store: VoteStore, shown: Presentation, rater: MakeRater
):
    bob = rater("bob")
    for token in (shown.token, "no-such-token", "'; DROP TABLE votes; --"):
        with pytest.raises(UnknownPresentationError):
            store.vote(token, bob, "left", now=1.0)
    assert list(store.reader.export()) == []


def test_a_vote_after_the_lease_is_refused_where_others_took_the_place(
    store: VoteStore, shown: Presentation, ann: int, asked: int, rater: MakeRater
):
    bob = rater("bob")
    (of_bob,) = store.next_presentations(bob, asked, 1, now=101.0)
    assert of_bob.prompt == shown.prompt
    with pytest.raises(VoteConflictError, match="no more votes"):
        store.vote(shown.token, ann, "left", now=102.0)
    store.vote(of_bob.token, bob, "right", now=103.0)
    assert [row.rater for row in store.reader.export()] == ["bob"]


def test_undoing_a_skip_is_refused_where_others_took_the_place(
    store: VoteStore, shown: Presentation, ann: int, asked: int, rater: MakeRater
):
    store.vote(shown.token, ann, "skip", now=1.0)
    store.next_presentations(rater("bob"), asked, 1, now=2.0)
    with pytest.raises(VoteConflictError):
        store.withdraw(shown.token, ann, now=3.0)
    with pytest.raises(VoteConflictError):
        store.vote(shown.token, ann, "left", now=3.0)


def test_undo_without_a_vote_and_unknown_verdicts_are_refused(store: VoteStore, shown: Presentation, ann: int):
    with pytest.raises(VoteError, match="no vote"):
        store.withdraw(shown.token, ann, now=1.0)
    with pytest.raises(VoteError, match="left_much, left"):
        store.vote(shown.token, ann, "up", now=1.0)  # pyright: ignore[reportArgumentType]


def test_a_skip_that_became_a_vote_and_back_is_told_to_the_trainer(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader
):
    store.vote(shown.token, ann, "left", now=1.0)
    store.vote(shown.token, ann, "skip", now=2.0)
    (vote,) = reader.votes_after(0)
    assert (vote.verdict, vote.revision) == ("skip", 2)
    assert list(store.reader.export()) == []


@pytest.fixture
def ranking(store: VoteStore, campaign: MakeCampaign, ann: int) -> Presentation:
    made = campaign(name="rank", kind="ranking")
    texts = ("first", "second", "third", "fourth")
    store.add_items(made, [NewItem("sort", tuple(map(Candidate, texts)), kind="ranking", gold=0)])
    store.add_items(made, [NewItem("sort these", tuple(map(Candidate, texts)), kind="ranking")])
    return store.next_presentations(ann, made, 1, now=0.0)[0]


def test_ranks_follow_the_answers_wherever_they_stood(
    store: VoteStore, ranking: Presentation, ann: int, reader: VoteReader
):
    assert ranking.kind == "ranking"
    place = {"first": 1, "second": 3, "third": 3, "fourth": 4}
    store.rank(ranking.token, ann, [place[text] for text in ranking.answers], now=1.0)
    (found,) = reader.rankings_after(0)
    assert {c.text: rank for c, rank in zip(found.candidates, found.ranks, strict=True)} == {
        "first": 1,
        "second": 2,
        "third": 2,
        "fourth": 3,
    }
    store.withdraw(ranking.token, ann, now=2.0)
    assert [one.ranks for one in reader.rankings_after(0)] == [()]
    assert list(store.reader.export_rankings()) == []


@pytest.mark.parametrize("ranks", [[1, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3], []])
def test_ranks_that_do_not_fit_are_refused(store: VoteStore, ranking: Presentation, ann: int, ranks: list[int]):
    with pytest.raises(VoteError, match="give 4 ranks"):
        store.rank(ranking.token, ann, ranks, now=1.0)


def test_a_ranking_takes_no_verdict_but_skip_and_a_pair_no_ranks(
    store: VoteStore, ranking: Presentation, shown: Presentation, ann: int
):
    with pytest.raises(VoteError, match="rank them"):
        store.vote(ranking.token, ann, "left", now=1.0)
    assert store.vote(ranking.token, ann, "skip", now=1.0).verdict == "skip"
    with pytest.raises(VoteError, match="verdict"):
        store.rank(shown.token, ann, [1, 2], now=1.0)


def test_a_written_answer_stands_beside_the_vote(store: VoteStore, shown: Presentation, ann: int, reader: VoteReader):
    first = store.demonstrate(shown.token, ann, "A better answer.", request_key="d1", now=1.0)
    assert store.demonstrate(shown.token, ann, "A better answer.", request_key="d1", now=2.0).is_repeat
    store.demonstrate(shown.token, ann, "The best answer.", now=3.0)
    store.vote(shown.token, ann, "both_bad", now=4.0)
    (written,) = reader.demonstrations_after(0)
    assert (written.text, written.prompt, written.revision) == ("The best answer.", shown.prompt, 2)
    assert first.verdict == "written"
    with pytest.raises(VoteError, match="empty"):
        store.demonstrate(shown.token, ann, " \n", now=5.0)


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"])
def test_text_that_no_file_can_carry_is_refused_everywhere(
    store: VoteStore, shown: Presentation, ann: int, asked: int, text: str
):
    with pytest.raises(DataError, match=r"NUL|surrogate"):
        store.vote(shown.token, ann, "left", reason=text, now=1.0)
    with pytest.raises(DataError, match=r"NUL|surrogate"):
        store.demonstrate(shown.token, ann, text, now=1.0)
    with pytest.raises(DataError, match=r"NUL|surrogate"):
        store.add_items(asked, [NewItem("p", (Candidate(text), Candidate("b")))])
    with pytest.raises(DataError, match=r"NUL|surrogate"):
        store.add_items(asked, [NewItem(({"role": "user", "content": text},), (Candidate("a"), Candidate("b")))])
    with pytest.raises(DataError, match=r"NUL|surrogate"):
        store.add_rater(text)
    assert list(store.reader.export()) == []


@pytest.mark.parametrize(
    "text",
    [
        "\u202eright to left",
        "\u05e9\u05dc\u05d5\u05dd",
        "\U0001f600",
        "x" * 1_000_000,
        "a\nb\r\n\tc\u2028d",
        "' OR 1=1",
    ],
)
def test_any_other_text_comes_back_as_it_was(store: VoteStore, campaign: MakeCampaign, ann: int, text: str):
    asked = campaign(name="texts")
    store.add_items(asked, [NewItem(text, (Candidate(text), Candidate("b")))])
    (shown,) = store.next_presentations(ann, asked, 1, now=0.0)
    assert (shown.prompt, set(shown.answers)) == (text, {text, "b"})
    store.vote(shown.token, ann, "left", reason=text, now=1.0)
    (row,) = store.reader.export(asked)
    assert (row.prompt, {row.chosen, row.rejected}, row.reason) == (text, {text, "b"}, text)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_shown_elsewhere_is_stored_with_its_vote_and_its_sides_once(
    store: VoteStore, campaign: MakeCampaign, ann: int, reader: VoteReader, swapped: bool
):
    made = campaign(lease_s=100.0)
    pair = NewItem("prompt", (Candidate("one", source_id="v1"), Candidate("two", source_id="v2")))
    if swapped:  # the pair is known with its answers in the other order
        store.add_items(made, [NewItem("prompt", pair.candidates[::-1])])
    first = store.vote_on_pair(made, pair, ann, "right_much", "so", 900, now=1.0)
    assert store.vote_on_pair(made, pair, ann, "right_much", "so", 900, now=2.0).id == first.id
    (vote,) = reader.votes_after(0)
    assert (vote.chosen.text, vote.rejected.text, vote.verdict) == ("two", "one", "right_much")
    assert store.next_presentations(ann, made, 5, now=3.0) == []
    assert reader.stats(made).left.num_hits == 0
    with pytest.raises(DataError, match="same answer twice"):
        store.vote_on_pair(made, NewItem("prompt", (Candidate("a"), Candidate("a"))), ann, "left")


def test_a_pair_shown_again_with_its_sides_exchanged_is_one_vote(
    store: VoteStore, campaign: MakeCampaign, ann: int, reader: VoteReader
):
    made = campaign(undo_s=100.0)
    one, two = Candidate("one"), Candidate("two")
    store.vote_on_pair(made, NewItem("prompt", (one, two)), ann, "right", now=1.0)
    for verdict, better in (("left", "two"), ("right_much", "one"), ("tie", "")):
        store.vote_on_pair(made, NewItem("prompt", (two, one)), ann, verdict, now=2.0)
        (vote,) = reader.votes_after(0)
        assert vote.verdict == "tie" if not better else vote.chosen.text == better


def test_a_vote_on_a_pair_shown_elsewhere_counts_for_the_limit(store: VoteStore, campaign: MakeCampaign, ann: int):
    made = campaign(max_votes_per_rater=1)
    one, two = (NewItem(f"prompt {k}", (Candidate("one"), Candidate("two"))) for k in range(2))
    store.vote_on_pair(made, one, ann, "left", now=1.0)
    with pytest.raises(VoteConflictError, match="all the votes"):
        store.vote_on_pair(made, two, ann, "left", now=2.0)
    assert len(store.reader.votes_after(0)) == 1


def test_a_vote_can_be_changed_at_any_time(
    store: VoteStore, campaign: MakeCampaign, pairs: Pairs, ann: int, reader: VoteReader
):
    made = campaign()
    store.add_items(made, pairs(1))
    (shown,) = store.next_presentations(ann, made, 1, now=0.0)
    assert store.vote(shown.token, ann, "left", now=1.0).undo_until is None
    store.vote(shown.token, ann, "right", now=1e7)
    assert [vote.verdict for vote in reader.votes_after(0)] == ["right"]
    assert store.withdraw(shown.token, ann, now=2e7).verdict == "withdrawn"


def test_an_undo_that_is_sent_again_undoes_no_later_vote(
    store: VoteStore, shown: Presentation, ann: int, reader: VoteReader
):
    store.vote(shown.token, ann, "left", request_key="a", now=1.0)
    first = store.withdraw(shown.token, ann, now=2.0, request_key="b")
    store.vote(shown.token, ann, "right", request_key="c", now=3.0)
    again = store.withdraw(shown.token, ann, now=4.0, request_key="b")
    assert again.is_repeat and again.id == first.id
    assert [vote.verdict for vote in reader.votes_after(0)] == ["right"]


def test_what_a_rater_said_is_listed_as_they_saw_it(
    store: VoteStore, campaign: MakeCampaign, pairs: Pairs, ann: int, rater: MakeRater, reader: VoteReader
):
    made = campaign()
    store.add_items(made, [*pairs(3), NewItem("rank", tuple(map(Candidate, "xyz")), kind="ranking")])
    shown = store.next_presentations(ann, made, 4, now=0.0)
    one, two, three = (each for each in shown if each.kind == "pair")
    (ranked,) = (each for each in shown if each.kind == "ranking")
    store.vote(one.token, ann, "left", "first", now=1.0)
    store.vote(one.token, ann, "right_much", "changed", now=2.0)
    store.vote(two.token, ann, "skip", now=3.0)
    store.rank(ranked.token, ann, [2, 1, 2], now=4.0, reason="y is short")
    store.demonstrate(one.token, ann, "better", now=5.0)
    store.vote_on_pair(made, NewItem("elsewhere", (Candidate("a"), Candidate("b"))), ann, "left", now=6.0)
    said = {each.shown.token: each for each in reader.answered(ann, made)}
    assert list(said) == [each.token for each in reversed(shown) if each is not three]
    first = said[one.token]
    assert (first.verdict, first.reason, first.written, first.shown.answers) == (
        "right_much",
        "changed",
        "better",
        one.answers,
    )
    assert said[two.token].verdict == "skip"
    last = said[ranked.token]
    assert (last.verdict, last.ranks, last.reason) == ("ranked", (2, 1, 2), "y is short")
    newest = next(iter(said))
    assert [each.shown.token for each in reader.answered(ann, made, 1)] == [newest]
    assert [each.shown.token for each in reader.answered(ann, made, before=newest)] == list(said)[1:]
    store.withdraw(two.token, ann, now=7.0)
    assert two.token not in [each.shown.token for each in reader.answered(ann, made)]
    assert reader.answered(rater("bob"), made) == []
    assert [ranking.reason for ranking in reader.rankings_after(0)] == ["y is short"]
