"""Online DPO: the best and the worst completion of a group are a pair, and the step has the gradient of the paper."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
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
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.batch.rollout import Completion, Group, Trajectory, Turn
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
    found = list(minibatch_rows([[2 * pair, 2 * pair + 1] for pair in range(10)], section, 0))
    assert len(found) == 6
    for rows in found:
        assert all(second == first + 1 and first % 2 == 0 for first, second in zip(rows[::2], rows[1::2], strict=True))
    assert sorted(row for rows in found[:3] for row in rows) == list(range(20))


def talk(draw: random.Random, *lengths: int) -> Completion:
    """A trajectory with a sample for each of `lengths`, as where a template rewrites the history: each has a turn of
    two tokens, a reply of one, and a turn of the others.
    """
    found: tuple[Completion, ...] = ()
    for number, length in enumerate(lengths):
        ids, zeros = tuple(draw.choices(range(3, 250), k=length)), (0.0,) * length
        turns = (Turn(0, 2), Turn(3, length))
        front = tuple(draw.choices(range(3, 250), k=4)) if number else None
        one = Completion(ids, zeros, zeros, "", "stop", trajectory=Trajectory(turns, (), "completed"), prompt_ids=front)
        found = (*found, replace(one, earlier=found))
    return found[-1]


@pytest.mark.parametrize(("micro_batch_size", "num_minibatches"), [(2, 1), (6, 1), (100, 1), (4, 2)])
def test_a_trajectory_of_several_samples_has_the_log_prob_of_all_its_turns(
    tmp_path: Path, micro_batch_size: int, num_minibatches: int
) -> None:
    section = {"micro_batch_size": micro_batch_size, "num_minibatches": num_minibatches, "beta": 0.4}
    state: Any = Started(online_dpo_recipe(tmp_path, online_dpo=section), prompts=PROMPTS, rewards=[low_ids])
    reference = double(state.policy.module)
    moved_apart(state)
    draw = random.Random(0)
    shapes = [((5,), (4, 6), (7,)), ((6, 5, 4), (9,), (5, 5)), ((5,), (8,), (4,)), ((4, 4), (5, 7, 9), (6,))]
    groups = [
        Group(Prompt(str(number), "a"), (1, 2, number + 3), tuple(talk(draw, *lengths) for lengths in of_group), 0)
        for number, of_group in enumerate(shapes)
    ]
    reward_PG = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0], [1.0, 2.0, 3.0], [0.5, 0.0, 0.2]])
    scores = Scores(reward_PG, {}, torch.ones(4, 3, dtype=torch.bool))
    state.learner.draw = lambda *_: (groups, scores)
    recorder = Recorder(state)
    result = state.step(state.data.train, 0)

    def logp(net: Any, group: Group, place: int) -> torch.Tensor:
        found = torch.zeros((), dtype=torch.float64)
        for sample in group.completions[place].samples:
            front = sample.prompt_ids or group.prompt_token_ids
            logits_SV = net(torch.tensor([[*front, *sample.token_ids]])).logits[0, len(front) - 1 : -1]
            logp_T = torch.log_softmax(logits_SV, dim=-1)[range(len(sample.token_ids)), sample.token_ids]
            found = found + logp_T[torch.tensor(sample.is_sampled)].sum()
        return found

    def loss_of(net: Any, numbers: Sequence[int]) -> torch.Tensor:
        losses = []
        for number in numbers:
            ends = [int(pick(reward_PG[number], dim=0)) for pick in (torch.argmax, torch.argmin)]
            chosen, rejected = (
                logp(net, groups[number], end) - logp(reference, groups[number], end).detach() for end in ends
            )
            losses.append(-logsigmoid(0.4 * (chosen - rejected)))
        return torch.stack(losses).mean()

    assert len(recorder.updates) == num_minibatches
    order = permutation(derive(state.rollouts.seed, "minibatches", 0), 0, 4)
    (own, *_), first = chunks(list(order), 4 // num_minibatches), recorder.updates[0]
    model = double(state.policy.module)
    model.load_state_dict({name: weight.double() for name, weight in first.weights.items()}, strict=False)
    loss = loss_of(model, own)
    loss.backward()
    if num_minibatches == 1:
        assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result.metrics["rewards/accuracies"] in (0, 0.25, 0.5, 0.75, 1)
    size = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            first.gradients[name].double(), parameter.grad, atol=2e-5 * size, rtol=1e-3, msg=name
        )


def test_a_completion_without_a_token_is_in_no_pair(tmp_path: Path) -> None:
    learner: Any = Started(online_dpo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids]).learner
    none = Completion((), (), (), "", "length", trajectory=Trajectory((), (), "context_full"))
    said = talk(random.Random(0), 5)
    groups = [
        Group(Prompt("a", "a"), (1,), (none, said, said), 0),
        Group(Prompt("b", "b"), (1,), (none, none, said), 0),
    ]
    reward_PG = torch.tensor([[9.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    credit = learner.credit(groups, Scores(reward_PG, {}, torch.ones(2, 3, dtype=torch.bool)), None)
    assert credit.advantage_PG.tolist() == [[0, -1, 1], [0, 0, 0]]


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
    token = Completion((5,), (-1.0,), (-1.0,), "a", "length")
    groups = [Group(Prompt(name, name), (1,), (token,) * 4, 0) for name in "abc"]
    credit = learner.credit(groups, Scores(reward_PG, {}, valid_PG), None)
    assert credit.advantage_PG.tolist() == [[-1, 1, 0, 0], [1, 0, -1, 0], [0, 0, 0, 0]]
    assert torch.equal(credit.learnt_PG, credit.advantage_PG != 0)


def test_a_credit_of_another_shape_is_named(tmp_path: Path) -> None:
    state: Any = Started(online_dpo_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    state.learner.credit = lambda *_: Credit(torch.ones(4, dtype=torch.bool), torch.ones(4))
    with pytest.raises(InputError, match=r"credit\.learnt_PG"):
        state.step(state.data.train, 0)
