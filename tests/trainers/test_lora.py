"""Training with adapters: the engine's log-probs are the trainer's, checkpoints hold adapters alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import train
from recipes import PROMPTS, grpo_recipe, ppo_recipe, training
from safetensors.torch import load_file
from test_exactness import in_exact_dtypes, needs_bf16, spread

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.runner import Packer


def model(family: str = "llama", dtype: str = "bfloat16", **lora: Any) -> dict[str, Any]:
    return {"name": f"tiny:{family}", "dtype": dtype, "lora": {"rank": 4, **lora}}


@pytest.mark.pairs
@in_exact_dtypes
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma2"])
def test_with_adapters_there_is_no_difference_at_all(family: str, use_dora: bool, dtype: str, tmp_path: Path) -> None:
    section = model(family, dtype, use_dora=use_dora)
    cfg = grpo_recipe(tmp_path, model=section, run={"steps": 5}, grpo={"num_epochs": 2})
    rows = training(cfg, prompts=PROMPTS, rewards=[spread]).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 5
    assert rows[0]["grad_norm"] > 0


@pytest.mark.pairs
@in_exact_dtypes
@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    "lora", [{"rank": 7}, {"rank": 1, "alpha": 0.3}, {"target_modules": ["q_proj", "v_proj"], "use_dora": True}]
)
def test_nor_with_odd_ranks_scales_and_targets(lora: dict[str, Any], critic: str, dtype: str, tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, model=model("qwen2", dtype, **lora), run={"steps": 5}, ppo={"critic": critic})
    rows = training(cfg, prompts=PROMPTS, rewards=[spread]).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 5


@pytest.mark.pairs
@in_exact_dtypes
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("recipe", [grpo_recipe, ppo_recipe])
def test_nor_on_a_base_in_8_bits(recipe: Any, use_dora: bool, dtype: str, tmp_path: Path) -> None:
    cfg = recipe(tmp_path, model={**model("qwen2", dtype, use_dora=use_dora), "base": "int8"}, run={"steps": 20})
    rows = training(cfg, prompts=PROMPTS, rewards=[spread]).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 20
    assert rows[0]["grad_norm"] > 0
    assert rows[-1]["kl"] != 0


@needs_bf16
def test_the_first_step_has_no_kl_and_later_ones_have(tmp_path: Path) -> None:
    rows = training(grpo_recipe(tmp_path, model=model()), prompts=PROMPTS, rewards=[spread]).metrics
    assert rows[0]["kl"] == 0.0
    assert rows[-1]["kl"] != 0.0


@needs_bf16
@pytest.mark.parametrize("unload", [False, True])
def test_the_base_is_packed_once_and_adapters_follow(
    unload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[object] = []
    original = Packer.pack

    def counted(self: Packer, projection: Any) -> Any:
        packed.append(projection)
        return original(self, projection)

    monkeypatch.setattr(Packer, "pack", counted)
    cfg = grpo_recipe(tmp_path, model=model(), rollout={"unload_during_update": unload}, run={"steps": 4})
    rows = training(cfg, prompts=PROMPTS, rewards=[spread]).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 4
    assert len(packed) == 2 * 4 + 1  # four projections in each of two layers, and the output layer


def test_frozen_weights_that_were_changed_are_packed_again() -> None:
    section = ModelSection.model_validate({"name": "tiny:llama", "dtype": "float32", "lora": {"rank": 2}})
    loaded = load_policy(section)
    engine = NativeEngine(language_model(loaded.model, Kernels()), loaded.tokenizer)
    sampling = SamplingParams(max_new_tokens=3, seed=1)
    for factor in (1.0, 5.0):  # with old weights the engine's own check would raise
        with torch.no_grad():
            loaded.model.lm_head.weight.mul_(factor)
        (group,) = engine.generate([Prompt("0", "A story")], 1, sampling)
        assert group.completions


@pytest.mark.parametrize(
    ("trainer", "head"),
    [("sft", None), ("reward", "model.score."), ("dpo", None), ("ppo", "value_head."), ("grpo", None)],
)
def test_checkpoints_hold_adapters_and_heads_alone(trainer: str, head: str | None, tmp_path: Path) -> None:
    run_dir = train(trainer, tmp_path, lora={"rank": 4}, steps=2, eval_every=0)
    folder = run_dir / "checkpoints" / "step-000002"
    files = [file for file in folder.glob("*.safetensors") if file.stem not in ("optimizer", "generators")]
    names = {f"{file.stem}.{name}" if file.stem == "value_head" else name for file in files for name in load_file(file)}
    heads = {name for name in names if "lora_" not in name}
    assert heads < names
    assert bool(heads) == (head is not None) and all(name.startswith(str(head)) for name in heads)


@needs_bf16
def test_a_second_run_goes_on_with_the_adapters_of_the_first(tmp_path: Path) -> None:
    first = train("grpo", tmp_path / "first", "bfloat16", {"rank": 4}, steps=4)
    cfg = grpo_recipe(tmp_path, model={"name": str(first), "dtype": "bfloat16"})
    result = training(cfg, prompts=PROMPTS, rewards=[spread])
    assert [row["rollout/logp_diff_max"] for row in result.metrics] == [0.0] * 3
    assert result.metrics[0]["kl"] == 0.0  # the reference has the adapters of the first run
    base = json.loads((result.run_dir / "final" / "base.json").read_text())
    assert base["name"] == "tiny:llama"
    assert result.generate("A story", max_new_tokens=4) is not None
