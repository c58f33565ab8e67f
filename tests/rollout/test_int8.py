"""The native engine with products in 8 bits: repeatable tokens, log-probs near the trainer's, weights that change."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from integrity import prefilled

from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.trace import trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import Native
from tunesmith.engine.rollout.workers.engine import Workers
from tunesmith.learn.trainers.passes import logps

PROMPTS = [Prompt(str(index), "", token_ids=tuple(range(3 + index, 9 + 7 * index))) for index in range(9)]
SAMPLING = SamplingParams(max_new_tokens=12, seed=5)
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "gemma3")
NEAR = 0.2
"""Nats of a token; models with random weights have numbers without outliers, and come much nearer."""


def ids_of(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group.completions]


def difference(loaded: LoadedModel, groups: Sequence[Group]) -> float:
    """The largest difference of the recorded log-probs to those of the trainer's pass."""
    sequences = pack(groups, pad_id=0, device=torch.device("cpu"))
    trained_BT = logps(language_model(loaded.model), sequences, 1.0, 8)
    drawn = [completion.raw_logps for group in groups for completion in group.completions]
    return max(float((trained_BT[row, : len(own)] - torch.tensor(own)).abs().max()) for row, own in enumerate(drawn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_near_the_trainers_and_not_equal(family: str, dtype: torch.dtype):
    loaded = tiny_model(family, dtype=dtype)
    engine = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"))
    assert not engine.is_exact
    assert 0 < difference(loaded, engine.generate(PROMPTS, 3, SAMPLING)) < NEAR


def test_tokens_depend_on_prompt_sample_and_seed_alone():
    loaded = tiny_model("llama")
    whole = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8")).generate(PROMPTS, 3, SAMPLING)
    few = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"), num_slots=2)
    assert ids_of(few.generate(PROMPTS, 3, SAMPLING)) == ids_of(whole)
    assert ids_of(few.generate(PROMPTS[4:5], 3, SAMPLING)) == ids_of(whole[4:5])
    workers = open_engine(loaded.model, loaded.tokenizer, backend=Workers(2, lease=4, weights="int8"))
    drawn = workers.generate(PROMPTS, 3, SAMPLING)
    assert drawn == whole
    assert not workers.is_exact


@torch.no_grad()
def test_changed_weights_and_adapters_are_packed_again():
    loaded = tiny_model("llama")
    engine = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"))
    before = engine.generate(PROMPTS, 2, SAMPLING)
    for parameter in loaded.model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    after = engine.generate(PROMPTS, 2, SAMPLING)
    assert ids_of(after) != ids_of(before)
    assert difference(loaded, after) < NEAR
    fresh = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"))
    assert fresh.generate(PROMPTS, 2, SAMPLING) == after


def test_a_second_call_finds_prompts_of_the_first_and_draws_the_same():
    loaded = tiny_model("llama")
    engine = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"))
    with trace() as first_call:
        first = engine.generate(PROMPTS, 2, SAMPLING)
    with trace() as second_call:
        assert engine.generate(PROMPTS, 2, SAMPLING) == first
    assert prefilled(second_call) < prefilled(first_call)


@torch.no_grad()
def test_damaged_weights_are_reported():
    loaded = tiny_model("llama")
    engine = open_engine(loaded.model, loaded.tokenizer, backend=Native("int8"))
    loaded.model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="not finite from layer 1 on"):
        engine.generate(PROMPTS, 1, SAMPLING)


def test_a_single_row_has_the_bits_of_many():
    loaded = tiny_model("llama")
    for weights in ("model", "int8"):
        engine = open_engine(loaded.model, loaded.tokenizer, backend=Native(weights))
        together = engine.generate(PROMPTS, 1, SAMPLING)
        alone = [engine.generate([prompt], 1, SAMPLING)[0] for prompt in PROMPTS]
        assert [replace(group, prompt=together[0].prompt) for group in alone] == [
            replace(group, prompt=together[0].prompt) for group in together
        ]
