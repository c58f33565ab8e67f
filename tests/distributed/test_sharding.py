"""Training with parameters that are divided among the ranks, against one process."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import difference, few_low, on_ranks, samples_of, trained
from recipes import (
    PROMPTS,
    best_of_n_recipe,
    demonstrations,
    dpo_recipe,
    grpo_recipe,
    pairs,
    ppo_recipe,
    reward_recipe,
    sft_recipe,
)

from tunesmith.base.config.recipe import Recipe
from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.base.core.errors import ModelError, TrainingError
from tunesmith.engine.distributed.ranks import gathered, rank
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.sharding import check_division, shard
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.run import run

LORA = {"name": "tiny:qwen3", "lora": {"rank": 4}}
MESHES = [(2, 1), (4, 1), (2, 2), (4, 2)]


def runs_of(folder: Path, num_steps: int) -> dict[str, tuple[Recipe, Inputs]]:
    """Runs of each algorithm; in some fewer micro-batches than ranks have gradients."""
    run, slow = {"steps": num_steps}, {"learning_rate": 1e-3}
    drawn, preferred = Inputs(prompts=PROMPTS, rewards=[few_low]), Inputs(pairs=pairs())
    shown = Inputs(demonstrations=demonstrations())
    held = {"heldout_fraction": 0.3}
    return {
        "sft": (
            sft_recipe(folder, run=run, optimizer=slow, sft={"micro_batch_tokens": 48}, demonstrations=held),
            shown,
        ),
        "packed": (sft_recipe(folder, run=run, optimizer=slow, model={"name": "tiny:qwen2"}), shown),
        "adapters": (sft_recipe(folder, run=run, optimizer=slow, model=LORA, sft={"micro_batch_tokens": 64}), shown),
        "dpo": (dpo_recipe(folder, run=run, dpo={"reference": "live"}), preferred),
        "reward": (reward_recipe(folder, run=run, optimizer=slow, reward_model={"micro_batch_size": 3}), preferred),
        "ppo": (ppo_recipe(folder, run=run, ppo={"critic": "separate"}), drawn),
        "grpo": (grpo_recipe(folder, run=run, grpo={"num_minibatches": 2, "kl": {"coef": 0.1}}), drawn),
        "best_of_n": (best_of_n_recipe(folder, run=run), drawn),
        "ptx": (
            ppo_recipe(folder, run=run, ppo={"critic": "separate"}, ptx={"coef": 0.5, "demonstrations_per_update": 3}),
            Inputs(prompts=PROMPTS, rewards=[few_low], demonstrations=demonstrations()),
        ),
    }


def differences(
    folder: Path, names: Sequence[str], num_steps: int, mesh: tuple[int, int], dtype: Any
) -> dict[str, float]:
    """The relative difference of the weights after training on `mesh` (ranks, ranks that compute a map together)."""
    runs = [runs_of(folder, num_steps)[name] for name in names]
    alone = trained(1, runs, dtype)
    several = trained(mesh[0], runs, dtype, shard="parameters", tensor=mesh[1])
    for name, one, other in zip(names, alone, several, strict=True):
        assert samples_of(one) == samples_of(other), name
        losses, others = ([row["eval/loss"] for row in each.metrics if "eval/loss" in row] for each in (one, other))
        assert losses == pytest.approx(others, rel=1e-4), name
    return {name: difference(one, other) for name, one, other in zip(names, alone, several, strict=True)}


def test_divided_parameters_train_as_one_process_does(tmp_path: Path) -> None:
    found = differences(tmp_path, ("adapters", "grpo"), 2, (4, 2), None)
    assert max(found.values()) < 1e-6, found


def test_ranks_share_demonstrations_apart_from_the_rollout(tmp_path: Path) -> None:
    """One list for both would have a rank pass through the critic while another has a demonstration, and wait."""
    found = differences(tmp_path, ("ptx",), 2, (2, 1), None)
    assert max(found.values()) < 5e-6, found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("dtype", "most"), [(None, 5e-6), (torch.float64, 1e-12)])  # float32: the order of sums
def test_every_algorithm_trains_on_every_mesh(tmp_path: Path, mesh: tuple[int, int], dtype: Any, most: float) -> None:
    found = differences(tmp_path, list(runs_of(tmp_path, 1)), 10, mesh, dtype)
    print(mesh, dtype, found)
    # The head of a reward model computes in float32, so its sums are in the order of the mesh there too.
    assert all(value < (max(most, 1e-8) if name == "reward" else most) for name, value in found.items()), found


def scale(num_ranks: int, tensor: int = 1, pipeline: int = 1, shard: str = "parameters") -> dict[str, Any]:
    """A section `scale` that divides parameters among the ranks, if there are several, unless `pipeline` does."""
    shard = shard if pipeline == 1 else "optimizer"
    return {"ranks": num_ranks, "tensor": tensor, "pipeline": pipeline, "shard": shard}


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [
        [scale(4), scale(2), scale(1), scale(4)],
        [scale(2), scale(2, tensor=2), scale(1), scale(4, tensor=2), scale(3, shard="optimizer")],
        [scale(4, pipeline=2), scale(2, tensor=2), scale(2, pipeline=2), scale(2, shard="optimizer"), scale(1)],
    ],
)
def test_a_run_goes_on_with_another_mesh(tmp_path: Path, meshes: Sequence[dict[str, Any]]) -> None:
    inputs = Inputs(demonstrations=demonstrations())

    def recipe(num_steps: int, mesh: dict[str, Any], name: str) -> Recipe:
        small = {"micro_batch_tokens": 48}
        return sft_recipe(tmp_path / name, run={"steps": num_steps, "checkpoint_every": 1}, sft=small, scale=mesh)

    whole = run(recipe(1 + len(meshes), scale(1), "whole"), inputs, progress=False)
    result = run(recipe(2, meshes[0], "parts"), inputs, progress=False)
    for num_steps, mesh in enumerate(meshes[1:], start=3):
        changed = {"run.steps": num_steps, **{f"scale.{key}": value for key, value in mesh.items()}}
        result = resume(result.run_dir, overrides=changed, inputs=inputs, progress=False)
    assert difference(whole, result) < 1e-6
    losses = [[row["loss"] for row in one.metrics] for one in (whole, result)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def end_within_a_pass() -> None:
    model = language_model(tiny_model("llama").model)
    shard(model)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert model.decoder is not None
    model.decoder.hidden_states(torch.arange(4), [4])


def test_a_rank_that_ends_within_a_pass_is_named() -> None:
    with pytest.raises(TrainingError, match="rank 1 was ended by SIGKILL"):
        on_ranks(2, end_within_a_pass, shard="parameters")


def held() -> list[tuple[int, int]]:
    """For each rank, the numbers of the model that it holds, and those of the whole model."""
    model = language_model(tiny_model("qwen3").model)
    shard(model)
    parts = [parameter.to_local().numel() for parameter in model.module.parameters()]  # type: ignore[attr-defined]
    return gathered([(sum(parts), sum(parameter.numel() for parameter in model.module.parameters()))], all_ranks=True)


def test_a_rank_holds_its_share_of_the_parameters() -> None:
    found = on_ranks(3, held, shard="parameters")
    assert sum(own for own, _ in found) == found[0][1]
    assert max(own for own, _ in found) < found[0][1] / 3 * 1.1


def test_a_rank_writes_its_share_of_a_checkpoint(tmp_path: Path) -> None:
    cfg = sft_recipe(tmp_path, run={"steps": 1, "checkpoint_every": 1}, scale=scale(2))
    run_dir = run(cfg, Inputs(demonstrations=demonstrations()), progress=False).run_dir
    sizes = [file.stat().st_size for file in run_dir.glob("checkpoints/step-000001/*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 0.55 * sum(sizes)
    assert not list(run_dir.glob("checkpoints/step-000001/policy.safetensors"))


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("gpt2", 2, "transposed weights"),
        ("phi3", 2, "are one matrix"),
        ("gpt_neox", 2, "are one matrix"),
        ("olmo2", 2, "normalised over all heads"),
        ("mixtral", 2, "mixture of experts"),
        ("llama", 4, "4 heads and 2 of keys and values are no multiple"),
    ],
)
def test_a_part_that_ranks_cannot_divide_is_named(family: str, size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_division(describe(tiny_model(family).model), size)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 3, "tensor": 2, "shard": "parameters"}, "ranks must be a multiple"),
        ({"ranks": 2, "tensor": 2}, "set shard to parameters"),
        ({"ranks": 2, "shard": "parameters", "reduction": "exact"}, "added up as float32"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleSection.model_validate(given)
