"""Training by pipeline stages, against one process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from on_ranks import KL, Runs, difference, few_low, on_ranks, samples_of, trained
from recipes import PROMPTS, demonstrations, dpo_recipe, grpo_recipe, pairs, ppo_recipe, sft_recipe

from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.algorithms.sft import SFTRecipe
from tunesmith.engine.distributed.shares import whole
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.run import batch_of, task_of


def runs_of(folder: Path, algorithms: Sequence[str], steps: int, model: str = "tiny:llama") -> Runs:
    """A run of each of `algorithms`, with several micro-batches of different lengths in a step."""
    shared = {"run": {"steps": steps, "checkpoint_every": 2, "eval_every": 3}, "model": {"name": model}}
    drawn, preferred = Inputs(prompts=PROMPTS, rewards=[few_low]), Inputs(pairs=pairs())
    made = {
        "sft": lambda: (sft_recipe(folder, **shared), Inputs(demonstrations=demonstrations())),
        "dpo": lambda: (dpo_recipe(folder, **shared, dpo={"reference": "live"}), preferred),
        "grpo": lambda: (grpo_recipe(folder, **shared, grpo={"kl": {"coef": 0.1}, "micro_batch_size": 2}), drawn),
        "ppo": lambda: (ppo_recipe(folder, **shared, ppo={"kl": KL}), drawn),
        "critic": lambda: (ppo_recipe(folder, **shared, ppo={"critic": "separate"}), drawn),
    }
    return [made[name]() for name in algorithms]


ALL = ("sft", "dpo", "grpo", "ppo", "critic")


@pytest.mark.parametrize(
    ("num_ranks", "pipeline", "algorithms", "model", "steps"),
    [
        (2, 2, ("sft", "grpo", "ppo"), "tiny:llama", 3),
        pytest.param(2, 2, ALL, "tiny:llama", 10, marks=pytest.mark.slow),
        pytest.param(4, 2, ALL, "tiny:llama", 10, marks=pytest.mark.slow),
        pytest.param(2, 2, ("sft", "grpo"), "tiny:qwen2", 10, marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_one_process_does(
    tmp_path: Path, num_ranks: int, pipeline: int, algorithms: Sequence[str], model: str, steps: int
) -> None:
    alone = trained(1, runs_of(tmp_path, algorithms, steps, model))
    together = trained(num_ranks, runs_of(tmp_path, algorithms, steps, model), pipeline=pipeline)
    for name, one, several in zip(algorithms, alone, together, strict=True):
        assert difference(one, several) < 1e-6, name
        assert samples_of(one) == samples_of(several), name
        for row, other in zip(one.metrics, several.metrics, strict=True):
            for key in ("loss", "grad_norm", "reward", "num_tokens", "entropy", "kl", "eval/loss"):
                assert (key in row) == (key in other), (name, key)
                assert row.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4, abs=1e-6), (name, key)


def double_steps(runs: Runs) -> list[dict[str, torch.Tensor]]:
    """The weights after all steps of each of `runs` in float64, on rank 0."""
    found: list[dict[str, torch.Tensor]] = []
    for cfg, inputs in runs:
        task = task_of(cfg, inputs, setup.prepare(cfg))
        task.loaded.model.double()  # type: ignore[attr-defined]
        learner = task.build()
        for index in range(task.num_steps):
            learner.step(batch_of(task, index), index)
        found.append({name: whole(one).clone() for name, one in learner.modules["policy"].named_parameters()})
    return found


# Four stages of `scratch` in float64 alone: its weights, which begin at random, multiply rounding by 1e4 in ten steps.
@pytest.mark.parametrize(
    ("steps", "pipeline", "model"),
    [
        (2, 2, "tiny:llama"),
        pytest.param(10, 2, "tiny:llama", marks=pytest.mark.slow),
        pytest.param(10, 4, "scratch", marks=pytest.mark.slow),
    ],
)
def test_weights_in_float64_are_those_of_one_process(tmp_path: Path, steps: int, pipeline: int, model: str) -> None:
    runs = runs_of(tmp_path, ("sft", "dpo", "grpo"), steps, model)
    alone, together = double_steps(runs), on_ranks(pipeline, partial(double_steps, runs), pipeline=pipeline)
    for one, several in zip(alone, together, strict=True):
        norm = sum(tensor.square().sum() for tensor in one.values()) ** 0.5
        assert sum((tensor - several[name]).square().sum() for name, tensor in one.items()) ** 0.5 < 1e-12 * norm


def test_numbers_of_stages_that_do_not_fit_are_refused() -> None:
    for scale in ({"ranks": 3, "pipeline": 2}, {"ranks": 2, "pipeline": 2, "reduction": "exact"}):
        with pytest.raises(ValueError, match="pipeline is 2"):
            SFTRecipe.model_validate({"scale": scale, "run": {"num_threads": 1}})
    with pytest.raises(ValueError, match="reward needs the states of all layers"):
        RewardRecipe.model_validate({"scale": {"ranks": 2, "pipeline": 2}})
