"""Feedback that the API collected: thumbs and grades are learnt, alone and in pairs; versions are tried by them."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from live_rig import live_recipe, looping, run_updates, share_of_letters, voters

from tunesmith.base.config.algorithms.live import LiveCanarySection
from tunesmith.base.runs.folder import TRIAL
from tunesmith.collect.statistics.sequential import Tally
from tunesmith.collect.store.runs import is_only_tried
from tunesmith.learn.live.canary import Trial, decide, trial_of
from tunesmith.learn.live.loop import Loop

SECTION = LiveCanarySection(share=0.5)


def recipe(folder: Path, **live: Any) -> Any:
    return live_recipe(folder, live={"votes_per_update": 8, "max_votes_per_update": 16, **live})


def weights(loop: Loop) -> list[torch.Tensor]:
    return [one.detach().clone() for one in loop.learner.policy.module.parameters()]


def test_thumbs_raise_the_reward_of_what_got_them_up(tmp_path: Path) -> None:
    with looping(recipe(tmp_path, update_after_s=1e-6)) as loop, voters(tmp_path) as people:
        names = people.answered(loop, 0, 16)
        texts = {name: people.store.reader.inferences([name])[name].choices[0].text for name in names}
        middle = sorted(map(share_of_letters, texts.values()))[8]
        for name, text in texts.items():
            # One metric for each, so that no two answers to a prompt make a pair.
            people.say(name, share_of_letters(text) >= middle, metric=f"thumbs {name}")
        for number in range(1, 5):
            people.say(people.answered(loop, 0, 1)[0], True, metric=f"more {number}")
            run_updates(loop, number)
        versions = people.runs.versions()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert versions[-1].serving and versions[-1].num_votes == 20
    assert (rows[0]["feedback/new"], rows[0]["votes/new"]) == (16, 0)
    assert "feedback/kl" in rows[0] and "rewards/chosen" not in rows[0] and rows[0]["votes/to_version_s"] >= 0
    last = [row for row in rows if "feedback/rewards/rejected" in row][-1]
    assert last["feedback/rewards/chosen"] > last["feedback/rewards/rejected"]


def test_a_label_is_what_was_said_last_and_a_withdrawn_one_is_none(tmp_path: Path) -> None:
    with looping(recipe(tmp_path)) as loop, voters(tmp_path) as people:
        first, second, third, other = people.answered(loop, 0, 4)
        people.say(first, True)
        people.say(second, True)
        people.say(third, 0.5, metric="stars")  # a grade, of no metric that counts
        people.say(third, "too long", metric="comment")
        people.say(other, True)
        loop.read_votes()
        assert [one.is_wanted for one in loop.feedback.fresh.values()] == [True] * 3
        people.say(first, False)
        people.say(second, None)
        people.say(other, None)
        people.say(other, False, metric="helpful")
        loop.read_votes()
        assert [(one.metric, one.is_wanted) for one in loop.feedback.fresh.values()] == [
            ("thumbs", False),
            ("helpful", False),
        ]


def test_grades_become_labels_by_the_threshold(tmp_path: Path) -> None:
    section = {"metrics": ["stars"], "grade_threshold": 3.5}
    with looping(recipe(tmp_path, feedback=section)) as loop, voters(tmp_path) as people:
        for name, stars in zip(people.answered(loop, 0, 3), (5, 3, 4), strict=True):
            people.say(name, stars, metric="stars")
            people.say(name, True)  # of another metric
        loop.read_votes()
        assert [(one.value, one.is_wanted) for one in loop.feedback.fresh.values()] == [
            (5.0, True),
            (3.0, False),
            (4.0, True),
        ]


def test_opposite_thumbs_on_answers_to_one_prompt_are_a_pair_and_no_labels(tmp_path: Path) -> None:
    with looping(recipe(tmp_path, replay=0.0, update_after_s=1e-6)) as loop, voters(tmp_path) as people:
        names = people.answered(loop, 0, 8)  # four answers to each of two prompts
        for name, thumb in zip(names, (True, False, True, True, True, True, True, True), strict=True):
            people.say(name, thumb)
        run_updates(loop, 1)
        late = people.answered(loop, 0, 8)[6]  # an answer to the second prompt, all of whose thumbs were learnt
        people.say(late, False, metric="thumbs")
        run_updates(loop, 2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["feedback/new"] == 8 and "rewards/chosen" in rows[0] and "feedback/rewards/rejected" not in rows[0]
    assert "rewards/chosen" in rows[1] and "feedback/loss" not in rows[1]


def test_the_gradient_with_thumbs_is_that_of_a_float64_twin_at_any_micro_batch(tmp_path: Path) -> None:
    """The twin: KTO's loss by its formula, over log-probs of each answer alone in a float64 copy of the model."""
    found = []
    for size in (1, 8):
        folder = tmp_path / str(size)
        section = {"importance_limit": 1.5, "desirable_weight": 1.2}
        cfg = live_recipe(
            folder,
            dpo={"micro_batch_size": size},
            live={"feedback": section, "kl": {"coef": 0.0, "target": None, "budget": None}},
        )
        with looping(cfg) as loop, voters(folder) as people:
            learner, module = loop.learner, loop.learner.policy.module
            for number, name in enumerate(people.answered(loop, 0, 8)):
                people.say(name, number % 3 > 0, metric=str(number))
            loop.read_votes()
            for one in module.parameters():
                one.data += 0.01 * torch.sin(torch.arange(one.numel())).reshape(one.shape)
            labels = learner.weighed([loop.feedback.fresh[key] for key in sorted(loop.feedback.fresh)])
            nats = learner.mismatched_kl(labels, 0)
            references = [learner.reference_logp([label.answer])[0].sum().item() for label in labels]
            loss, _ = learner.label_loss(labels, nats, len(labels))
            loss.backward()
            found.append(torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None]))
            module.zero_grad()
            twin = module.double()
            total = torch.zeros((), dtype=torch.float64)
            for label, reference in zip(labels, references, strict=True):
                ids = torch.tensor([[*label.answer.prompt_ids, *label.answer.completion_ids]])
                start = len(label.answer.prompt_ids)
                logits = twin(input_ids=ids).logits[0, start - 1 : -1] / learner.temperature
                logp = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum()
                weight = min(math.exp(logp.item() - label.drawn_logp), 1.5)
                assert weight == pytest.approx(label.weight, rel=1e-3)
                gain = (logp - reference - nats) * (1 if label.is_wanted else -1)
                total = total + weight * (1.2 if label.is_wanted else 1) * torch.sigmoid(-learner.cfg.beta * gain)
            (total / len(labels)).backward()
            expected = torch.cat([one.grad.flatten() for one in twin.parameters() if one.grad is not None])
            assert loss.item() == pytest.approx((total / len(labels)).item(), rel=1e-4)
            torch.testing.assert_close(found[-1].double(), expected, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-4)


