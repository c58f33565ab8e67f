"""Votes by a rater in code and by a person at the keys."""

import io

import pytest

from tunesmith.apps.workflows.voting import MIN_VOTES, ask_votes, votes_on
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.learn.rewards.builtin import SimulatedRater

TEXTS = (" great and lovely", " awful", " a table", " good")


def _groups(count: int, start: int = 0, texts: tuple[str, ...] = TEXTS) -> list[Group]:
    completions = tuple(Completion((1,), (0.0,), (0.0,), text, "length") for text in texts)
    return [Group(Prompt(f"p{i}", f"film {i} is"), (1,), completions, 0) for i in range(start, start + count)]


def test_every_two_completions_of_a_prompt_meet_once() -> None:
    votes = votes_on(_groups(2), SimulatedRater())
    assert len({(vote.prompt.id, vote.a, vote.b) for vote in votes}) == len(votes) == 12


def test_the_simulated_rater_prefers_the_positive_text_and_says_that_it_is_simulated() -> None:
    votes = votes_on(_groups(1), SimulatedRater())
    by_texts = {(v.a, v.b): v for v in votes}
    assert by_texts[TEXTS[0], TEXTS[1]].preference == "a"
    assert by_texts[TEXTS[1], TEXTS[3]].preference == "b"
    assert all("simulated" in vote.rater for vote in votes)


def test_equal_texts_are_not_put_to_the_vote() -> None:
    assert votes_on(_groups(1, texts=(" same", " same")), SimulatedRater()) == []


def test_a_person_votes_with_keys_and_the_answers_are_sorted_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" + "120" * 30))
    train, heldout = ask_votes(_groups(20), _groups(5, start=20), seed=0, num_asked=24)
    assert (len(train), len(heldout)) == (18, 6)
    assert {vote.preference for vote in train} == {"a", "b", "tie"}
    assert {vote.prompt.id for vote in heldout} <= {f"p{i}" for i in range(20, 25)}
    assert all(vote.rater == "you" for vote in train)


def test_stopping_too_early_is_an_error_that_names_the_number_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("112q"))
    with pytest.raises(InputError, match=f"3 votes are too few.*at least {MIN_VOTES}"):
        ask_votes(_groups(20), _groups(5, start=20), seed=0)


def test_ties_alone_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("0" * 100))
    with pytest.raises(InputError, match="not all of them ties"):
        ask_votes(_groups(20), _groups(5, start=20), seed=0)
