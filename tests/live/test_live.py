"""The live loop: votes become versions, checks turn bad ones down, a killed trainer goes on exactly, rollback works."""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from jobs import forked
from live_rig import (
    PROMPTS,
    Voters,
    given_items,
    learn,
    live_recipe,
    looping,
    run_updates,
    share_of_letters,
    until,
    voters,
)
from operations import Operations
from safetensors.torch import load_file

from tunesmith.base.core.errors import DataError, RunError, TrainingError
from tunesmith.base.core.trace import watching
from tunesmith.base.runs.folder import MEASURED
from tunesmith.collect.store.records import Presentation, Verdict
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.engine.batch.upload import Uploader
from tunesmith.learn.live import loop as live
from tunesmith.learn.live.folder import open_folder
from tunesmith.learn.live.loop import Loop
from tunesmith.learn.live.vote_dpo import VoteDPO
from tunesmith.learn.live.votes import VotedPair
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.signals import StopRequest
from tunesmith.observe.profiling.hang import report

KILLED = -9


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loop.learner.policy.module.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def version_files(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "versions" / f"v{version:06d}" / "model.safetensors")


def liking(loop: Loop) -> float:
    """How much raters like what the policy writes: the mean of many draws, because two dozen texts are loud."""
    drawn = [loop.offers.draw(f"measure {index}") for index in range(16)]
    return fmean(share_of_letters(one.text) for each in drawn for one in each.completions)


def test_the_report_of_hangs_says_what_the_trainer_does(tmp_path: Path) -> None:
    with looping(live_recipe(tmp_path / "live")) as loop:
        ready = report(tmp_path / "live")
        loop.next_action()
        drawn = report(tmp_path / "live")
        waits = report(tmp_path / "live", is_hung=True)
    assert (ready.stage, ready.step, ready.is_hung) == ("ready", 0, False)
    assert drawn.stage == "drawing"
    assert f"`tunesmith live --dir {tmp_path / 'live'}` goes on" in waits.advice
    with pytest.raises(RunError, match="nothing trains"):
        report(tmp_path / "live")


