"""Records of text."""

import dataclasses

import pytest

from tunesmith.base.schema.records import Pair, Prompt, Ranking, Vote, plain_text

CHAT = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"})


def test_plain_text_of_text_is_the_text():
    assert plain_text("The movie was") == "The movie was"


def test_plain_text_of_a_conversation_is_its_contents_line_by_line():
    assert plain_text(CHAT) == "Hello\nHi there"


def test_a_prompt_knows_whether_it_is_a_conversation():
    assert not Prompt("a:1", "Hello").is_conversational
    assert Prompt("a:1", CHAT).is_conversational


def test_defaults_are_no_columns_no_margin_no_tie_no_scores():
    prompt = Prompt("a:1", "Hello")
    assert prompt.columns == {}
    pair = Pair(prompt, "yes", "no")
    assert (pair.margin, pair.tie) == (None, False)
    vote = Vote(prompt, "yes", "no", "a", rater="me")
    assert (vote.score_a, vote.score_b) == (None, None)


def test_two_prompts_do_not_share_their_columns():
    assert Prompt("a:1", "x").columns is not Prompt("a:2", "y").columns


@pytest.mark.parametrize("record", [Prompt("a:1", "x"), Pair(Prompt("a:1", "x"), "y", "z")])
def test_records_are_frozen(record: Prompt | Pair):
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, "changed")


def test_a_ranking_gives_every_two_completions_better_first():
    prompt = Prompt("a:1", "It was")
    pairs = Ranking(prompt, ("x", "y", "z"), ranks=(2, 1, 2)).pairs()
    assert pairs == [Pair(prompt, "y", "x"), Pair(prompt, "y", "z"), Pair(prompt, "x", "z", tie=True)]
