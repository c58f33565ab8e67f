"""In bfloat16 the engine's log-probs are the trainer's, to the bit: at every step, and so the first ratio is 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe, training

from tunesmith.config.schema import GRPORecipe, PPORecipe
from tunesmith.trainers import grpo, ppo

has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
needs_bf16 = pytest.mark.skipif(not has_bf16, reason="this CPU has no bfloat16 instructions, so nothing is exact")


def spread(completions: Sequence[str], **_: object) -> list[float]:
    """A reward that differs between most completions."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def differences(trainer: Any, cfg: PPORecipe | GRPORecipe, prompts: Sequence[str] = PROMPTS) -> list[dict[str, float]]:
    """Metrics of each step of a run."""
    return list(training(cfg, prompts=list(prompts), rewards=[spread]).metrics)


@needs_bf16
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_twenty_ppo_steps_have_no_difference_at_all(family: str, tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, model={"name": f"tiny:{family}", "dtype": "bfloat16"}, run={"steps": 20})
    rows = differences(ppo, cfg)
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 20
    assert not any("sampling/importance_sampling_ratio/mean" in row for row in rows)


@needs_bf16
@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_twenty_grpo_steps_have_no_difference_at_all(family: str, num_epochs: int, tmp_path: Path) -> None:
    cfg = grpo_recipe(
        tmp_path,
        model={"name": f"tiny:{family}", "dtype": "bfloat16"},
        grpo={"num_epochs": num_epochs},
        run={"steps": 20},
    )
    assert [row["rollout/logp_diff_max"] for row in differences(grpo, cfg)] == [0.0] * 20


@needs_bf16
@pytest.mark.parametrize(("trainer", "recipe"), [(ppo, ppo_recipe), (grpo, grpo_recipe)])
def test_the_first_ratio_is_exactly_one(trainer: Any, recipe: Any, tmp_path: Path) -> None:
    section = {"num_epochs": 1, "num_minibatches": 1}
    name = "ppo" if trainer is ppo else "grpo"
    cfg = recipe(tmp_path, model={"dtype": "bfloat16"}, rollout={"temperature": 0.7}, **{name: section})
    for row in differences(trainer, cfg):
        assert row["val/ratio"] == 1.0 and row["val/ratio_var"] == 0.0


def num_policy_passes(cfg: PPORecipe) -> int:
    """How often a step asks the policy for log-probs."""
    state = Started(cfg, prompts=PROMPTS * 16, rewards=[spread])
    passes: list[int] = []
    original = ppo.token_logps

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(1)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "token_logps", counted)
        state.step(state.data.train, 0)
    return len(passes)


@needs_bf16
def test_ppo_makes_no_pass_for_the_old_policy(tmp_path: Path) -> None:
    """Old log-probs and values come from the engine; in float32, where it is not exact, from a pass of the trainer."""
    wide = {"prompts_per_step": 64}
    num_micro_batches = 64 // 2
    exact = num_policy_passes(ppo_recipe(tmp_path, model={"dtype": "bfloat16"}, rollout=wide))
    inexact = num_policy_passes(ppo_recipe(tmp_path, model={"dtype": "float32"}, rollout=wide))
    assert exact == 2 * num_micro_batches  # two epochs, and nothing else
    assert inexact == 3 * num_micro_batches


@needs_bf16
def test_with_top_p_the_difference_is_still_zero_and_the_weights_correct_the_cut(tmp_path: Path) -> None:
    cfg = grpo_recipe(tmp_path, model={"dtype": "bfloat16"}, rollout={"top_p": 0.7})
    for row in differences(grpo, cfg):
        assert row["rollout/logp_diff_max"] == 0.0
        assert 0.7 <= row["sampling/importance_sampling_ratio/mean"] <= 1.0


def test_in_float32_the_difference_is_measured_and_small(tmp_path: Path) -> None:
    for trainer, cfg in ((ppo, ppo_recipe(tmp_path)), (grpo, grpo_recipe(tmp_path))):
        for row in differences(trainer, cfg):
            assert 0.0 <= row["rollout/logp_diff_max"] < 1e-4


@pytest.mark.slow
@needs_bf16
@pytest.mark.parametrize(("trainer", "recipe"), [(ppo, ppo_recipe), (grpo, grpo_recipe)])
def test_twenty_steps_of_a_real_model_have_no_difference_at_all(trainer: Any, recipe: Any, tmp_path: Path) -> None:
    prompts = ["The film was", "I", "Once upon a time there was a small", "The capital of France is", "2 + 2 ="]
    cfg = recipe(
        tmp_path,
        model={"name": "smollm2", "dtype": "bfloat16"},
        rollout={"prompts_per_step": 5, "max_new_tokens": 24, "temperature": 0.7},
        optimizer={"learning_rate": 1e-5},
        run={"steps": 20, "num_threads": 0, "checkpoint_every": 0},
    )
    assert [row["rollout/logp_diff_max"] for row in differences(trainer, cfg, prompts)] == [0.0] * 20


@needs_bf16
def test_unloading_the_engine_during_the_update_changes_nothing(tmp_path: Path) -> None:
    rows = [
        differences(grpo, grpo_recipe(tmp_path, model={"dtype": "bfloat16"}, rollout={"unload_during_update": unload}))
        for unload in (False, True)
    ]
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]
    assert [row["grad_norm"] for row in rows[0]] == [row["grad_norm"] for row in rows[1]]
