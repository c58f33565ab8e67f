"""Best-of-n keeps the best completions by the reward and learns them as SFT does."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, best_of_n_recipe, groups_of, training

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError
from tunesmith.learn.algorithms.advantages import highest


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary: easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def test_the_best_are_kept_of_equal_ones_the_first_and_of_failed_ones_none() -> None:
    reward_PG = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 4.0, 9.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    valid_PG = torch.tensor([[True] * 4, [True, True, False, True], [False] * 4])
    assert highest(reward_PG, valid_PG, 1).flatten().nonzero().flatten().tolist() == [1, 4]
    assert highest(reward_PG, valid_PG, 2).flatten().nonzero().flatten().tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"keep": 2}, {"kl": {"coef": 0.3, "place": "loss"}}])
def test_the_gradient_is_that_of_the_likelihood_of_the_kept_completions(tmp_path: Path, options: Any) -> None:
    cfg = best_of_n_recipe(tmp_path, best_of_n=options, rollout={"temperature": 0.8, "prompts_per_step": 4})
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    model = copy.deepcopy(state.policy.module).double()
    gradients: dict[str, torch.Tensor] = {}
    step = state.optimizer.step

    def recording(**arguments: Any) -> Any:
        named = state.policy.module.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return step(**arguments)

    state.optimizer.step = recording
    groups = groups_of(state.step(state.data.train, 0))
    keep = options.get("keep", 1)
    best = [
        (group, one)
        for group in groups
        for one in sorted(group.completions, key=lambda one: -low_ids([one.token_ids])[0])[:keep]
    ]
    losses = []
    for group, one in best:
        ids = [*group.prompt_token_ids, *one.token_ids]
        logits_SV = model(torch.tensor([ids])).logits[0, len(group.prompt_token_ids) - 1 : -1] / 0.8
        losses.append(-torch.log_softmax(logits_SV, -1)[range(len(one.token_ids)), one.token_ids])
    (torch.cat(losses).mean()).backward()  # policy and reference are equal, so the KL has no gradient yet
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    size = max(gradient.abs().max().item() for gradient in expected.values())
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)


def test_the_reward_rises(tmp_path: Path) -> None:
    cfg = best_of_n_recipe(
        tmp_path,
        rollout={"prompts_per_step": 4, "completions_per_prompt": 8, "max_new_tokens": 8},
        best_of_n={"num_epochs": 2},
        optimizer={"learning_rate": 5e-3},
        run={"steps": 25},
    )
    rows = training(cfg, prompts=PROMPTS, rewards=[low_ids]).metrics
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert all(row["reward/kept"] >= row["reward"] for row in rows)


def test_a_kl_in_the_reward_changes_which_completions_are_best(tmp_path: Path) -> None:
    cfg = best_of_n_recipe(tmp_path, best_of_n={"kl": {"coef": 50.0}})
    state = Started(cfg, prompts=PROMPTS, rewards=[low_ids])
    with torch.no_grad():
        for parameter in state.policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    plain = Started(best_of_n_recipe(tmp_path), prompts=PROMPTS, rewards=[low_ids])
    plain.policy.module.load_state_dict(state.policy.module.state_dict())
    kept = [one.step(one.data.train, 0).metrics["reward/kept"] for one in (state, plain)]
    assert kept[0] < kept[1]


def test_all_completions_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"best_of_n\.keep is 8, but 8 completions"):
        load_recipe("best_of_n", overrides={"best_of_n.keep": 8})