def test_votes_on_what_the_policy_wrote_move_it_towards_what_raters_like(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    free = {"coef": 0.0, "target": None, "budget": None}
    live_section = {"votes_per_update": 16, "max_votes_per_update": 64, "kl": free}
    cfg = live_recipe(folder, live=live_section, optimizer={"learning_rate": 3e-3})
    with looping(cfg) as loop, voters(folder) as people:
        before = liking(loop)
        for _ in range(24):
            learn(loop, people)
        versions = people.runs.versions()
        served = loop.position.serving
        after = liking(loop)
    assert served == 24
    assert after > before + 0.05
    assert [version.version for version in versions if version.serving] == [served]
    assert (folder / "final").resolve() == (folder / "versions" / f"v{served:06d}").resolve()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert rows[-1]["kl"] > rows[0]["kl"] > 0
    accuracies = [row["rewards/accuracies"] for row in rows]
    assert fmean(accuracies[1:]) > accuracies[0]


@pytest.mark.parametrize(("update", "second"), [("dpo", ""), ("ppo", ""), ("grpo", ""), ("dpo", "postgres")])
def test_the_same_votes_make_the_same_weights_at_any_hour_and_in_any_database(
    update: str, second: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Raters here vote by what they read, so their votes are the same where the pairs are."""
    found = []
    for name, server in (("one", ""), ("two", second)):
        database = request.getfixturevalue(server).emptied() if server else None
        cfg = live_recipe(tmp_path / name, live={"update": update, "database": database})
        with looping(cfg) as loop, voters(tmp_path / name, database) as people:
            for _ in range(3):
                learn(loop, people)
            offers = [[one.text for one in offer.candidates] for offer in people.runs.offers_after(0, 1000)]
            found.append((offers, weights(loop)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("update", ["dpo", "ppo", "grpo"])
def test_the_stages_of_an_update_cover_its_operations(update: str, tmp_path: Path) -> None:
    operations = Operations()
    cfg = live_recipe(tmp_path, live={"update": update})
    with looping(cfg) as loop, voters(tmp_path) as people, watching(operations), operations:
        learn(loop, people)
    operations.check()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0 < row["rollout/slots_used"] <= 1 and row["update/padding_share"] == 0
    assert ("reward_model/micro_batch_tokens" in row) == ("rollout/unused_tokens" in row) == (update != "dpo")


def test_pairs_are_different_texts_of_the_served_version_and_duels_with_the_base_model_on_held_out_prompts(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "live"
    with looping(live_recipe(folder)) as loop, voters(folder) as people:
        learn(loop, people)
        offers = people.runs.offers_after(0, 1000)
        heldout = {prompt.content for prompt in loop.offers.prompts.heldout}
    newest = [offer for offer in offers if offer.version == 1]
    assert newest
    for offer in newest:
        first, second = offer.candidates
        assert first.text.strip() != second.text.strip()
        assert offer.heldout == (offer.prompt in heldout)
        assert second.source_id == "v1" and first.source_id in (("v0", "v1") if offer.heldout else ("v1",))
        assert len(second.token_ids or ()) == len(second.logps or ())
    assert {offer.heldout for offer in newest} == {True, False}
    assert {offer.candidates[0].source_id for offer in newest if offer.heldout} == {"v0", "v1"}
    stale = max(offer.retires_before for offer in newest)
    assert all(offer.id < stale for offer in offers if offer.version == 0)


def test_an_update_from_votes_learns_the_same_bits_from_what_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt = []
    for name, uploader in (("here", None), ("sent", Uploader("cpu"))):
        monkeypatch.setattr(setup, "uploader_to", lambda _, given=uploader: given)
        with looping(live_recipe(tmp_path / name)) as loop, voters(tmp_path / name) as people:
            learn(loop, people)
            assert loop.learner.uploader is uploader
            learnt.append([parameter.detach().clone() for parameter in loop.learner.policy.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*learnt, strict=True))


def contrary(shown: Presentation) -> Verdict:
    """On held-out prompts, the first sixteen, the good film is preferred, on all others the digits."""
    is_left = ("good" in shown.answers[0]) == (int(str(shown.prompt).split()[-1]) < 16)
    return "left" if is_left else "right"


def test_an_update_that_is_worse_on_held_out_votes_is_taken_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    cfg = live_recipe(folder, live={"check": {"min_votes": 4, "p_value": 0.6}}, dpo={"num_epochs": 40})
    with voters(folder) as people:
        people.store.add_items(people.campaign_id, given_items(24, heldout=16))
        people.vote(24, contrary)
        with looping(cfg) as loop:
            held = loop.read_votes() or loop.memory.heldout_decided(64)
            assert len(held) == 16
            before, version_before = weights(loop), loop.learner.optimizer.weight_version
            while not all(loop.learner.correct(held)):  # a served version that is right on all of them
                loop.learner.step(held, 0)
            before, version_before = weights(loop), loop.learner.optimizer.weight_version
            run_updates(loop, 1)
            after = weights(loop)
            (dropped,) = [version for version in people.runs.versions() if version.version == 1]
            assert loop.position.serving == 0
            assert loop.learner.optimizer.weight_version > version_before  # the engine must pack the old weights anew
    assert not dropped.accepted and "held-out" in dropped.note
    assert same(before, after)
    assert not (folder / "final").exists()


def test_an_update_over_the_kl_budget_is_dropped_and_the_penalty_grows(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    cfg = live_recipe(
        folder, live={"kl": {"budget": 1e-4, "target": 1e-5, "coef": 0.1}}, optimizer={"learning_rate": 1e-2}
    )
    with looping(cfg) as loop, voters(folder) as people:
        before = weights(loop)
        learn(loop, people)
        assert loop.position.serving == 0
        assert same(before, weights(loop))
        assert loop.learner.kl.value == pytest.approx(0.1 * 1.2**4)
        assert loop.position.unserved
        assert "budget" in people.runs.versions()[-1].note


def gradient(loop: Loop, votes: Sequence[VotedPair]) -> torch.Tensor:
    """The gradient that a step hands to the optimizer."""
    found: list[torch.Tensor] = []

    def keep(**_: object) -> None:
        found.extend(p.grad.flatten().clone() for p in loop.learner.policy.module.parameters() if p.grad is not None)
        raise StopIteration

    loop.learner.optimizer = copy.copy(loop.learner.optimizer)
    loop.learner.optimizer.step = keep  # type: ignore[method-assign, assignment]
    with pytest.raises(StopIteration):
        loop.learner.step(votes, 0)
    return torch.cat(found)


def test_the_gradient_does_not_depend_on_the_micro_batches(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with voters(folder) as people:
        people.store.add_items(people.campaign_id, given_items(8))
        people.vote(8, lambda shown: "tie" if "a" in str(shown.prompt) else people.verdict(shown))
    found: list[torch.Tensor] = []
    for size in (1, 3, 10):
        with looping(live_recipe(folder, dpo={"micro_batch_size": size}, model={"seed": 3})) as loop:
            loop.read_votes()
            for parameter in loop.learner.policy.module.parameters():  # a policy that is no longer its own reference
                parameter.data += 0.01 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape)
            votes = [loop.memory.fresh[vote_id] for vote_id in sorted(loop.memory.fresh)]
            found.append(gradient(loop, [*votes, *votes[:2]]))  # two raters agree
            assert loop.learner.kl.value > 0
    assert len(votes) == 8 and {vote.tie for vote in votes} == {True, False}
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-4)


def test_changed_votes_count_once_and_withdrawn_gold_and_skipped_ones_teach_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with voters(folder) as people, looping(live_recipe(folder)) as loop:
        people.store.add_items(people.campaign_id, given_items(6))
        shown = people.ask(6)
        for one, verdict in zip(shown, ("left", "left", "tie", "both_bad", "skip", "right"), strict=True):
            people.store.vote(one.token, people.rater_id, verdict)
        loop.read_votes()
        memory = loop.memory
        assert len(memory.fresh) == 4 and sum(vote.tie for vote in memory.fresh.values()) == 1
        first = next(vote for vote in memory.fresh.values() if vote.texts[0] == shown[0].answers[0])
        people.store.vote(shown[0].token, people.rater_id, "right_much")
        people.store.withdraw(shown[1].token, people.rater_id)
        loop.read_votes()
        assert len(memory.fresh) == 3
        (changed,) = [vote for vote in memory.fresh.values() if vote.texts[0] == shown[0].answers[1]]
        assert changed.rejected == first.chosen


def test_a_vote_alone_is_learnt_from_after_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    cfg = live_recipe(folder, live={"update_after_s": 5.0})
    with voters(folder) as people, looping(cfg) as loop:
        people.store.add_items(people.campaign_id, given_items(1))
        people.vote(1)
        loop.read_votes()
        (vote,) = loop.memory.fresh.values()
        assert not loop.update_is_due(vote.created_at + 4.9)
        assert loop.update_is_due(vote.created_at + 5.1)


def test_rollback_by_a_command_restores_the_weights_of_a_version_and_goes_on_from_there(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with looping(live_recipe(folder)) as loop, voters(folder) as people:
        start = weights(loop)
        for _ in range(2):
            learn(loop, people)
        assert loop.position.serving == 2
        for target in (1, 0):
            people.store.command("rollback", str(target), people.rater_id)
            loop.next_action()
            assert loop.position.serving == target
            files = version_files(folder, 1) if target else start
            assert same(files, weights(loop))
            served = [version for version in people.runs.versions() if version.serving]
            assert loop.position.num_votes == served[0].num_votes == 8 * target
            assert [version.version for version in served] == [target]
            assert served[0].note.startswith(f"went back to version {target} from version ")
            assert people.runs.offers_after(0, 1000)[-1].version == target
        people.store.command("rollback", "77", people.rater_id)
        people.store.command("rollback", "nothing", people.rater_id)
        loop.next_action()
        loop.next_action()
        assert loop.position.serving == 0
        learn(loop, people)
        assert loop.position.serving == 3 and people.runs.versions()[-1].parent == 0


def test_versions_that_learnt_from_deleted_votes_are_marked_and_later_ones_learn_without_them(tmp_path: Path) -> None:
    folder = tmp_path / "live"

    def marked(people: Voters) -> list[int]:
        return [one.version for one in people.runs.versions() if one.learnt_deleted]

    with looping(live_recipe(folder)) as loop, voters(folder) as people:
        learn(loop, people)
        other = Voters(people.store, people.runs, people.campaign_id, people.store.add_rater("Ann Doe").rater.id)
        learn(loop, other)
        other.vote(20)
        loop.read_votes()
        hers = {vote.id for vote in people.store.reader.votes_after(0) if vote.rater == "Ann Doe"}
        assert loop.position.serving == 2 and hers & set(loop.memory.fresh) and hers & set(loop.memory.learnt)
        people.store.delete_person(people.store.reader.person("Ann Doe"))
        loop.next_action()
        assert marked(people) == [2]
        known = {*loop.memory.fresh, *loop.memory.learnt, *loop.memory.heldout}
        assert known == {vote.id for vote in people.store.reader.votes_after(0)} and not known & hers
        cards = [(folder / "versions" / f"v00000{number}" / "README.md").read_text() for number in (1, 2)]
        assert ["had it deleted" in card for card in cards] == [False, True] and "Ann" not in "".join(cards)
        memory = {**loop.memory.fresh}, {**loop.memory.learnt}, {**loop.memory.heldout}
    with looping(live_recipe(folder)) as loop, voters(folder) as people:
        assert (loop.memory.fresh, loop.memory.learnt, loop.memory.heldout) == memory
        learn(loop, people)
        assert loop.position.serving == 3 and marked(people) == [2, 3]  # which began with the weights of version 2
        people.store.command("rollback", "1", people.rater_id)
        loop.next_action()
        learn(loop, people)
        assert people.runs.versions()[-1].parent == 1 and marked(people) == [2, 3]
        # A vote that waits was learnt by none.
        other = Voters(people.store, people.runs, people.campaign_id, people.store.add_rater("Bob Roe").rater.id)
        other.vote(20)
        loop.read_votes()
        people.store.delete_person(people.store.reader.person("Bob Roe"))
        loop.next_action()
        assert marked(people) == [2, 3]


def test_nothing_that_was_computed_of_deleted_answers_is_kept_in_memory_or_checkpoints(tmp_path: Path) -> None:
    """Her own text is in what the trainer computed of it once, and in checkpoints."""
    reasons = {"weight": 0.1, "template": "{reason} {prompt}"}
    section = {"selection": {"method": "drts"}, "raters": "estimated", "reasons": reasons}
    cfg = live_recipe(tmp_path, live=section)
    with looping(cfg) as loop, voters(tmp_path) as people:
        ann = replace(people, rater_id=people.store.add_rater("Ann Doe").rater.id)
        learn(loop, people)
        while shown := ann.ask(20):
            for one in shown:
                ann.store.vote(one.token, ann.rater_id, "left", reason="Ann says so.")
        learn(loop, ann)
        vote = next(one for one in loop.memory.train if one.taught_ids)
        selection = loop.offers.selection
        assert selection is not None and set(vote.answers) <= selection.features.keys()
        assert set(vote.answers) <= loop.learner.reference_logps.keys()
        people.store.delete_person(people.store.reader.person("Ann Doe"))
        loop.next_action()
        known = set(loop.memory.answers)
        assert known and not known & set(vote.answers)
        assert selection.features.keys() <= known and loop.learner.reference_logps.keys() <= known
        assert all(not one.taught_ids for one in loop.memory.train)
        assert len(list(loop.folder.files.checkpoints.glob("step-*"))) == 1
    with looping(cfg) as loop:
        assert loop.learner.reference_logps.keys() <= known
        assert "Ann" not in str(loop.weigh(loop.memory.train))


def test_thumbs_of_a_deleted_user_are_forgotten_and_the_record_of_an_earlier_release_goes_by_its_time(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "live"
    recipe = live_recipe(folder, live={"update_after_s": 1e-6})
    with looping(recipe) as loop, voters(folder) as people:
        first, second = people.answered(loop, 0, 2)
        for name in (first, second):
            people.say(name, True, metric=f"thumbs {name}")
            run_updates(loop, loop.position.num_updates + 1)
        assert len(loop.feedback.learnt) == 2
        early = people.runs.versions()[1]
        loop.folder.runs.add_version(replace(early, last_vote_id=None, last_feedback_id=None, last_request_id=None))
        people.store.delete_person(people.store.reader.person(second, "app"))
        loop.next_action()
        loop.next_action()  # the second of two commands: of requests, and of everything
        assert [one.learnt_deleted for one in people.runs.versions()] == [False, False, True]
        assert [one.metric for one in loop.feedback.learnt.values()] == [f"thumbs {first}"]
        people.store.delete_person(people.store.reader.person(first, "app"))
        loop.next_action()
        loop.next_action()  # the second of two commands: of requests, and of everything
        assert [one.learnt_deleted for one in people.runs.versions()] == [False, True, True]
        assert not loop.feedback.learnt and people.store.reader.inferences([first, second]) == {}


def test_votes_that_waited_at_a_command_are_learnt_from_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with looping(live_recipe(folder)) as loop, voters(folder) as people:
        people.store.add_items(people.campaign_id, given_items(5))
        people.vote(5)
        people.store.command("rollback", "77", people.rater_id)
        loop.next_action()
        assert loop.position.command_cursor
    with looping(live_recipe(folder)) as loop:
        assert len(loop.memory.fresh) == 5


def test_too_many_updates_that_are_not_finite_end_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_votes = VoteDPO.micro_batch_loss

    def not_finite(self: VoteDPO, *given: Any, **options: Any) -> Any:
        loss, *rest = of_votes(self, *given, **options)
        return loss * torch.nan, *rest

    monkeypatch.setattr(VoteDPO, "micro_batch_loss", not_finite)
    folder = tmp_path / "live"
    cfg = live_recipe(folder, optimizer={"max_refused_steps": 3}, live={"replay": 0.0})
    with looping(cfg) as loop, voters(folder) as people:
        learn(loop, people)
        learn(loop, people)
        with pytest.raises(TrainingError, match=r"3 optimizer steps in a row .* version 0 is served"):
            learn(loop, people)


def outcome(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changing = (*MEASURED, "votes/to_version_s")
    model = (folder / "final" / "model.safetensors").read_bytes()
    result = json.loads((folder / "result.json").read_text())
    return {
        "weights": hashlib.sha256(model).hexdigest(),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(changing)} for row in rows],
        "result": {k: v for k, v in result.items() if k not in ("path", "vote_to_version_median_s")},
    }


def voted(folder: Path) -> Path:
    """A folder with 24 votes to learn from and 8 held-out ones."""
    with voters(folder) as people:
        people.store.add_items(people.campaign_id, given_items(32, heldout=8))
        people.vote(32)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of three updates on the votes of `voted`."""
    folder = voted(tmp_path_factory.mktemp("live") / "whole")
    until(folder, 3)
    return outcome(folder)


@pytest.mark.parametrize(
    "fault", ["update/forward:kill:3", "live/version:kill:2", "checkpoint/tensors:kill:5", "live/saved:kill:2"]
)
def test_a_killed_trainer_goes_on_to_the_same_weights(
    fault: str, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    killed = voted(tmp_path / "killed")
    assert forked(until, killed, 3, fault=fault) == KILLED
    until(killed, 3)
    assert outcome(killed) == uninterrupted
    assert uninterrupted["result"]["votes"] == 24


def test_a_folder_is_not_continued_with_another_model_or_other_prompts_nor_by_two_trainers(tmp_path: Path) -> None:
    folder = voted(tmp_path / "live")
    until(folder, 1)
    with (
        pytest.raises(RunError, match=r"model\.name.*tiny:llama.*tiny:gpt2"),
        looping(live_recipe(folder, model={"name": "tiny:gpt2"})),
    ):
        pass
    with looping(live_recipe(folder)), pytest.raises(RunError, match="in use"), looping(live_recipe(folder)):
        pass


def test_the_trainer_starts_without_votes_and_without_prompts_held_out_it_says_what_to_change(tmp_path: Path) -> None:
    with looping(live_recipe(tmp_path / "alone")) as loop:
        loop.next_action()
        loop.next_action()
        assert loop.offers.open
        assert VoteReader.open(tmp_path / "none.db").votes_after(0) == []
    recipe = live_recipe(tmp_path / "x", prompts={"heldout_fraction": 0.0})
    with open_folder(recipe) as folder, pytest.raises(DataError, match="heldout_fraction"):
        live.build(recipe, folder, StopRequest(), PROMPTS)


@pytest.mark.parametrize(("update", "heads"), [("grpo", 1), ("ppo", 1), ("ppo", 3)])
def test_votes_teach_a_reward_model_and_the_policy_follows_it(update: str, heads: int, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    several = {"heads": {"count": heads}, "pessimism": 1.0} if heads > 1 else {}
    cfg = live_recipe(
        folder,
        live={"update": update, "votes_per_update": 16, "max_votes_per_update": 16},
        reward_model={"num_epochs": 4, "pairs_per_step": 8, "micro_batch_size": 8, **several},
        optimizer={"head_learning_rate": 1e-2},
        grpo={"micro_batch_size": 8},
        ppo={"micro_batch_size": 8},
    )
    with looping(cfg) as loop, voters(folder) as people:
        for _ in range(2):
            learn(loop, people)
        assert loop.position.serving >= 1
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward_model/accuracy"] > (0.6 if heads == 1 else 0.5)  # a head sees two thirds of few votes
    assert rows[-1]["kl"] != 0
    if heads > 1:
        assert rows[-1]["rewards/votes/mean"] < rows[-1]["rewards/votes/mean_of_heads"]
        assert 0 <= rows[-1]["rewards/votes/unfamiliar"] <= 1


def test_old_votes_are_replayed_only_once_no_new_ones_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    learnt: list[int] = []
    step = VoteDPO.step

    def counted(learner: VoteDPO, votes: Sequence[VotedPair], *rest: Any) -> Any:
        learnt[-1] += len(votes)
        return step(learner, votes, *rest)

    monkeypatch.setattr(VoteDPO, "step", counted)
    recipe = live_recipe(tmp_path, live={"heldout_prompts_per_round": 0})
    with looping(recipe) as loop, voters(tmp_path) as people:
        while len(loop.memory.fresh) < 24:
            loop.refill()
            people.vote(24 - len(loop.memory.fresh), lambda _: "left")
            loop.read_votes()
        for _ in range(3):
            learnt.append(0)
            loop.update()
    assert learnt == [8, 8, 16]
