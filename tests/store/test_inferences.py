"""Answers of the API, and feedback on them: what is kept, what becomes a vote, and what is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError, StoreError, UnknownPresentationError, VoteError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store.inferences import PREFERENCES, Speaker
from tunesmith.collect.store.records import EDITED, CampaignSettings, Choice, Feedback, Inference, KeySettings
from tunesmith.collect.store.vote_stats import FeedbackStats
from tunesmith.collect.store.votes import VoteStore

PROMPT: Text = ({"role": "user", "content": "Name a colour."},)


@pytest.fixture
def store(place: str | Path) -> Iterator[VoteStore]:
    with VoteStore.open(place, seed=0) as opened:
        opened.set_campaign(CampaignSettings())
        yield opened


@pytest.fixture
def key(store: VoteStore) -> int:
    return store.add_rater("app", key=KeySettings(("generate", "feedback"))).rater.id


def choice(text: str, version: int = 3) -> Choice:
    return Choice(text, (5, 6), (-0.5, -1.0), (-0.4, -0.9), "stop", version, f"v{version}")


def answered(store: VoteStore, key: int, name: str, *texts: str, prompt: Text = PROMPT, **more: str) -> Inference:
    one = Inference(
        name=name,
        rater_id=key,
        model="live",
        prompt=prompt,
        prompt_ids=(1, 2, 3),
        choices=tuple(choice(text) for text in texts),
        options={"temperature": 0.7},
        created_at=100.0,
        **more,
    )
    store.record(one)
    return one


def say(store: VoteStore, key: int, metric: str, value: object, name: str = "", **more: object):
    said = Feedback(metric=metric, value=value, inference=name, **more)  # type: ignore[arg-type]
    return store.give_feedback(1, said, Speaker(key))


def test_an_answer_is_kept_whole_under_the_id_of_the_client(store: VoteStore, key: int):
    one = answered(store, key, "chatcmpl-1", "Red.", "Blue.")
    assert store.reader.inference("chatcmpl-1") == one
    assert store.reader.inference("chatcmpl-2") is None


def test_numbers_that_json_does_not_have_are_read_as_null(store: VoteStore, key: int):
    call = {"function": {"name": "f", "arguments": {"a": float("nan"), "b": [float("-inf"), 1.5]}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    drawn = replace(choice(""), message=message)
    prompt: Text = ({"role": "user", "content": "Hi", "tool_calls": [call]},)
    one = answered(store, key, "chatcmpl-0", "Red.", user="ada")
    store.record(replace(one, name="chatcmpl-1", prompt=prompt, choices=(drawn,), options={"conversation": [message]}))
    kept = store.reader.inference("chatcmpl-1")
    assert kept is not None and kept.choices[0].message is not None
    for each in (kept.choices[0].message, kept.options["conversation"][0], kept.prompt[0]):
        assert each["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": [None, 1.5]}  # type: ignore[index]
    for row in store.reader.data_of(store.reader.person("ada", "app")):
        json.dumps(row, allow_nan=False)


def test_a_key_is_no_login_and_has_known_scopes(store: VoteStore, key: int):
    made = store.add_rater("other", key=KeySettings(("generate",)))
    assert made.token.startswith("sk-") and made.rater.scopes == ("generate",)
    assert store.reader.rater_of(made.token) == made.rater
    with pytest.raises(StoreError, match="scopes"):
        store.add_rater("third", key=KeySettings(("everything",)))  # type: ignore[arg-type]


def test_users_of_one_key_are_raters_of_their_own_and_may_judge_the_same_pair(store: VoteStore, key: int):
    for name, user in (("chatcmpl-1", "ada"), ("chatcmpl-2", "bob"), ("chatcmpl-3", "ada")):
        answered(store, key, name, "Red.", "Blue.", user=user, episode=f"talk {user}")
    say(store, key, "preference", {"better": 0, "worse": 1}, "chatcmpl-1")
    say(store, key, "preference", {"better": 1, "worse": 0}, "chatcmpl-2")
    votes = store.reader.votes_after(0)
    assert [vote.chosen.text for vote in votes] == ["Red.", "Blue."]
    assert len({vote.rater for vote in votes}) == 2 and len({vote.item_id for vote in votes}) == 1
    assert not any(name in vote.rater for vote in votes for name in ("ada", "bob", "app"))
    say(store, key, "preference", {"better": 1, "worse": 0}, "chatcmpl-3")  # the first of them says otherwise
    now = {vote.rater: vote.chosen.text for vote in store.reader.votes_after(0)}
    assert now == {votes[0].rater: "Blue.", votes[1].rater: "Blue."}
    bob = Speaker(key, "bob")
    for said in (
        Feedback(metric="thumbs", value=True, inference="chatcmpl-1"),
        Feedback(metric="thumbs", value=True, episode="talk ada"),
        Feedback(metric="preference", value={"better": "chatcmpl-2", "worse": "chatcmpl-3#1"}),
    ):
        with pytest.raises(UnknownPresentationError):
            store.give_feedback(1, said, bob)
    assert store.give_feedback(1, Feedback(metric="thumbs", value=True, inference="chatcmpl-2"), bob).user == "bob"


def test_tokens_of_a_key_are_those_of_a_day(store: VoteStore, key: int):
    day_s = 24 * 3600
    store.charge(key, 5, now=3 * day_s)
    store.charge(key, 7, now=4 * day_s - 1)
    store.charge(key, 1, now=4 * day_s)
    assert [store.reader.tokens_of_day(now=day * day_s) for day in (2, 3, 4)] == [{}, {key: 12}, {key: 1}]


def test_an_expired_key_is_nobody(store: VoteStore):
    made = store.add_rater("late", key=KeySettings(("generate",), 3, 4), expires_at=10.0, now=0.0)
    assert (made.rater.requests_per_minute, made.rater.tokens_per_day) == (3, 4)
    assert store.reader.rater_of(made.token, now=9.0) == made.rater
    assert store.reader.rater_of(made.token, now=10.0) is None


def test_a_preference_between_two_answers_is_a_vote_with_the_ids_that_were_drawn(store: VoteStore, key: int):
    answered(store, key, "chatcmpl-1", "Red.", "Blue.")
    say(store, key, "preference", {"better": 1, "worse": 0}, "chatcmpl-1")
    (vote,) = store.reader.votes_after(0)
    assert (vote.chosen.text, vote.rejected.text) == ("Blue.", "Red.")
    assert vote.chosen.token_ids == (5, 6) and vote.chosen.weight_version == 3
    assert vote.chosen_side is None  # where the application showed it, nobody said
    # Said otherwise, it replaces the first; withdrawn, there is none.
    say(store, key, "preference", {"better": 0, "worse": 1, "verdict": "much_better"}, "chatcmpl-1")
    last = store.reader.votes_after(vote.id)[-1]
    assert (last.chosen.text, last.verdict.removeprefix("left").removeprefix("right")) == ("Red.", "_much")
    say(store, key, "preference", None, "chatcmpl-1")
    assert store.reader.votes_after(last.id)[-1].verdict == "withdrawn"


def test_answers_of_two_requests_are_compared_by_their_ids(store: VoteStore, key: int):
    answered(store, key, "chatcmpl-1", "Red.")
    answered(store, key, "chatcmpl-2", "Blue.", "Green.")
    say(store, key, "preference", {"better": "chatcmpl-2#1", "worse": "chatcmpl-1"})
    (vote,) = store.reader.votes_after(0)
    assert (vote.chosen.text, vote.rejected.text) == ("Green.", "Red.")
    answered(store, key, "chatcmpl-3", "Seven.", prompt="A number?")
    with pytest.raises(VoteError, match="different conversations"):
        say(store, key, "preference", {"better": "chatcmpl-3", "worse": "chatcmpl-1"})


def test_a_better_answer_is_one_half_of_a_pair(store: VoteStore, key: int):
    answered(store, key, "chatcmpl-1", "Red.")
    say(store, key, "demonstration", "Crimson.", "chatcmpl-1")
    (vote,) = store.reader.votes_after(0)
    assert (vote.chosen.text, vote.rejected.text) == ("Crimson.", "Red.") and vote.chosen.source_id == EDITED
    say(store, key, "demonstration", "Scarlet.", "chatcmpl-1")
    verdicts = {one.chosen.text: one.verdict for one in store.reader.votes_after(0)}
    assert verdicts["Scarlet."] in ("left", "right") and "withdrawn" in verdicts.values()


def test_feedback_is_changed_and_withdrawn_and_the_same_again_is_one(store: VoteStore, key: int):
    answered(store, key, "chatcmpl-1", "Red.", episode="chat 7")
    first = say(store, key, "thumbs", True, "chatcmpl-1", tags={"page": "home"})
    again = say(store, key, "thumbs", True, "chatcmpl-1", tags={"page": "home"})
    assert (again.id, again.is_repeat, first.is_repeat) == (first.id, True, False)
    say(store, key, "thumbs", False, "chatcmpl-1")
    say(store, key, "thumbs", None, "chatcmpl-1")
    say(store, key, "stars", 4.5, episode="chat 7")
    say(store, key, "comment", "too short", "chatcmpl-1")
    found = store.reader.feedback_after(0)
    assert [(one.metric, one.value, one.revision) for one in found] == [
        ("thumbs", True, 1),
        ("thumbs", False, 2),
        ("thumbs", None, 3),
        ("stars", 4.5, 1),
        ("comment", "too short", 1),
    ]
    assert found[0].inference == "chatcmpl-1" and found[3].episode == "chat 7" and not found[3].inference
    assert not store.reader.votes_after(0)
    assert say(store, key, "thumbs", None, "chatcmpl-1").is_repeat
    with pytest.raises(VoteError, match="nothing to withdraw"):
        say(store, key, "stars", None, "chatcmpl-1")


@pytest.mark.parametrize(
    ("metric", "value", "more", "message"),
    [
        ("thumbs", "yes", {}, "true or false"),
        ("thumbs", float("nan"), {}, "finite"),
        ("thumbs", {"a": 1}, {}, "true or false"),
        ("comment", 3, {}, "is a text"),
        ("demonstration", "  ", {}, "is a text"),
        ("preference", True, {}, "object"),
        ("preference", {"better": 0}, {}, "better and worse"),
        ("preference", {"better": 0, "worse": 9}, {}, "choice is 9"),
        ("preference", {"better": 0, "worse": 1, "verdict": "worst"}, {}, "verdict"),
        ("preference", {"better": "chatcmpl-1#x", "worse": 1}, {}, "names no choice"),
        ("thumbs", True, {"choice": 2}, "choice is 2"),
        ("thumbs", True, {"episode": "e"}, "either inference_id"),
        ("", True, {}, "metric_name"),
        ("thumbs", True, {"tags": {"a": "b" * 300}}, "tags"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_stored(
    store: VoteStore, key: int, metric: str, value: object, more: dict[str, object], message: str
):
    answered(store, key, "chatcmpl-1", "Red.", "Blue.")
    with pytest.raises(VoteError, match=message):
        say(store, key, metric, value, "chatcmpl-1", **more)
    assert not store.reader.feedback_after(0) and not store.reader.votes_after(0)


def test_nobody_speaks_of_anothers_answers(store: VoteStore, key: int):
    other = store.add_rater("thief", key=KeySettings(("feedback",))).rater.id
    answered(store, key, "chatcmpl-1", "Red.", episode="chat 7")
    answered(store, other, "chatcmpl-2", "Blue.")
    for metric, value, name, more in (
        ("thumbs", True, "chatcmpl-1", {}),
        ("thumbs", True, "", {"episode": "chat 7"}),
        ("preference", {"better": "chatcmpl-2", "worse": "chatcmpl-1"}, "", {}),
    ):
        with pytest.raises(UnknownPresentationError):
            say(store, other, metric, value, name, **more)
    assert not store.reader.feedback_after(0)


def test_a_text_that_no_database_holds_and_equal_answers_are_refused(store: VoteStore, key: int):
    answered(store, key, "chatcmpl-1", "Red.", "Red.")
    with pytest.raises(DataError):
        say(store, key, "comment", "a\x00b", "chatcmpl-1")
    for verdict in PREFERENCES:
        with pytest.raises(VoteError, match="the two answers are the same text"):
            say(store, key, "preference", {"better": 0, "worse": 1, "verdict": verdict}, "chatcmpl-1")
    with pytest.raises(VoteError, match="the correction equals the answer"):
        say(store, key, "demonstration", "Red.", "chatcmpl-1")
    assert not store.reader.feedback_after(0)


def test_effective_feedback_is_counted_by_metric_and_by_who_answered(store: VoteStore, key: int):
    for number in range(4):
        answered(store, key, f"a{number}", "Red.", "Blue.", episode="talk")
    other = Choice("Green.", (5,), (-0.5,), (-0.4,), "stop", None, "model a run")
    facts = {"rater_id": key, "model": "m", "prompt": "Say", "prompt_ids": (1,), "options": {}, "created_at": 1.0}
    store.record(Inference(name="b", choices=(other,), **facts))  # type: ignore[arg-type]
    for number in range(4):
        say(store, key, "thumbs", number > 0, f"a{number}")
    say(store, key, "thumbs", False, "a1")  # in place of true
    say(store, key, "thumbs", None, "a0")
    say(store, key, "thumbs", 3, "a0", choice=1)
    say(store, key, "thumbs", True, "b")
    for number, (name, value) in enumerate((("b", 1.5), ("a0", 1e300), ("a1", -(10**300)), ("a2", 3))):
        say(store, key, "stars", value, name, tags={"number": str(number)})
    say(store, key, "comment", "true", "b")
    say(store, key, "comment", "7", "a0")
    say(store, key, "preference", {"better": 0, "worse": 1}, "a0")
    for value in (True, 4.0):
        say(store, key, "solved", value, episode="talk")
    found = [FeedbackStats(*one) for one in (
        ("thumbs", "v3", 4, 3, 2 / 3, 1, 3.0),
        ("stars", "v3", 3, 0, None, 3, 1.0),
        ("comment", "a run", 1, 0, None, 0, None),
        ("comment", "v3", 1, 0, None, 0, None),
        ("solved", "", 1, 0, None, 1, 4.0),
        ("stars", "a run", 1, 0, None, 1, 1.5),
        ("thumbs", "a run", 1, 1, 1.0, 0, None),
    )]  # fmt: skip
    assert store.reader.feedback_stats() == found
    with pytest.raises(VoteError, match="finite number"):
        say(store, key, "stars", 10**400, "b")