def test_feedback_that_waits_is_learnt_after_a_restart_and_what_was_learnt_is_not_new(tmp_path: Path) -> None:
    with looping(recipe(tmp_path)) as loop, voters(tmp_path) as people:
        for name in people.answered(loop, 0, 8):
            people.say(name, True)
        run_updates(loop, 1)
        people.say(people.answered(loop, 1, 1)[0], True)
        people.store.command("rollback", "77", people.rater_id)
        loop.next_action()
    with looping(recipe(tmp_path)) as loop:
        assert (len(loop.feedback.fresh), len(loop.feedback.learnt)) == (1, 8)
        assert loop.position.version == 1


def tried(loop: Loop, people: Any) -> None:
    """Make a version that is tried."""
    people.vote(8)
    while not loop.position.tried:
        people.vote(8)
        loop.next_action()


@pytest.mark.parametrize("is_better", [False, True])
def test_a_tried_version_is_served_or_taken_back_by_what_people_say(is_better: bool, tmp_path: Path) -> None:
    with looping(recipe(tmp_path, canary={"share": 0.5})) as loop, voters(tmp_path) as people:
        loop.next_action()
        served = weights(loop)
        tried(loop, people)
        assert (loop.position.serving, loop.position.tried, loop.position.num_updates) == (0, 1, 1)
        assert json.loads((tmp_path / TRIAL).read_text()) == {"version": 1, "share": 0.5}
        assert not (tmp_path / "final").exists()
        people.vote(8)
        loop.next_action()
        assert loop.position.num_updates == 1  # the next update waits for the end of the trial
        for version in (0, 1):
            for name in people.answered(loop, version, 30):
                people.say(name, (version == 1) == is_better)
        loop.next_action()
        assert not loop.position.tried and not (tmp_path / TRIAL).exists()
        assert loop.position.num_updates == 1
        record = people.runs.versions()[1]
        (served_now,) = [one.version for one in people.runs.versions() if one.serving]
        assert (record.accepted, served_now, loop.position.serving) == (is_better, int(is_better), int(is_better))
        assert record.note.startswith("not worse: 30 of 30" if is_better else "worse: 0 of 30")
        same = all(torch.equal(one, other) for one, other in zip(served, weights(loop), strict=True))
        assert same != is_better
        assert bool(loop.position.latencies_s) == is_better
        loop.next_action()
        assert loop.position.num_updates == 2  # learning goes on


