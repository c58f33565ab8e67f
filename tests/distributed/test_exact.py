"""Sums of gradients that do not depend on the number of ranks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from on_ranks import KL, Runs, few_low, trained, weights_of
from recipes import PROMPTS, demonstrations, dpo_recipe, grpo_recipe, pairs, ppo_recipe, reward_recipe, sft_recipe
from torch import nn

from tunesmith.base.config.algorithms.sft import SFTRecipe
from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.core.errors import ConfigError
from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
from tunesmith.learn.trainers.api import Inputs

ALL = ("sft", "reward", "dpo", "ppo", "grpo")


def exact_runs(folder: Path) -> Runs:
    run, scale = {"steps": 10}, {"reduction": "exact"}
    bfloat16 = {"model": {"dtype": "bfloat16"}, "run": run, "scale": scale}
    drawn, preferred = Inputs(prompts=PROMPTS, rewards=[few_low]), Inputs(pairs=pairs())
    return [
        (sft_recipe(folder, run=run, scale=scale), Inputs(demonstrations=demonstrations())),
        (reward_recipe(folder, run=run, scale=scale, reward_model={"micro_batch_size": 3}), preferred),
        (dpo_recipe(folder, run=run, scale=scale), preferred),
        (ppo_recipe(folder, ppo={"kl": KL, "critic": "separate"}, optimizer={"state": "int8"}, **bfloat16), drawn),
        (grpo_recipe(folder, grpo={"micro_batch_size": 2}, run=run, scale=scale), drawn),
    ]


@pytest.mark.parametrize(
    ("num_ranks", "algorithms"),
    [
        (3, ("sft", "ppo")),
        pytest.param(3, ("reward", "dpo", "grpo"), marks=pytest.mark.nightly),
        pytest.param(2, ALL, marks=pytest.mark.slow),
        pytest.param(4, ALL, marks=pytest.mark.slow),
    ],
)
def test_exact_sums_give_the_same_bits_for_any_number_of_ranks(
    tmp_path: Path, num_ranks: int, algorithms: Sequence[str]
) -> None:
    alone, together = (
        trained(number, [one for one in exact_runs(tmp_path) if one[0].algorithm in algorithms])
        for number in (1, num_ranks)
    )
    for one, several in zip(alone, together, strict=True):
        others = weights_of(several)
        for name, tensor in weights_of(one).items():
            assert torch.equal(tensor, others[name]), (one.summary["algorithm"], name)
        for key in ("loss", "grad_norm"):
            rows = zip(one.metrics, several.metrics, strict=True)
            assert all(row.get(key) == other.get(key) for row, other in rows), (one.summary["algorithm"], key)


def exact_step(*losses: float) -> tuple[nn.Linear, StepReport]:
    """A linear map after one update by micro-batches whose gradients are `losses`."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = MasterAdamW(layer, OptimizerSection(max_grad_norm=1e9), total_steps=1, exact_sums=True)
    for loss in losses:
        (layer.weight * loss).sum().backward()
    return layer, optimizer.step()


def test_an_exact_sum_does_not_depend_on_the_order() -> None:
    numbers = (1.0, 2.0**-40, -1.0)
    norms = {exact_step(*order)[1].grad_norm for order in (numbers, numbers[::-1], (1.0, -1.0, 2.0**-40))}
    assert norms == {2.0**-40}  # float32 loses the small one beside 1


@pytest.mark.parametrize("losses", [(5e3,), (3e3, 3e3, -3e3), (float("nan"), 1.0)])
def test_a_gradient_beyond_the_range_of_an_exact_sum_is_refused(losses: tuple[float, ...]) -> None:
    layer, report = exact_step(*losses)
    assert report.refused
    assert report.bad_parameter == "weight"
    assert layer.weight.item() == 0


def test_exact_sums_need_a_number_of_threads_and_no_loss_scale() -> None:
    with pytest.raises(ValueError, match=r"set run\.num_threads"):
        SFTRecipe.model_validate({"scale": {"reduction": "exact"}})
    with pytest.raises(ConfigError, match="float16"):
        MasterAdamW(nn.Linear(1, 1).half(), OptimizerSection(), total_steps=1, exact_sums=True)
