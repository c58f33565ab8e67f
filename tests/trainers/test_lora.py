"""Training with adapters: the engine's log-probs are the trainer's, checkpoints hold adapters alone, runs resume."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import noisy
from recipes import PROMPTS, grpo_recipe, pairs, ppo_recipe, reward_recipe
from safetensors.torch import load_file
from test_exactness import needs_bf16, spread

from tunesmith.batch.rollout import SamplingParams
from tunesmith.config.sections import ModelSection
from tunesmith.core import faults
from tunesmith.core.errors import StoppedError
from tunesmith.core.faults import VARIABLE
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import language_model
from tunesmith.models.load import load_policy
from tunesmith.rollout.native_engine import NativeEngine
from tunesmith.rollout.runner import Packer
from tunesmith.schema.records import Prompt
from tunesmith.trainers import grpo, ppo, reward
from tunesmith.trainers.resume import Inputs, resume

STEPS = 6


def model(family: str = "llama", dtype: str = "bfloat16", **lora: Any) -> dict[str, Any]:
    return {"name": f"tiny:{family}", "dtype": dtype, "lora": {"rank": 4, **lora}}


@needs_bf16
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma2"])
def test_with_adapters_there_is_no_difference_at_all(family: str, use_dora: bool, tmp_path: Path) -> None:
    section = model(family, use_dora=use_dora)
    cfg = grpo_recipe(tmp_path, model=section, run={"steps": 5}, grpo={"num_epochs": 2})
    rows = grpo.run(cfg, prompts=PROMPTS, rewards=[spread], progress=False).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 5
    assert rows[0]["grad_norm"] > 0


@needs_bf16
@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    "lora", [{"rank": 7}, {"rank": 1, "alpha": 0.3}, {"target_modules": ["q_proj", "v_proj"], "use_dora": True}]
)
def test_nor_with_odd_ranks_scales_and_targets(lora: dict[str, Any], critic: str, tmp_path: Path) -> None:
    cfg = ppo_recipe(tmp_path, model=model("qwen2", **lora), run={"steps": 5}, ppo={"critic": critic})
    rows = ppo.run(cfg, prompts=PROMPTS, rewards=[spread], progress=False).metrics
    assert [row["rollout/logp_diff_max"] for row in rows] == [0.0] * 5


@needs_bf16
def test_the_first_step_has_no_kl_and_later_ones_have(tmp_path: Path) -> None:
    rows = grpo.run(grpo_recipe(tmp_path, model=model()), prompts=PROMPTS, rewards=[spread], progress=False).metrics
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
    rows = grpo.run(cfg, prompts=PROMPTS, rewards=[spread], progress=False).metrics
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


def train(trainer: str, folder: Path, dtype: str, lora: Mapping[str, Any]) -> Path:
    run = {"dir": str(folder), "steps": STEPS, "checkpoint_every": 2, "keep_checkpoints": 9}
    section = model(dtype=dtype, **lora)
    if trainer == "reward":
        return reward.run(reward_recipe(folder, model=section, run=run), pairs=pairs(24), progress=False).run_dir
    if trainer == "ppo":
        cfg = ppo_recipe(folder, model=section, run=run, ppo={"critic": "separate"})
        return ppo.run(cfg, prompts=PROMPTS, rewards=[noisy], progress=False).run_dir
    cfg = grpo_recipe(folder, model=section, run=run, grpo={"num_minibatches": 2})
    return grpo.run(cfg, prompts=PROMPTS, rewards=[noisy], progress=False).run_dir


def outcome(run_dir: Path) -> dict[str, object]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    changing = ("time/", "memory/", "tokens_per_s")
    weights = (run_dir / "final" / "adapter_model.safetensors").read_bytes()
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(changing)} for row in rows],
    }


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Plans a fault in this process; an empty plan takes it back."""

    def plan(text: str) -> None:
        monkeypatch.setenv(VARIABLE, text)
        faults._plan.cache_clear()

    yield plan
    plan("")


@pytest.mark.parametrize(
    ("trainer", "dtype", "lora"),
    [
        ("reward", "float32", {"dropout": 0.2}),
        ("ppo", "bfloat16", {}),
        ("grpo", "bfloat16", {"use_dora": True}),
        ("grpo", "float32", {}),
    ],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    trainer: str, dtype: str, lora: Mapping[str, Any], tmp_path: Path, fault: Callable[[str], None]
) -> None:
    whole = train(trainer, tmp_path / "whole", dtype, lora)
    fault(f"{'forward' if trainer == 'reward' else 'update/forward'}:term:3")
    with pytest.raises(StoppedError):
        train(trainer, tmp_path / "stopped", dtype, lora)
    fault("")
    (run_dir,) = (tmp_path / "stopped").iterdir()
    inputs = Inputs(pairs=pairs(24)) if trainer == "reward" else Inputs(prompts=PROMPTS, rewards=[noisy])
    assert outcome(resume(run_dir, inputs=inputs, progress=False).run_dir) == outcome(whole)


def test_checkpoints_hold_adapters_and_heads_alone(tmp_path: Path) -> None:
    run_dir = train("ppo", tmp_path, "float32", {})
    folder = run_dir / "checkpoints" / "step-000004"
    names = {*load_file(folder / "policy.safetensors"), *load_file(folder / "critic.safetensors")}
    assert names and all("lora_" in name or name.startswith("value_head.") for name in names)
    assert {"value_head.weight", "value_head.bias"} < names


@needs_bf16
def test_a_second_run_goes_on_with_the_adapters_of_the_first(tmp_path: Path) -> None:
    first = train("grpo", tmp_path / "first", "bfloat16", {})
    cfg = grpo_recipe(tmp_path, model={"name": str(first), "dtype": "bfloat16"})
    result = grpo.run(cfg, prompts=PROMPTS, rewards=[spread], progress=False)
    assert [row["rollout/logp_diff_max"] for row in result.metrics] == [0.0] * 3
    assert result.metrics[0]["kl"] == 0.0  # the reference has the adapters of the first run
    base = json.loads((result.run_dir / "final" / "base.json").read_text())
    assert base["name"] == "tiny:llama"
    assert result.generate("A story", max_new_tokens=4) is not None
