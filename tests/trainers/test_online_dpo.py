"""Online DPO: the best and the worst completion of a group are a pair, and the step has the gradient of the paper."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder, double
from grpo_steps import moved_apart
from jobs import outcome
from recipes import PROMPTS, Started, groups_of, online_dpo_recipe, training
from torch.nn.functional import logsigmoid

from tunesmith.base.core.errors import InputError
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers.policy_step import Credit, minibatch_rows
from tunesmith.learn.trainers.resume import Inputs, resume


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary: easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def test_a_step_has_the_gradient_of_dpo_on_the_best_and_the_worst(tmp_path: Path) -> None:
    beta = 0.4
    cfg = online_dpo_recipe(tmp_path, online_dpo={"beta": beta})
    state: Any = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    reference = double(state.policy.module)
    moved_apart(state)
    model, recorder = double(state.policy.module), Recorder(state)
    result = state.step(state.data.train, 0)

    def logp(net: Any, group: Any, completion: Any) -> torch.Tensor:
        ids = [*group.prompt_token_ids, *completion.token_ids]
        logits_SV = net(torch.tensor([ids])).logits[0, len(group.prompt_token_ids) - 1 : -1]
        return torch.log_softmax(logits_SV, dim=-1)[range(len(completion.token_ids)), completion.token_ids].sum()

    losses = []
    for group in groups_of(result):
        rewards = [low_ids([one.token_ids])[0] for one in group.completions]
        if len(set(rewards)) == 1:
            continue
        ends = [group.completions[rewards.index(pick(rewards))] for pick in (max, min)]
        chosen, rejected = (logp(model, group, one) - logp(reference, group, one).detach() for one in ends)
        losses.append(-logsigmoid(beta * (chosen - rejected)))
    assert len(losses) > 1
    loss = torch.stack(losses).mean()
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    size = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    (update,) = recorder.updates
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            update.gradients[name].double(), parameter.grad, atol=2e-5 * size, rtol=1e-3, msg=name
        )


def test_pairs_are_not_torn_apart() -> None:
    section = online_dpo_recipe(Path()).online_dpo.model_copy(update={"num_epochs": 2, "num_minibatches": 3})
    found = list(minibatch_rows(20, section, 0, together=2))
    assert len(found) == 6
    for rows in found:
        assert all(second == first + 1 and first % 2 == 0 for first, second in zip(rows[::2], rows[1::2], strict=True))
    assert sorted(row for rows in found[:3] for row in rows) == list(range(20))


@pytest.mark.parametrize("options", [{}, {"loss": "simpo", "beta": 2.0}, {"num_epochs": 2, "num_minibatches": 2}])
def test_it_learns_and_goes_on_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    sections = {"online_dpo": options, "rollout": {"prompts_per_step": 16}, "optimizer": {"learning_rate": 5e-3}}
    whole = training(online_dpo_recipe(tmp_path, **sections, run={"steps": 12}), prompts=PROMPTS, rewards=[low_ids])
    rewards = [row["reward"] for row in whole.metrics]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2
    part = training(
        online_dpo_recipe(tmp_path, **sections, run={"steps": 12, "checkpoint_every": 5}),
        prompts=PROMPTS,
        rewards=[low_ids],
    )
    shutil.rmtree(part.run_dir / "final")
    (part.run_dir / "result.json").unlink()
    for checkpoint in sorted((part.run_dir / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    resume(part.run_dir, inputs=Inputs(prompts=PROMPTS, rewards=[low_ids]), progress=False)
    assert outcome(part.run_dir) == outcome(whole.run_dir)


def test_a_step_without_a_difference_learns_nothing(tmp_path: Path) -> None:
    state: Any = Started(
        online_dpo_recipe(tmp_path), prompts=PROMPTS, rewards=[lambda completions, **_: [1.0] * len(completions)]
    )
    result = state.step(state.data.train, 0)
    assert result.metrics["updates"] == 0 and result.metrics["frac_reward_zero_std"] == 1


def test_what_a_pair_cannot_be_is_refused(tmp_path: Path) -> None:
    for sections, message in (
        ({"online_dpo": {"micro_batch_size": 3}}, "a pair is two sequences"),
        ({"online_dpo": {"loss": "kto"}}, "a group gives a pair"),
        ({"rollout": {"completions_per_prompt": 1}}, "greater than or equal to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            online_dpo_recipe(tmp_path, **sections)


def test_failed_rewards_are_in_no_pair_and_of_equal_ones_the_first_is(tmp_path: Path) -> None:
    learner: Any = Started(online_dpo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids]).learner
    reward_PG = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 9.0, 4.0, 0.0], [1.0, 1.0, 7.0, 1.0]])
    valid_PG = torch.tensor([[True] * 4, [True, False, True, False], [True, True, False, True]])
    credit = learner.credit([], Scores(reward_PG, {}, valid_PG), None)
    assert credit.advantage_PG.tolist() == [[-1, 1, 0, 0], [1, 0, -1, 0], [0, 0, 0, 0]]
    assert torch.equal(credit.learnt_PG, credit.advantage_PG != 0)


def test_a_credit_of_another_shape_is_named(tmp_path: Path) -> None:
    state: Any = Started(online_dpo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    state.learner.credit = lambda *_: Credit(torch.ones(4, dtype=torch.bool), torch.ones(4))
    with pytest.raises(InputError, match=r"credit\.learnt_PG"):
        state.step(state.data.train, 0)
