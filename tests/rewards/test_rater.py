from tunesmith.base.schema.records import Prompt
from tunesmith.learn.rewards.builtin import RATER_NAME, SimulatedRater

RATER = SimulatedRater()
PROMPT = Prompt("films:1", "The movie was")


def test_it_prefers_the_more_positive_completion_on_either_side():
    good, bad = " wonderful and moving.", " dull and terrible."
    assert RATER.vote(PROMPT, good, bad).preference == "a"
    assert RATER.vote(PROMPT, bad, good).preference == "b"


def test_a_vote_carries_the_scores_and_says_that_it_is_simulated():
    vote = RATER.vote(PROMPT, " great", " bad")
    assert (vote.a, vote.b, vote.prompt) == (" great", " bad", PROMPT)
    assert vote.score_a == RATER.score("The movie was", " great") > 0 > (vote.score_b or 0)
    assert vote.rater == RATER_NAME
    assert "simulated" in vote.rater


def test_near_scores_are_a_tie():
    assert RATER.vote(PROMPT, " long", " short").preference == "tie"
    assert RATER.vote(PROMPT, " good", " good").preference == "tie"
    difference = abs(RATER.score("The movie was", " good") - RATER.score("The movie was", " nice"))
    assert 0 < difference < 0.05
    assert RATER.vote(PROMPT, " good", " nice").preference == "tie"


def test_text_is_rated_as_it_runs_on_from_the_prompt():
    assert RATER.score("The movie was not", " good") < 0 < RATER.score("The movie was", " good")


def test_in_a_conversation_the_reply_alone_is_rated():
    question = ({"role": "user", "content": "Why is this awful, terrible film so bad?"},)
    assert RATER.score(question, "I love it") > 0
    assert RATER.score(question, ({"role": "assistant", "content": "I love it"},)) == RATER.score(question, "I love it")
