"""Variants of GRPO: later updates of every ratio, rewards compared one by one, dynamic sampling, cut completions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder
from grpo_steps import build, checked_step, low_ids, low_share, moved_apart, weights_of
from recipes import PROMPTS, groups_of, grpo_recipe

from tunesmith.base.config.sections import RewardSource
from tunesmith.learn.rewards.scorer import Scores


@pytest.mark.parametrize(
    "options",
    [
        {
            "importance_sampling_level": "sequence",
            "loss_normalization": "sequence",
            "clip_low": 0.02,
            "clip_high": 0.02,
        },
        {"importance_sampling_level": "product", "loss_normalization": "sequence_sum"},
        {"surrogate": "cispo", "clip_high": 0.1, "kl": {"coef": 0.1, "bias_correction": True}},
        {"dual_clip": 1.15, "clip_high": 0.1},
    ],
)
def test_later_epochs_of_every_ratio_have_the_gradient_of_the_paper(tmp_path: Path, options: dict[str, Any]) -> None:
    state = build(grpo_recipe(tmp_path, grpo={"num_epochs": 3, **options}, optimizer={"learning_rate": 1e-2}))
    result, recorder = checked_step(state, lambda completion: low_share(completion.token_ids), apart=True)
    assert len(recorder.updates) == 3
    name = "clip_ratio/dual_mean" if "dual_clip" in options else "clip_ratio/region_mean"
    assert result.metrics[name] > 0


def test_rewards_compared_one_by_one_weigh_alike_whatever_their_size(tmp_path: Path) -> None:
    def large(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [1000.0 * share for share in low_ids(completion_ids)]

    grpo_section = {"multi_objective_aggregation": "normalize_then_sum", "kl": {"coef": 0.0}}
    gradients = []
    for reward in (low_ids, large):
        sources = (reward, RewardSource(source="length", weight=-0.5, arguments={"unit": "tokens"}))
        state = build(grpo_recipe(tmp_path, grpo=grpo_section), *sources)
        state.policy.module.generation_config.eos_token_id = list(range(3, 40))
        recorder = Recorder(state)
        state.step(state.data.train, 0)
        gradients.append(recorder.updates[0].gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-4, rtol=1e-2)


def flat_unless(*texts: str) -> Any:
    """`low_ids` for the prompts of these texts, and the same for every completion of the others."""

    def reward(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        shares = low_ids(completion_ids)
        return [share if prompt in texts else 0.1 for prompt, share in zip(prompts, shares, strict=True)]

    return reward


def test_dynamic_sampling_asks_further_prompts_until_enough_groups_teach_something(tmp_path: Path) -> None:
    teaching = PROMPTS[2:]
    state = build(grpo_recipe(tmp_path, grpo={"dynamic_sampling": 1}), flat_unless(*teaching))  # both at once
    asked = [prompt for prompt in state.data.train if prompt.content not in teaching]
    result = state.step(asked, 0)
    drawn = [str(group.prompt.content) for group in groups_of(result)]
    assert drawn[:2] == [prompt.content for prompt in asked]
    assert sorted(drawn[2:]) == sorted(teaching)
    assert result.metrics["groups/num_drawn"] == 4.0
    assert result.metrics["groups/num_dropped"] == 2.0
    assert result.metrics["updates"] == 1.0


def test_dynamic_sampling_ends_at_its_limit_and_when_all_prompts_were_asked(tmp_path: Path) -> None:
    for limit, expected in ((1, 3), (9, 4)):
        state = build(grpo_recipe(tmp_path, grpo={"dynamic_sampling": limit}), flat_unless())
        result = state.step(state.data.train[:1], 0)
        drawn = [group.prompt.id for group in groups_of(result)]
        assert len(drawn) == len(set(drawn)) == min(expected, 1 + limit)
        assert result.metrics["updates"] == 0.0


def test_dynamic_sampling_is_a_pure_function_of_seed_and_step(tmp_path: Path) -> None:
    def drawn(index: int, seed: int = 0) -> list[tuple[str, tuple[int, ...]]]:
        cfg = grpo_recipe(tmp_path, grpo={"dynamic_sampling": 2}, run={"seed": seed})
        state = build(cfg, flat_unless(PROMPTS[3]))
        groups = groups_of(state.step(state.data.train[:1], index))
        return [(group.prompt.id, completion.token_ids) for group in groups for completion in group.completions]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_truncated_completions_are_compared_but_not_learnt_from(tmp_path: Path) -> None:
    cfg = grpo_recipe(tmp_path, grpo={"mask_truncated_completions": True, "kl": {"coef": 0.0}})
    state = build(cfg)
    before = weights_of(state)
    state.policy.module.generation_config.eos_token_id = []
    result = state.step(state.data.train, 0)
    assert result.metrics["completions/clipped_ratio"] == 1.0
    assert result.metrics["updates"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(state), strict=True))


@pytest.mark.parametrize("by", ["shortest", "best_per_token"])
def test_of_many_completions_the_kept_are_compared_and_learnt(tmp_path: Path, by: str) -> None:
    """GFPO: those that are not kept take no part, neither in the baseline nor in a mean over completions."""
    options = {"keep": 2, "keep_by": by, "kl": {"coef": 0.0}, "scale": "none"}
    state, seen = build(grpo_recipe(tmp_path, grpo=options)), []
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    update = state.learner.update
    state.learner.update = lambda *given: seen.append(given) or update(*given)
    result = state.step(state.data.train, 0)
    ((batch, _, drawn_per_row, _),) = seen
    expected, num_unused = [], 0
    for group in groups_of(result):
        shares = [low_share(one.token_ids) for one in group.completions]
        costs = [
            len(one.token_ids) if by == "shortest" else -share
            for one, share in zip(group.completions, shares, strict=True)
        ]
        if by == "best_per_token":
            costs = [cost / len(one.token_ids) for cost, one in zip(costs, group.completions, strict=True)]
        kept = sorted(sorted(range(len(costs)), key=costs.__getitem__)[:2])
        mean = sum(shares[g] for g in kept) / 2
        differs = len({shares[g] for g in kept}) > 1
        expected += [shares[g] - mean for g in kept if differs]
        learnt = kept if differs else []
        num_unused += sum(len(one.token_ids) for g, one in enumerate(group.completions) if g not in learnt)
    assert batch.advantage_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert result.metrics["rollout/unused_tokens"] == num_unused
    assert drawn_per_row == 2 * len(groups_of(result)) / len(expected)


def test_a_group_smaller_than_what_is_kept_or_counted_is_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"keep": 5}, "grpo.keep is 5, but 4"),
        ({"pass_at": 5}, "grpo.pass_at is 5, but a group"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_recipe(tmp_path, grpo=options)


def test_groups_whose_sets_are_all_right_or_all_wrong_are_left_out(tmp_path: Path) -> None:
    """Of four completions, any two have a right one unless three are wrong."""
    state = build(grpo_recipe(tmp_path, grpo={"pass_at": 2, "kl": {"coef": 0.0}}))
    right_PG = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    scores = Scores(right_PG, {}, torch.ones_like(right_PG, dtype=torch.bool))
    assert state.learner.differing(scores).tolist() == [False, True, False]


def test_equal_rewards_of_different_lengths_teach_something_with_a_length_penalty(tmp_path: Path) -> None:
    def right(completions: Sequence[str], **_: object) -> list[float]:
        return [1.0] * len(completions)

    found = []
    for penalty in (0.0, 0.4):
        options = {"length_penalty": penalty, "kl": {"coef": 0.0}, "scale": "none"}
        state, seen = build(grpo_recipe(tmp_path, grpo=options), right), []
        state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
        update = state.learner.update
        state.learner.update = lambda *given, seen=seen, update=update: seen.append(given[0]) or update(*given)
        result = state.step(state.data.train, 0)
        assert result.metrics["reward"] == 1
        found.append((groups_of(result), seen))
    assert not found[0][1]
    groups, (batch,) = found[1]
    expected = []
    for group in groups:
        sizes = [len(one.token_ids) for one in group.completions]
        if len(set(sizes)) > 1:
            shorts = [0.5 - (size - min(sizes)) / (max(sizes) - min(sizes)) for size in sizes]
            expected += [0.4 * (x - sum(shorts) / len(shorts)) for x in shorts]
    assert batch.advantage_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_dppo_compares_with_the_log_probs_that_the_engine_recorded(tmp_path: Path) -> None:
    """Also after the weights have moved since: a bound of nearly 0 then cuts every token that moved the wrong way."""
    found = {}
    for surrogate in ("dppo_tv", "clip"):
        options = {"surrogate": surrogate, "kl": {"coef": 0.0}, "clip_low": 1e-6, "clip_high": 1e-6}
        state = build(grpo_recipe(tmp_path, grpo=options))
        draw = state.learner.rollouts.engine.generate

        def older(*given: Any, draw: Any = draw, state: Any = state, **more: Any) -> Any:
            groups = draw(*given, **more)
            moved_apart(state)
            return groups

        object.__setattr__(state.learner.rollouts, "engine", Wrapped(state.learner.rollouts.engine, older))
        found[surrogate] = state.step(state.data.train, 0).metrics["policy/clipfrac_avg"]
    assert found["clip"] == 0 and 0.2 < found["dppo_tv"] < 0.8


class Wrapped:
    """An engine with another `generate`."""

    def __init__(self, engine: Any, generate: Any) -> None:
        self._engine, self.generate = engine, generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_the_greedy_baseline_is_the_reward_of_the_completion_of_likeliest_tokens(tmp_path: Path) -> None:
    """ReMax: here the greedy completions are transformers' own. A prompt whose greedy reward failed is not learnt."""
    cfg = grpo_recipe(tmp_path, grpo={"baseline": "greedy", "scale": "none", "kl": {"coef": 0.0}})
    state, seen = build(cfg), []
    update = state.learner.update
    state.learner.update = lambda *given: seen.append(given) or update(*given)
    module, tokenizer = state.policy.module, state.learner.tokenizer
    baselines = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        drawn = module.generate(ids, do_sample=False, max_new_tokens=cfg.rollout.max_new_tokens, pad_token_id=0)
        baselines[prompt] = low_share(drawn[0, ids.shape[1] :].tolist())
    result = state.step(state.data.train, 0)
    expected = []
    for group in groups_of(result):
        gaps = [low_share(one.token_ids) - baselines[str(group.prompt.content)] for one in group.completions]
        expected += gaps if any(gaps) else []
    assert seen[0][0].advantage_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    scores = Scores(torch.ones(2, 2), {}, torch.ones(2, 2, dtype=torch.bool), greedy_P=torch.tensor([0.0, torch.nan]))
    judged = state.learner.judged(groups_of(result)[:2], scores)
    assert judged.valid_PG.tolist() == [[True, True], [False, False]]
    assert state.learner.differing(judged).tolist() == [True, False]


def test_the_greedy_completions_are_scored_at_their_step_and_unload_the_engine(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def reward(completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: object) -> list[float]:
        seen.append((len(completion_ids), trainer_state.global_step))
        return low_ids(completion_ids)

    cfg = grpo_recipe(tmp_path, grpo={"baseline": "greedy", "scale": "none"}, rollout={"unload_during_update": True})
    state = build(cfg, reward)
    update = state.learner.update
    loaded: list[object] = []
    state.learner.update = lambda *given: loaded.append(state.learner.engine._cache) or update(*given)
    state.step(state.data.train, 2)
    assert sorted(seen) == [(len(PROMPTS), 2), (len(PROMPTS) * 4, 2)]
    assert loaded == [None]


def test_the_share_of_tokens_that_settings_leave_out_is_a_metric(tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path, grpo={"top_entropy_share": 0.5}))
    assert 0.3 < state.step(state.data.train, 0).metrics["policy/left_out_frac"] < 0.6
    state = build(grpo_recipe(tmp_path))
    assert "policy/left_out_frac" not in state.step(state.data.train, 0).metrics
