"""GRPO: the step is what the papers say, it learns, and what teaches nothing takes no part in it."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder
from grpo_steps import build, checked_step, low_ids, low_share, weights_of
from recipes import PROMPTS, groups_of, grpo_recipe, training
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.trace import trace
from tunesmith.base.runs.folder import MEASURED, read_jsonl
from tunesmith.engine.batch.rollout import Completion
from tunesmith.learn.rewards.sources import RewardLike


def constant(completions: Sequence[str], **_: object) -> list[float]:
    """The same for all, and a number that does not sum exactly."""
    return [0.1] * len(completions)


def run(cfg: GRPORecipe, reward: RewardLike = low_ids) -> Any:
    return training(cfg, prompts=PROMPTS, rewards=[reward])


def digest(result: Any) -> str:
    return hashlib.sha256((result.run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def timeless(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in metrics]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_weights_metrics_and_tokens(tmp_path: Path, dtype: str) -> None:
    model = {"dtype": dtype}
    first, again = (run(grpo_recipe(tmp_path, model=model, grpo={"num_minibatches": 2})) for _ in range(2))
    assert digest(first) == digest(again)
    assert (first.run_dir / "samples.jsonl").read_text() == (again.run_dir / "samples.jsonl").read_text()
    assert timeless(first.metrics) == timeless(again.metrics)
    assert digest(run(grpo_recipe(tmp_path, model=model, run={"seed": 1}))) != digest(first)


@pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out", "scale": "none", "num_minibatches": 2}])
def test_the_reward_rises(tmp_path: Path, options: dict[str, Any]) -> None:
    cfg = grpo_recipe(
        tmp_path,
        rollout={"prompts_per_step": 4, "completions_per_prompt": 8, "max_new_tokens": 8},
        grpo={"micro_batch_size": 32, **options},
        optimizer={"learning_rate": 5e-3},
        run={"steps": 25},
    )
    rewards = [row["reward"] for row in run(cfg).metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "batch"},
        {"scale": "none"},
        {"baseline": "leave_one_out", "scale": "none"},
        {"entropy_coef": 0.1, "kl": {"coef": 0.0}},
        {"micro_batch_size": 3, "kl": {"coef": 0.5}},
        {"scale": "advantages", "kl": {"coef": 0.2, "bias_correction": True}},
        {"loss_normalization": "sequence", "micro_batch_size": 3},
        {"loss_normalization": "sequence_sum", "mask_truncated_completions": True},
        {"loss_normalization": "constant", "scale": "none", "micro_batch_size": 3},
        {"loss_normalization": "micro_batch", "micro_batch_size": 16},
        {"surrogate": "cispo"},
        {"importance_sampling_level": "product", "loss_normalization": "sequence"},
    ],
)
def test_the_gradient_is_that_of_the_loss_and_of_the_mean_that_the_recipe_names(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    kl = {"estimator": "k3", "place": "loss", "coef": 0.05, **options.pop("kl", {})}
    cfg = grpo_recipe(tmp_path, grpo={**options, "kl": kl}, rollout={"temperature": 0.8})
    checked_step(build(cfg), lambda completion: low_share(completion.token_ids), apart=True)


def test_the_gradient_of_a_later_epoch_is_clipped_against_the_policy_that_drew_the_tokens(tmp_path: Path) -> None:
    options = {"num_epochs": 3, "clip_low": 0.1, "clip_high": 0.15, "kl": {"coef": 0.05}}
    state = build(grpo_recipe(tmp_path, grpo=options, optimizer={"learning_rate": 1e-2}))
    result, recorder = checked_step(state, lambda completion: low_share(completion.token_ids), apart=True)
    assert len(recorder.updates) == 3
    assert result.metrics["clip_ratio/low_mean"] > 0
    assert result.metrics["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_kl_in_the_reward_is_subtracted_before_groups_are_compared(tmp_path: Path, baseline: str) -> None:
    options = {"baseline": baseline, "scale": "none", "kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}}
    state = build(grpo_recipe(tmp_path, grpo=options))
    result, _ = checked_step(state, lambda completion: low_share(completion.token_ids), apart=True)
    assert abs(result.metrics["objective/kl"]) > 0.01
    assert result.metrics["reward"] == pytest.approx(
        sum(low_share(c.token_ids) for group in groups_of(result) for c in group.completions) / 16
    ), "the reward is shown without the penalty"


def test_a_single_update_equals_the_first_of_several_and_needs_no_pass_of_the_old_policy(tmp_path: Path) -> None:
    recorders, stages = [], []
    for num_epochs in (1, 2):
        options, again = {"num_epochs": num_epochs, "kl": {"coef": 0.0}}, {"recompute_logps": True}
        state = build(grpo_recipe(tmp_path, grpo=options, rollout=again))
        recorders.append(Recorder(state))
        with trace() as times:
            result = state.step(state.data.train, 0)
        stages.append(set(times.metrics()))
        assert result.metrics["updates"] == num_epochs
    single, several = (recorder.updates[0].gradients for recorder in recorders)
    for name, gradient in single.items():
        torch.testing.assert_close(several[name], gradient, atol=1e-6, rtol=1e-4)
    assert stages[1] - stages[0] == {"time/old_policy_s", "old_policy/computed_tokens"}
    assert "time/reference_s" not in stages[0] | stages[1]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_micro_batches_do_not_change_the_update(tmp_path: Path, micro_batch_size: int) -> None:
    def updated(size: int) -> torch.Tensor:
        state = build(grpo_recipe(tmp_path, grpo={"micro_batch_size": size, "num_minibatches": 2}))
        state.step(state.data.train, 0)
        return torch.cat([parameter.flatten() for parameter in weights_of(state)])

    # Adam's first step has the size of the learning rate whatever the gradient's, so rounding shows only where it is
    # near 0.
    assert ((updated(micro_batch_size) - updated(4)).abs() > 1e-5).float().mean() < 0.01


def test_groups_of_equal_rewards_are_left_out_and_counted(tmp_path: Path) -> None:
    def equal_for_the_film(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [
            0.1 if text == "The film" else low_share(ids) for text, ids in zip(prompts, completion_ids, strict=True)
        ]

    state = build(grpo_recipe(tmp_path), equal_for_the_film)
    films = set()

    def reward(completion: Completion) -> float:
        return 0.1 if completion.token_ids in films else low_share(completion.token_ids)

    draw = state.rollouts.engine.generate

    def noting(*arguments: Any, **options: Any) -> Any:
        groups = draw(*arguments, **options)
        films.update(c.token_ids for group in groups if group.prompt.content == "The film" for c in group.completions)
        return groups

    state.rollouts.engine.generate = noting  # type: ignore[method-assign]
    result, _ = checked_step(state, reward)
    assert films
    assert result.metrics["groups/num_dropped"] == 1.0
    assert result.metrics["frac_reward_zero_std"] == 0.25
    assert result.metrics["num_tokens"] == sum(
        len(c.token_ids) for group in groups_of(result) for c in group.completions
    )


def test_if_no_group_varies_the_weights_stay_and_the_metrics_say_so(tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path), constant)
    before, version = weights_of(state), state.optimizer.weight_version
    result = state.step(state.data.train, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(state), strict=True))
    assert state.optimizer.weight_version == version
    assert result.report is None
    expected = {"frac_reward_zero_std": 1.0, "groups/num_dropped": 4.0, "updates": 0.0, "refused_steps": 0.0}
    assert {name: result.metrics[name] for name in expected} == expected
    assert result.metrics["reward"] == pytest.approx(0.1)


def test_a_run_in_which_nothing_is_learnt_ends_well_with_one_finding(tmp_path: Path) -> None:
    result = run(grpo_recipe(tmp_path), constant)
    assert [row["updates"] for row in result.metrics] == [0.0] * 3
    findings = [row for row in read_jsonl(result.run_dir / "findings.jsonl") if row["name"] == "no_signal"]
    assert [finding["step"] for finding in findings] == [1]
    start = build(grpo_recipe(tmp_path), constant).policy.module
    final = AutoModelForCausalLM.from_pretrained(result.run_dir / "final", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), final.parameters(), strict=True))


def dropping(tmp_path: Path, condition: str) -> RewardSource:
    """`low_ids` that fails where `condition` of the ids holds, and then drops the completion."""
    (tmp_path / "picky.py").write_text(
        "def picky(completion_ids, **_):\n"
        f"    return [float('nan') if {condition} else share(ids) for ids in completion_ids]\n"
        "def share(ids):\n"
        "    return sum(token < 130 for token in ids) / len(ids)\n"
    )
    return RewardSource(source=f"{tmp_path / 'picky.py'}:picky", on_error="drop")


def test_a_dropped_completion_takes_no_part_in_the_gradient(tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path), dropping(tmp_path, "sum(ids) % 3 == 0"))
    result, _ = checked_step(state, lambda c: None if sum(c.token_ids) % 3 == 0 else low_share(c.token_ids))
    dropped = [sum(c.token_ids) % 3 == 0 for group in groups_of(result) for c in group.completions]
    assert 0 < sum(dropped) < len(dropped)
    assert result.metrics["rewards/num_dropped"] == sum(dropped)


def test_a_group_with_one_completion_left_teaches_nothing(tmp_path: Path) -> None:
    first = build(grpo_recipe(tmp_path))
    drawn = groups_of(first.step(first.data.train, 0))
    kept = {group.completions[0].token_ids for group in drawn}
    state = build(grpo_recipe(tmp_path), dropping(tmp_path, f"tuple(ids) not in {kept!r}"))
    before = weights_of(state)
    result = state.step(state.data.train, 0)
    assert result.metrics["rewards/num_dropped"] == 12.0
    assert result.metrics["updates"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(state), strict=True))


def test_several_rewards_are_added_with_their_weights(tmp_path: Path) -> None:
    sources = (
        RewardSource(source="unique_chars", weight=0.5),
        RewardSource(source="length", weight=-0.1, arguments={"unit": "characters"}),
    )
    result, _ = checked_step(
        build(grpo_recipe(tmp_path), *sources), lambda c: 0.5 * len(set(c.text)) - 0.1 * len(c.text)
    )
    row = result.metrics
    assert row["reward"] == pytest.approx(0.5 * row["rewards/unique_chars/mean"] - 0.1 * row["rewards/length/mean"])


def test_the_first_step_has_no_kl_and_agrees_with_the_engine(tmp_path: Path) -> None:
    result = run(grpo_recipe(tmp_path, grpo={"kl": {"coef": 0.1}}))
    first, last = result.metrics[0], result.metrics[-1]
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert first["rollout/logp_diff_max"] < 1e-4
    assert first["val/ratio"] == 1.0
    assert last["objective/kl"] != 0
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())


@pytest.mark.parametrize(
    "options",
    [
        {"kl": {"coef": 0.1, "target": 2.0, "horizon": 100}},
        {"kl": {"coef": 0.0}},
        {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}, "baseline": "leave_one_out"},
        {"num_epochs": 2, "num_minibatches": 3, "clip_high": 0.28, "entropy_coef": 0.01},
    ],
)
def test_every_variant_trains_with_finite_figures(tmp_path: Path, options: dict[str, Any]) -> None:
    result = run(grpo_recipe(tmp_path, grpo=options, model={"num_trainable_layers": 1}))
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
    assert len(result.metrics) == 3


def test_steps_that_are_not_finite_are_refused_and_reported(tmp_path: Path) -> None:
    state = build(grpo_recipe(tmp_path))
    before = weights_of(state)
    handle = state.policy.module.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * float("nan"))
    result = state.step(state.data.train, 0)
    handle.remove()
    assert result.metrics["refused_steps"] == 1.0
    assert result.report is not None
    assert "layers.1.mlp.down_proj" in result.report.bad_part
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(state), strict=True))


def test_refused_steps_in_a_row_stop_the_run_and_leave_the_batch_behind(tmp_path: Path) -> None:
    # The loss overflows in every step.
    cfg = grpo_recipe(tmp_path, grpo={"entropy_coef": 1e300}, optimizer={"max_refused_steps": 2})
    with pytest.raises(TrainingError, match="2 optimizer steps in a row were not finite"):
        run(cfg)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 2
    assert len(read_jsonl(run_dir / "refused" / "step-000002.jsonl")) == 8
    assert [row["name"] for row in read_jsonl(run_dir / "findings.jsonl")].count("refused") == 2


def test_a_run_leaves_a_folder_that_plain_transformers_loads(tmp_path: Path) -> None:
    result = run(grpo_recipe(tmp_path, prompts={"heldout_fraction": 0.3}))
    model = AutoModelForCausalLM.from_pretrained(result.run_dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir / "final")
    ids = tokenizer("The film", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
    assert not list((result.run_dir / "final").glob("value_head*"))
    assert "eval/reward" in result.metrics[-1]
    assert "eval/reward" not in result.metrics[0]
    facts = json.loads((result.run_dir / "result.json").read_text())
    assert facts["algorithm"] == "grpo"
    assert facts["steps"] == 3
    assert {row["step"] for row in read_jsonl(result.run_dir / "samples.jsonl")} == {1, 2, 3}
    assert isinstance(result.generate("The film", max_new_tokens=4), str)


def test_accuracy_is_measured_before_and_after_on_held_out_sums(tmp_path: Path) -> None:
    cfg = grpo_recipe(
        tmp_path,
        prompts={"source": "arithmetic", "split_column": "pair", "heldout_fraction": 0.01},
        reward=[{"source": "arithmetic"}],
        rollout={"max_new_tokens": 2},
        evaluation={"correct_at": 1.0, "num_prompts": 5, "completions_per_prompt": 2},
        run={"steps": 1},
    )
    facts = json.loads((training(cfg).run_dir / "result.json").read_text())
    keys = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "p_value", "minutes")
    assert all(math.isfinite(facts[key]) and facts[key] >= 0 for key in keys)
    assert facts["num_heldout"] == 5
    assert facts["p_value"] <= 1.0


def test_accuracy_counts_what_the_policy_learnt(tmp_path: Path) -> None:
    cfg = grpo_recipe(
        tmp_path,
        prompts={"heldout_fraction": 0.3},
        rollout={"prompts_per_step": 4, "completions_per_prompt": 8},
        grpo={"micro_batch_size": 32, "kl": {"coef": 0.0}},
        optimizer={"learning_rate": 1e-2},
        evaluation={"correct_at": 0.8, "completions_per_prompt": 16},
        run={"steps": 20},
    )
    facts = run(cfg).summary
    assert float(str(facts["accuracy_after"])) > float(str(facts["accuracy_before"])) + 0.3


def test_accuracy_without_held_out_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.heldout_fraction"):
        run(grpo_recipe(tmp_path, evaluation={"correct_at": 1.0}))
