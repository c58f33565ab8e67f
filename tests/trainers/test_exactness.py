"""In bfloat16 and float32 the engine's log-probs are the trainer's to the bit, at every step: the first ratio is 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.engine.kernels.linear.api import cpu_has_bfloat16
from tunesmith.engine.kernels.linear.exact import is_by_onednn
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.learn.trainers import grpo, passes, ppo

has_bf16 = cpu_has_bfloat16()
needs_bf16 = pytest.mark.skipif(not has_bf16, reason="this CPU has no bfloat16 instructions, so nothing is exact in it")
has_onednn = is_by_onednn(torch.ones(2, 2), torch.ones(2, 2))
needs_onednn = pytest.mark.skipif(not has_onednn, reason="torch has no oneDNN here, so nothing is exact in float32")
EXACT_DTYPES = [pytest.param("float32", marks=needs_onednn), pytest.param("bfloat16", marks=needs_bf16)]
in_exact_dtypes = pytest.mark.parametrize("dtype", EXACT_DTYPES)


def spread(completions: Sequence[str], **_: object) -> list[float]:
    """A reward that differs between most completions."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def differences(trainer: Any, cfg: PPORecipe | GRPORecipe, prompts: Sequence[str] = PROMPTS) -> list[dict[str, float]]:
    """Metrics of each step of a run."""
    return list(training(cfg, prompts=list(prompts), rewards=[spread]).metrics)


@pytest.mark.pairs
@in_exact_dtypes
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_twenty_ppo_steps_have_no_difference_at_all(family: str, dtype: str, tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, model={"name": f"tiny:{family}", "dtype": dtype}, run={"steps": 20})
    rows = differences(ppo, cfg)
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 20
    assert not any("sampling/importance_sampling_ratio/mean" in row for row in rows)


@pytest.mark.pairs
@in_exact_dtypes
@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_twenty_grpo_steps_have_no_difference_at_all(family: str, num_epochs: int, dtype: str, tmp_path: Path) -> None:
    cfg = grpo_recipe(
        tmp_path,
        model={"name": f"tiny:{family}", "dtype": dtype},
        grpo={"num_epochs": num_epochs},
        run={"steps": 20},
    )
    assert [row["rollout/logp_diff_max"] for row in differences(grpo, cfg)] == [0.0] * 20


@in_exact_dtypes
@pytest.mark.parametrize(("trainer", "recipe"), [(ppo, ppo_recipe), (grpo, grpo_recipe)])
def test_the_first_ratio_is_exactly_one(trainer: Any, recipe: Any, dtype: str, tmp_path: Path) -> None:
    section = {"num_epochs": 1, "num_minibatches": 1}
    name = "ppo" if trainer is ppo else "grpo"
    cfg = recipe(tmp_path, model={"dtype": dtype}, rollout={"temperature": 0.7}, **{name: section})
    for row in differences(trainer, cfg):
        assert row["val/ratio"] == 1.0 and row["val/ratio_var"] == 0.0


def num_policy_passes(cfg: PPORecipe) -> int:
    """How often a step asks the policy for log-probs."""
    state = Started(cfg, prompts=PROMPTS * 16, rewards=[spread])
    num_passes = 0
    original = passes.token_logps

    def counted(model: LanguageModel, *arguments: Any, **options: Any) -> Any:
        nonlocal num_passes
        num_passes += model is state.policy
        return original(model, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "token_logps", counted)
        state.step(state.data.train, 0)
    return num_passes


@in_exact_dtypes
def test_ppo_makes_no_pass_for_the_old_policy(dtype: str, tmp_path: Path) -> None:
    """Old log-probs and values come from the engine, unless the recipe wants a pass of the trainer for them."""
    wide = {"prompts_per_step": 64}
    num_micro_batches = 64 // 2
    exact = num_policy_passes(ppo_recipe(tmp_path, model={"dtype": dtype}, rollout=wide))
    recomputed = num_policy_passes(
        ppo_recipe(tmp_path, model={"dtype": dtype}, rollout={**wide, "recompute_logps": True})
    )
    assert exact == 2 * num_micro_batches  # two epochs, and nothing else
    assert recomputed == 3 * num_micro_batches


@in_exact_dtypes
def test_with_top_p_the_difference_is_still_zero_and_the_weights_correct_the_cut(dtype: str, tmp_path: Path) -> None:
    cfg = grpo_recipe(tmp_path, model={"dtype": dtype}, rollout={"top_p": 0.7})
    for row in differences(grpo, cfg):
        assert row["rollout/logp_diff_max"] == 0.0
        assert 0.7 <= row["sampling/importance_sampling_ratio/mean"] <= 1.0


@pytest.mark.slow
@in_exact_dtypes
@pytest.mark.parametrize(("trainer", "recipe"), [(ppo, ppo_recipe), (grpo, grpo_recipe)])
def test_twenty_steps_of_a_real_model_have_no_difference_at_all(
    trainer: Any, recipe: Any, dtype: str, tmp_path: Path
) -> None:
    prompts = ["The film was", "I", "Once upon a time there was a small", "The capital of France is", "2 + 2 ="]
    cfg = recipe(
        tmp_path,
        model={"name": "smollm2", "dtype": dtype},
        rollout={"prompts_per_step": 5, "max_new_tokens": 24, "temperature": 0.7},
        optimizer={"learning_rate": 1e-5},
        run={"steps": 20, "num_threads": 0, "checkpoint_every": 0},
    )
    assert [row["rollout/logp_diff_max"] for row in differences(trainer, cfg, prompts)] == [0.0] * 20


@in_exact_dtypes
def test_unloading_the_engine_during_the_update_changes_nothing(dtype: str, tmp_path: Path) -> None:
    rows = [
        differences(grpo, grpo_recipe(tmp_path, model={"dtype": dtype}, rollout={"unload_during_update": unload}))
        for unload in (False, True)
    ]
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]
    assert [row["grad_norm"] for row in rows[0]] == [row["grad_norm"] for row in rows[1]]
