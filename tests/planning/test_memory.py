"""Memory of a plan, against what models and trainers hold."""

from pathlib import Path

import pytest
import torch

from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.sections import ModelSection, OptimizerSection
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.optimizer import MasterAdamW, moment_bytes
from tunesmith.engine.models.tiny import FAMILIES, tiny_model
from tunesmith.learn.trainers.estimate import policy_estimate
from tunesmith.observe.planning.memory import Layout, memory_gb, peak_gb
from tunesmith.observe.planning.shape import Shape, read_shape
from tunesmith.observe.planning.workload import Workload, workload_of

WORK = Workload(True, 64, 1, 20, 12, 6.0, micro_batch_size=16, slots=64)


def shape_of_tiny(family: str, folder: Path) -> Shape:
    tiny_model(family).model.config.save_pretrained(folder)
    return read_shape(str(folder))


@pytest.mark.parametrize("weights", ["model", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_rank_it_is_the_estimate_of_a_training(family: str, weights: str, tmp_path: Path):
    model, shape = tiny_model(family, dtype=torch.bfloat16).model, shape_of_tiny(family, tmp_path)
    given = {"rollout.prompts_per_step": 64, "rollout.max_new_tokens": 12, "rollout.weights": weights}
    cfg = load_recipe("ppo", overrides=given).recipe
    estimate = policy_estimate(model, cfg, prompt_tokens=20)
    stages = memory_gb(shape, workload_of(cfg, 20), Layout())
    rollout, update = stages["rollout"], stages["update"]
    assert update["weights"] == pytest.approx(estimate.memory_gb["weights"])
    assert update["masters"] + update["moments"] + update["gradients"] == pytest.approx(estimate.memory_gb["optimizer"])
    assert update["other models"] == pytest.approx(estimate.memory_gb["reference"])
    assert update["activations"] == pytest.approx(estimate.memory_gb["activations"], rel=1e-4)
    assert update["logits"] == pytest.approx(estimate.memory_gb["logits"])
    assert rollout["KV cache"] == pytest.approx(estimate.memory_gb["cache"])
    assert rollout["engine's weights"] == pytest.approx(estimate.memory_gb["packed weights"])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_cache_is_what_transformers_keeps(family: str, tmp_path: Path):
    model, shape = tiny_model(family).model, shape_of_tiny(family, tmp_path)
    cache = model(input_ids=torch.ones(3, 7, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert shape.cache_values(3 * 7) * 4 == held


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_optimizer_states_are_those_that_it_allocates(state: str, tmp_path: Path):
    model, shape = tiny_model("llama", dtype=torch.bfloat16).model, shape_of_tiny("llama", tmp_path)
    section = OptimizerSection(state=state)
    optimizer = MasterAdamW(model, section, total_steps=1)
    cfg = load_recipe("sft", overrides={"optimizer.state": state}).recipe
    update = memory_gb(shape, workload_of(cfg, 20), Layout())["update"]
    assert update["moments"] * 1e9 == pytest.approx(optimizer.moment_bytes, rel=0.02)
    assert optimizer.moment_bytes >= moment_bytes(shape.num_parameters, section)


def test_a_rank_holds_less_of_more_ranks():
    shape = read_shape("llama-2-70b")
    one = memory_gb(shape, WORK, Layout())
    for layout in (Layout(tensor=8, engine_tensor=8), Layout(pipeline=8), Layout(data=8, shards_weights=True)):
        cut = memory_gb(shape, WORK, layout)
        for part in ("weights", "moments", "gradients"):
            assert cut["update"][part] == pytest.approx(one["update"][part] / 8, rel=0.25), (layout, part)
    replicas = memory_gb(shape, WORK, Layout(data=8))["update"]
    assert replicas["weights"] == one["update"]["weights"]
    assert replicas["moments"] == pytest.approx(one["update"]["moments"] / 8)


def test_stages_of_a_pipeline_hold_as_many_activations_as_one_rank():
    """1F1B: P stages have P micro-batches in flight."""
    shape = read_shape("llama-2-7b")
    assert memory_gb(shape, WORK, Layout(pipeline=4))["update"]["activations"] == pytest.approx(
        memory_gb(shape, WORK, Layout())["update"]["activations"]
    )


def test_checkpointing_and_adapters_need_less():
    shape = read_shape("llama-2-7b")
    full = load_recipe("grpo").recipe
    for changes in ({"model.gradient_checkpointing": True}, {"model.lora.rank": 8}, {"optimizer.state": "int8"}):
        smaller = load_recipe("grpo", overrides=changes).recipe
        assert peak_gb(memory_gb(shape, workload_of(smaller, 64), Layout())) < peak_gb(
            memory_gb(shape, workload_of(full, 64), Layout())
        )


def test_a_base_in_8_bits_is_held_once_in_half_the_memory(tmp_path: Path):
    shape = shape_of_tiny("llama", tmp_path)
    given = {"model.lora.rank": 4, "rollout.prompts_per_step": 64, "rollout.max_new_tokens": 12}
    plain, rounded = (
        memory_gb(shape, workload_of(load_recipe("grpo", overrides={**given, "model.base": base}).recipe, 20), Layout())
        for base in ("model", "int8")
    )
    section = ModelSection.model_validate(
        {"name": "tiny:llama", "dtype": "bfloat16", "base": "int8", "lora": {"rank": 4}}
    )
    held = sum(parameter.nbytes for parameter in load_policy(section).model.parameters() if not parameter.requires_grad)
    # Panels are filled up, which shows in so small a model.
    assert 0.7 * held < rounded["update"]["weights"] * 1e9 < 1.2 * held
    assert rounded["update"]["weights"] < plain["update"]["weights"]
    assert rounded["rollout"]["engine's weights"] < 0.5 * plain["rollout"]["engine's weights"]
