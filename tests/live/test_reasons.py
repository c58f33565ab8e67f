"""Reasons of votes and edits of answers: the policy that reads them teaches itself that does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from live_rig import Voters, live_recipe, looping, run_updates, voters

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.learn.live.loop import Loop

NO_KL = {"coef": 0.0, "target": None, "budget": None}


def give_votes(loop: Loop, people: Voters, reason: str = "plain words") -> None:
    """Votes on all that the loop draws, of which every second one has a reason."""
    loop.refill()
    given = 0
    while shown := people.ask(20):
        for one in shown:
            said = reason if given % 2 == 0 else ""
            people.store.vote(one.token, people.rater_id, people.verdict(one), said)
            given += 1


def fresh(loop: Loop) -> list[Any]:
    return [loop.memory.fresh[key] for key in sorted(loop.memory.fresh)]


def test_the_gradient_of_reasons_is_that_of_a_float64_twin(tmp_path: Path) -> None:
    """The twin: the reverse KL by its sums, each answer alone in a float64 copy of the model."""
    templates = {"template": "({reason}; not: {rejected}) {prompt}", "edit_template": "({edit}) {prompt}"}
    cfg = live_recipe(tmp_path, live={"reasons": {"weight": 0.3, **templates}, "kl": NO_KL})
    with looping(cfg) as loop, voters(tmp_path) as people:
        give_votes(loop, people)
        for name in people.answered(loop, 0, 2):
            people.say(name, " written by hand", metric="demonstration")
        loop.read_votes()
        votes = [vote for vote in fresh(loop) if vote.taught_ids]
        assert sorted(vote.is_edit for vote in votes)[-3:] == [False, True, True]
        learner, module = loop.learner, loop.learner.policy.module
        loss, stats = learner.reason_loss(votes, 10)
        loss.backward()
        found = torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])
        module.zero_grad()
        twin, total, divergences = module.double(), torch.zeros((), dtype=torch.float64), []
        for vote in votes:
            chosen, rejected = vote.texts
            said = f"({chosen})" if vote.is_edit else f"(plain words; not: {rejected})"
            read = encode_prompt(learner.tokenizer, Prompt("", f"{said} {vote.prompt.content}"))
            answers = [vote.rejected] if vote.is_edit else [vote.chosen, vote.rejected]
            for answer in answers:
                logps = []
                for prompt_ids in (answer.prompt_ids, read):
                    ids = torch.tensor([[*prompt_ids, *answer.completion_ids]])
                    logits = twin(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1] / learner.temperature
                    logps.append(logits.log_softmax(-1))
                own, other = logps[0], logps[1].detach()
                divergence_T = (own.exp() * (own - other)).sum(-1)
                divergences.append(divergence_T.detach())
                total = total + divergence_T.mean() / len(answers)
        (0.3 * total / 10).backward()
        expected = torch.cat([one.grad.flatten() for one in twin.parameters() if one.grad is not None])
    assert loss.item() == pytest.approx((0.3 * total / 10).item(), rel=1e-4)
    assert stats.metrics()["loss"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-4)
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-3)


def test_an_update_learns_reasons_beside_the_pairs(tmp_path: Path) -> None:
    cfg = live_recipe(tmp_path, live={"reasons": {"weight": 0.5}, "kl": NO_KL, "update_after_s": 1e-6})
    with looping(cfg) as loop, voters(tmp_path) as people:
        give_votes(loop, people)
        run_updates(loop, 1)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["reasons/loss"] > 0 and 0 <= row["reasons/teacher_agreement"] <= 1 and "rewards/chosen" in row


def test_votes_without_a_reason_or_with_one_that_is_too_long_are_learnt_as_pairs_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with looping(live_recipe(tmp_path, live={"reasons": {"weight": 0.5}})) as loop, voters(tmp_path) as people:
        loop.memory.max_tokens = 150
        give_votes(loop, people, reason="x" * 200)
        loop.read_votes()
        votes = fresh(loop)
        assert votes and not any(vote.taught_ids for vote in votes)
    assert "the reason of vote" in caplog.text


def test_reasons_are_not_learnt_unless_they_have_a_weight(tmp_path: Path) -> None:
    with looping(live_recipe(tmp_path)) as loop, voters(tmp_path) as people:
        give_votes(loop, people)
        loop.read_votes()
        assert fresh(loop) and not any(vote.taught_ids for vote in fresh(loop))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("template", "{reason}", "has no {prompt}"),
        ("template", "{edit} {prompt}", r"has \{edit\}, of which there is no text; there are \{prompt\}, \{reason\}"),
        ("edit_template", "{reason} {prompt}", r"there are \{prompt\}, \{edit\}"),
    ],
)
def test_templates_that_cannot_be_filled_are_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("live", overrides={"live.reasons": {"weight": 1, key: value}})