def test_a_trial_survives_a_restart_and_ends_with_a_rollback(tmp_path: Path) -> None:
    cfg = recipe(tmp_path, canary={"share": 0.5})
    with voters(tmp_path) as people:
        with looping(cfg) as loop:
            loop.next_action()
            tried(loop, people)
            before = weights(loop)
        (tmp_path / TRIAL).unlink()
        with looping(cfg) as loop:
            assert (loop.position.tried, loop.position.serving) == (1, 0) and (tmp_path / TRIAL).exists()
            assert all(torch.equal(one, other) for one, other in zip(before, weights(loop), strict=True))
            loop.next_action()
            record = people.runs.versions()[1]
            assert record.note.startswith("tried on 50% of the conversations: 0 of 0 thumbs") and is_only_tried(record)
            assert "evidence that it is worse 1, " in record.note and record.note.endswith(", each decides at 20")
            people.store.command("rollback", "0", people.rater_id)
            loop.next_action()
            assert not loop.position.tried and not (tmp_path / TRIAL).exists()
            record = people.runs.versions()[1]
            assert "not decided: the trainer went back to version 0" in record.note and is_only_tried(record)
            people.store.command("rollback", "1", people.rater_id)
            loop.next_action()
            record = people.runs.versions()[1]
            assert record.serving and not is_only_tried(record)


def test_without_feedback_the_held_out_votes_decide_and_nothing_waits_for_ever() -> None:
    def after(seconds: float, tried: Tally, served: Tally, last: float = 0.0) -> str:
        return decide(Trial(tried, served, 0.0, last), SECTION, seconds)[0]

    none = Tally()
    assert after(1799.0, none, none) == "wait"
    assert after(1800.0, none, none) == "serve"
    assert after(1800.0, Tally(3, 1), Tally(3, 2)) == "take_back"
    assert after(1800.0, Tally(3, 2), Tally(3, 2)) == "serve"
    assert after(21600.0, Tally(3, 2), Tally(3, 2), last=21599.0) == "take_back"
    assert decide(Trial(none, none, 0.0, 0.0), LiveCanarySection(share=0.0), 0.0)[0] == "serve"


def test_a_conversation_counts_once_and_only_what_was_asked_since_the_trial_began(tmp_path: Path) -> None:
    with looping(recipe(tmp_path)) as loop, voters(tmp_path) as people:
        begun_at = time.time()
        for name in people.answered(loop, 1, 10, user="a group that shouts"):
            people.say(name, False)
        for name in people.answered(loop, 1, 2):
            people.say(name, True)
        for name in people.answered(loop, 0, 3, now=begun_at - 1):
            people.say(name, True)
        loop.read_votes()
        trial = trial_of(loop.feedback.fresh.values(), 1, 0, begun_at)
    assert (trial.tried, trial.served) == (Tally(3, 2.0), Tally(0, 0))
