"""Answers that were asked for again: which make a pair, and that the loop learns it once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_rig import Voters, live_recipe, looping, run_updates, voters

from tunesmith.base.config.algorithms.live import LiveFeedbackSection
from tunesmith.collect.store.records import Choice, Inference, StoredFeedback
from tunesmith.learn.live.feedback import FeedbackMemory
from tunesmith.learn.live.loop import Loop
from tunesmith.learn.live.regenerated import RegeneratedMemory

QUESTION = ({"role": "user", "content": "Hello"},)
WITHIN_S = 60.0


class Store:
    """What an application asked and said, in order, and the pairs that follow from it."""

    def __init__(self) -> None:
        self.requests: list[Inference] = []
        self.said: list[StoredFeedback] = []

    def ask(self, text: str, prompt: Any = QUESTION, at: float | None = None, num: int = 1, **facts: Any) -> Inference:
        """A request, one second after the one before, and its answer."""
        id = len(self.requests) + 1
        drawn = tuple(map(ord, text))
        choice = Choice(text, drawn, (-1.0,) * len(drawn), (-1.0,) * len(drawn), "stop", 1, source_id="v1")
        values: dict[str, Any] = {"rater_id": 1, "user": "ann", "model": "live", "options": {}, "prompt": prompt}
        values |= {"prompt_ids": tuple(map(ord, str(prompt)))[:20], "created_at": float(id) if at is None else at}
        self.requests.append(Inference(name=str(id), choices=(choice,) * num, id=id, **values | facts))
        return self.requests[-1]

    def go_on(self, text: str, **facts: Any) -> Inference:
        """A request that goes on from the answer `text` to the question."""
        more = {"role": "assistant", "content": text}, {"role": "user", "content": "More"}
        return self.ask("and more", (*QUESTION, *more), **facts)

    def say(self, request: Inference, value: Any) -> None:
        """Feedback on the answer to a request."""
        id = len(self.said) + 1
        facts: dict[str, Any] = {"key_id": 1, "user": "ann", "rater_id": 2, "revision": id, "created_at": 0.0}
        said = StoredFeedback(metric="thumbs", value=value, inference=request.name, id=id, name=f"f{id}", **facts)
        self.said.append(said)

    def pairs(self) -> list[tuple[str, str]]:
        """The better and the worse text of each pair."""
        feedback = FeedbackMemory(LiveFeedbackSection(), 1000)
        feedback.add(self.said, {one.name: one for one in self.requests})
        memory = RegeneratedMemory(feedback, WITHIN_S)
        memory.add(self.requests)
        memory.settle()
        return [pair.texts for _, pair in sorted(memory.fresh.items())]


def went_on(store: Store, old: Inference, new: Inference) -> None:
    store.go_on("new")


def liked(store: Store, old: Inference, new: Inference) -> None:
    store.say(new, True)


def disliked_and_went_on(store: Store, old: Inference, new: Inference) -> None:
    store.say(old, False)
    store.go_on("  new\n")  # clients strip


def did_nothing(store: Store, old: Inference, new: Inference) -> None:
    pass


def went_back(store: Store, old: Inference, new: Inference) -> None:
    store.say(new, True)
    store.go_on("old")


def liked_both(store: Store, old: Inference, new: Inference) -> None:
    store.say(old, True)
    store.say(new, True)


def said_it_by_thumbs(store: Store, old: Inference, new: Inference) -> None:
    store.say(old, False)
    store.say(new, True)


def disliked_the_new_one(store: Store, old: Inference, new: Inference) -> None:
    store.say(new, False)
    store.go_on("new")


def edited_the_new_one(store: Store, old: Inference, new: Inference) -> None:
    store.go_on("newer")


def took_it_back(store: Store, old: Inference, new: Inference) -> None:
    store.say(new, True)
    store.say(new, None)


@pytest.mark.parametrize(
    ("does", "is_pair"),
    [
        (went_on, True),
        (liked, True),
        (disliked_and_went_on, True),
        (did_nothing, False),
        (went_back, False),
        (liked_both, False),
        (said_it_by_thumbs, False),  # which are a pair themselves
        (disliked_the_new_one, False),
        (edited_the_new_one, False),
        (took_it_back, False),
    ],
)
def test_an_answer_that_is_kept_is_better_than_the_one_before(
    does: Callable[[Store, Inference, Inference], None], is_pair: bool
) -> None:
    store = Store()
    does(store, store.ask("old"), store.ask("new"))
    assert store.pairs() == ([("new", "old")] if is_pair else [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"user": ""}, {"user": ""}),  # who asks is not known
        ({"user": "bob"}, {}),
        ({"rater_id": 7}, {}),
        ({"episode": "chat 1"}, {"episode": "chat 2"}),
        ({"prompt": ({"role": "user", "content": "Hi"},)}, {}),
        ({"prompt_ids": (1, 2)}, {}),
        ({"at": 0.0}, {"at": WITHIN_S + 1}),
        ({"num": 2}, {}),
        ({}, {"num": 2}),
        ({"text": "new"}, {}),
    ],
    ids=str,
)
def test_two_requests_are_no_second_try(old: dict[str, Any], new: dict[str, Any]) -> None:
    store = Store()
    store.ask(**{"text": "old", **old})
    kept = store.ask("new", **new)
    store.say(kept, True)
    store.go_on("new", user=kept.user, episode=kept.episode)
    assert store.pairs() == []


def test_of_many_tries_the_one_that_is_kept_makes_one_pair() -> None:
    store = Store()
    for text in ("first", "second", "third"):
        store.ask(text)
    store.go_on("third")
    store.go_on("third")
    assert store.pairs() == [("third", "second")]


def test_the_oldest_requests_are_forgotten_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.learn.live.regenerated.MAX_REMEMBERED", 4)
    store = Store()
    store.ask("old")
    store.say(store.ask("new"), True)
    for number in range(2):
        assert store.pairs() == [("new", "old")]
        store.ask("other", user=f"user {number}")
    assert store.pairs() == [("new", "old")]
    store.ask("other", user="one more")
    assert store.pairs() == []


def tried_twice(loop: Loop, people: Voters, user: str) -> None:
    """An answer that `user` asks for again, and the going on from the second."""
    first, second = people.answered(loop, 0, 2, user=user, prompt=QUESTION)
    found = people.store.reader.inferences([first, second])
    assert found[first].choices != found[second].choices
    more = {"role": "assistant", "content": found[second].choices[0].text}, {"role": "user", "content": "More"}
    people.answered(loop, 0, 1, user=user, prompt=(*QUESTION, *more))


def recipe(folder: Path, **feedback: Any) -> Any:
    live = {"votes_per_update": 3, "max_votes_per_update": 16, "feedback": feedback}
    return live_recipe(folder, live=live)


def test_kept_answers_are_learnt_once_also_by_a_loop_that_started_again(tmp_path: Path) -> None:
    found: list[list[torch.Tensor]] = []
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        cfg = recipe(folder, regenerated_within_s=600.0)
        with voters(folder) as people:
            with looping(cfg) as loop:
                for number in range(3):
                    tried_twice(loop, people, f"user {number}")
                run_updates(loop, 1)
                tried_twice(loop, people, "late")
                loop.next_action()
                people.store.command("rollback", "77", people.rater_id)  # writes a checkpoint
                loop.next_action()
                if not restarts:
                    found.append(finished(loop, people))
            if restarts:
                with looping(cfg) as loop:
                    assert (len(loop.regenerated.fresh), len(loop.regenerated.learnt)) == (1, 3)
                    found.append(finished(loop, people))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [(row["regenerated/new"], row["feedback/new"]) for row in rows] == [(3, 0), (3, 0)]
        assert "rewards/margins" in rows[0]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def finished(loop: Loop, people: Voters) -> list[torch.Tensor]:
    for user in ("one", "two"):
        tried_twice(loop, people, user)
    run_updates(loop, 2)
    assert (len(loop.regenerated.fresh), len(loop.regenerated.learnt)) == (0, 6)
    return [one.detach().clone() for one in loop.learner.policy.module.parameters()]


def test_they_are_left_out_unless_that_is_asked_for(tmp_path: Path) -> None:
    with looping(recipe(tmp_path)) as loop, voters(tmp_path) as people:
        tried_twice(loop, people, "ann")
        loop.read_votes()
        assert not loop.regenerated.fresh and loop.position.request_cursor == 0
        # The same folder with the setting learns what was asked before.
    with looping(recipe(tmp_path, regenerated_within_s=600.0)) as loop:
        loop.read_votes()
        assert [pair.sources for pair in loop.regenerated.fresh.values()] == [("v0", "v0")]


def test_a_thumb_that_is_withdrawn_takes_the_pair_with_it(tmp_path: Path) -> None:
    with looping(recipe(tmp_path, regenerated_within_s=600.0)) as loop, voters(tmp_path) as people:
        _, second = people.answered(loop, 0, 2, user="ann", prompt=QUESTION)
        people.say(second, True)
        loop.read_votes()
        assert len(loop.regenerated.fresh) == 1
        people.say(second, None)
        loop.read_votes()
        assert not loop.regenerated.fresh


def test_a_pair_of_deleted_requests_is_forgotten_and_its_versions_say_so(tmp_path: Path) -> None:
    with looping(recipe(tmp_path, regenerated_within_s=600.0)) as loop, voters(tmp_path) as people:
        for number in range(3):
            tried_twice(loop, people, f"user {number}")
        run_updates(loop, 1)
        tried_twice(loop, people, "late")
        loop.read_votes()
        people.store.delete_person(people.store.reader.person("late", "app"))
        loop.next_action()  # two commands: of requests, and of everything
        loop.next_action()
        assert (len(loop.regenerated.fresh), len(loop.regenerated.learnt)) == (0, 3)
        assert [one.learnt_deleted for one in people.runs.versions()] == [False, False]
        people.store.delete_person(people.store.reader.person("user 2", "app"))
        loop.next_action()
        loop.next_action()
        assert len(loop.regenerated.learnt) == 2
        assert [one.learnt_deleted for one in people.runs.versions()] == [False, True]
