"""Variants of PPO and GRPO: REINFORCE++ is what its paper says, resumed runs are exact, and the recipes run."""

import hashlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_oracle import Recorder, double
from recipes import PROMPTS, Started, groups_of, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.load import load_recipe
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.learn.trainers.resume import Inputs, resume


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def flat_for_two(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """`low_ids`, and the same for every completion of half of the prompts."""
    shares = low_ids(completion_ids)
    return [0.1 if prompt in PROMPTS[:2] else share for prompt, share in zip(prompts, shares, strict=True)]


def scored(model: Any, group: Group, completion: Completion) -> torch.Tensor:
    """Log-prob of each token of a completion, by a plain forward pass over its own row."""
    ids = [*group.prompt_token_ids, *completion.token_ids]
    logits_SV = model(torch.tensor([ids])).logits[0, len(group.prompt_token_ids) - 1 : -1]
    return torch.log_softmax(logits_SV, dim=-1)[range(len(completion.token_ids)), completion.token_ids]


def test_without_a_critic_the_gradient_is_that_of_reinforce_plus_plus(tmp_path: Path) -> None:
    coef = 0.3
    options = {"critic": "none", "lam": 1.0, "num_epochs": 1, "num_minibatches": 1, "kl": {"coef": coef}}
    state = Started(ppo_recipe(tmp_path, ppo=options), prompts=PROMPTS, rewards=[low_ids])
    assert state.value_head is None and state.critic is None
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    reference = double(state.policy.module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in state.policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model, recorder = double(state.policy.module), Recorder(state)  # type: ignore[arg-type]
    result = state.step(state.data.train, 0)

    tokens: list[tuple[torch.Tensor, float]] = []  # log-prob, and the reward from there to the end
    for group in groups_of(result):
        (completion,) = group.completions
        logp_T = scored(model, group, completion)
        kl_T = (logp_T - scored(reference, group, completion)).tolist()
        score = low_ids([completion.token_ids])[0]
        tokens += [(logp, score - coef * math.fsum(kl_T[t:])) for t, logp in enumerate(logp_T)]
    returns = [to_come for _, to_come in tokens]
    mean, spread = statistics.fmean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    loss = torch.stack([-logp * (to_come - mean) / spread for logp, to_come in tokens]).mean()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    size = max(gradient.abs().max().item() for gradient in expected.values())
    (update,) = recorder.updates
    for name, gradient in expected.items():
        torch.testing.assert_close(update.gradients[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)
    assert not [name for name in result.metrics if name.startswith(("val/mean", "val/error", "loss/value"))]


@pytest.mark.parametrize(
    "options",
    [
        {"critic": "none", "lam": 1.0},
        {"dual_clip": 3.0, "loss_normalization": "sequence"},
        {"surrogate": "cispo", "clip_high": 4.0, "kl": {"coef": 0.1, "place": "loss", "bias_correction": True}},
        {"importance_sampling_level": "sequence", "loss_normalization": "constant", "critic": "separate"},
    ],
)
def test_ppo_takes_every_variant_and_learns(tmp_path: Path, options: dict[str, Any]) -> None:
    cfg = ppo_recipe(
        tmp_path,
        rollout={"prompts_per_step": 32, "max_new_tokens": 8},
        ppo={"num_epochs": 2, "num_minibatches": 1, "micro_batch_size": 32, "kl": {"coef": 0.001}, **options},
        optimizer={"learning_rate": 5e-3},
        run={"steps": 20},
    )
    result = training(cfg, prompts=PROMPTS, rewards=[low_ids])
    rewards = [row["reward"] for row in result.metrics]
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.15
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_of_a_variant_ends_as_one_that_went_through(tmp_path: Path, algorithm: str) -> None:
    def run(folder: str, steps: int) -> Path:
        section = {"dir": str(tmp_path / folder), "steps": steps, "checkpoint_every": 2}
        if algorithm == "grpo":
            options = {"dynamic_sampling": 2, "num_minibatches": 2, "mask_truncated_completions": False}
            cfg = grpo_recipe(tmp_path, grpo=options, run=section)
            return training(cfg, prompts=PROMPTS, rewards=[flat_for_two]).run_dir
        cfg = ppo_recipe(tmp_path, ppo={"critic": "none", "lam": 1.0}, run=section)
        return training(cfg, prompts=PROMPTS, rewards=[flat_for_two]).run_dir

    whole, half = run("whole", 4), run("half", 2)
    inputs = Inputs(prompts=PROMPTS, rewards=[flat_for_two])
    resume(half, overrides={"run.steps": 4}, inputs=inputs, progress=False)
    digests = [hashlib.sha256((d / "final" / "model.safetensors").read_bytes()).hexdigest() for d in (whole, half)]
    assert digests[0] == digests[1]
    assert (whole / "samples.jsonl").read_text() == (half / "samples.jsonl").read_text()


SMALLER = {"model.name": "tiny:llama", "run.steps": 2, "run.num_threads": 1, "rollout.max_new_tokens": 6}
"""What makes a recipe small enough for a test."""


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ppo_scratch", {"rollout.min_new_tokens": 6}),
        ("grpo_v100", {}),
        (
            "grpo_gsm8k",
            {
                "rollout.prompts_per_step": 2,
                "evaluation.num_prompts": 2,
                "prompts.max_tokens": 200,
                "prompts.skip_bad": True,
            },
        ),
    ],
)
def test_a_recipe_runs_for_two_steps_with_a_tiny_model(
    tmp_path: Path, name: str, overrides: dict[str, object], request: pytest.FixtureRequest
) -> None:
    if name == "grpo_gsm8k":
        request.getfixturevalue("data_dir")
    trainer = name.split("_")[0]
    recipe = load_recipe(trainer, recipe=name, overrides=SMALLER | {"run.dir": str(tmp_path)} | overrides).recipe
    result = training(recipe)
    assert len(result.metrics) == 2
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
