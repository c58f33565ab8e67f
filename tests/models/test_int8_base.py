"""A base in 8 bits under adapters: numbers of trainer and engine, gradients, memory, folders, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tunesmith.base.config.sections import TINY_FAMILIES, ModelSection, RewardSource
from tunesmith.base.core.errors import ModelError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.linear_int8 import torch_impl
from tunesmith.engine.models import lora
from tunesmith.engine.models.architecture import weight_of
from tunesmith.engine.models.export import ModelCard, save_final, save_merged
from tunesmith.engine.models.fingerprint import fingerprint
from tunesmith.engine.models.int8_base import Int8Linear, has_int8_base, unround
from tunesmith.engine.models.language_model import language_model, reference_of
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.reader import describe
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.rewards.scorer import Scorer

PROMPTS = [Prompt("a", "Hello there, all of you"), Prompt("b", "x")]
IDS = torch.randint(3, 259, (1, 12), generator=torch.Generator().manual_seed(0))
BY_TRANSFORMERS = [("exaone4", "float32"), ("exaone4", "bfloat16"), ("olmoe", "bfloat16")]
"""Tiny models that transformers alone computes."""
NATIVE = [
    (family, dtype)
    for family in TINY_FAMILIES
    for dtype in ("bfloat16", "float32")
    if (family, dtype) not in BY_TRANSFORMERS
]
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def loaded(family: str = "llama", dtype: str = "float32", *, base: str = "int8", **keys: Any) -> LoadedModel:
    """A policy with adapters that do something."""
    section = {"name": f"tiny:{family}", "dtype": dtype, "base": base, "lora": {"rank": 4, **keys}}
    policy = load_policy(ModelSection.model_validate(section))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return policy


def rounded(policy: LoadedModel) -> dict[str, Int8Linear]:
    return {name: part for name, part in policy.model.named_modules() if isinstance(part, Int8Linear)}


@pytest.mark.parametrize(("family", "dtype"), NATIVE)
def test_engine_and_trainer_agree_to_the_bit_in_every_family(family: str, dtype: str):
    policy = loaded(family, dtype)
    assert rounded(policy)
    engine = open_engine(policy.model, policy.tokenizer)
    engine.generate(PROMPTS, 3, SamplingParams(max_new_tokens=10, seed=1))
    assert engine.is_exact


@DTYPES
def test_dora_agrees_to_the_bit(dtype: str):
    policy = loaded("qwen2", dtype, use_dora=True)
    engine = open_engine(policy.model, policy.tokenizer)
    engine.generate(PROMPTS, 2, SamplingParams(max_new_tokens=10, seed=1))
    assert engine.is_exact


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "qwen2"])
def test_each_map_has_the_weight_that_its_8_bits_stand_for(family: str):
    plain, policy = loaded(family, base="model"), loaded(family)
    blocks = zip(describe(plain.model).blocks, describe(policy.model).blocks, strict=True)
    parts = [
        (was, now)
        for before, after in blocks
        for one, other in zip(before.projections, after.projections, strict=True)
        for was, now in zip(one.modules, other.modules, strict=True)  # type: ignore[union-attr]
    ]
    assert len(parts) == len(rounded(policy)) > 0
    for was, now in parts:
        assert isinstance(now, Int8Linear)
        weight_OI = weight_of(was).detach()
        torch.testing.assert_close(now.weight, torch_impl.dequantized(weight_OI), rtol=0, atol=1e-8)
        assert torch.equal(weight_of(now.plain()), now.weight)
        assert type(now.plain()) is type(was)


def test_transformers_own_forward_gives_the_same_numbers_up_to_rounding():
    policy = loaded("qwen2")
    own = policy.model(IDS).logits[0]
    ours = torch.stack([own[place] for place in range(IDS.shape[1])])
    lora.merge(merged := lora.twin(policy.model))
    assert not has_int8_base(merged) and not lora.has_adapters(merged)
    plain = merged(IDS).logits[0]
    # What is left of the difference is the rounding of the inputs.
    assert float((ours - plain).detach().norm()) < 0.03 * float(plain.detach().norm())
    assert not torch.equal(ours, plain)


def test_gradients_are_those_of_the_weights_that_the_8_bits_stand_for():
    policy = loaded()
    unround(exact := lora.twin(policy.model))
    found = []
    for model in (policy.model, exact):
        model.zero_grad()
        model(IDS).logits.float().log_softmax(-1)[..., 7].mean().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        assert all("lora_" in name for name in grads) and grads
        found.append(torch.cat([grad.flatten() for grad in grads.values()]))
    assert float((found[0] - found[1]).norm()) < 0.05 * float(found[1].norm())


def test_queries_keys_and_values_lie_in_one_weight_and_copies_share_it():
    policy = loaded()
    attention: Any = policy.model.model.layers[0].self_attn
    one, other = attention.q_proj.base_layer, attention.k_proj.base_layer
    assert one.numbers is other.numbers and (one.first, other.first) == (0, one.out_features)
    reference = lora.frozen_copy(policy.model)
    shared: Any = reference.model.layers[0].self_attn
    assert shared.q_proj.base_layer.numbers is one.numbers
    plain = loaded(base="model")
    held = sum(parameter.nbytes for parameter in policy.model.model.layers.parameters())
    before = sum(parameter.nbytes for parameter in plain.model.model.layers.parameters())
    assert held < 0.6 * before


def test_the_engine_makes_no_copy_of_the_base():
    policy = loaded()
    engine = open_engine(policy.model, policy.tokenizer)
    engine.generate(PROMPTS, 1, SamplingParams(max_new_tokens=2, seed=1))
    kept = engine._runner.linears.values()  # type: ignore[union-attr]
    addresses = {one._base.weight.numbers.data_ptr() for one in kept if hasattr(one, "_base")}
    assert addresses == {part.numbers.data_ptr() for part in rounded(policy).values()}


def test_saved_adapters_are_loaded_with_their_base_in_8_bits(tmp_path):
    policy = loaded()
    card = ModelCard(base_model="tiny:llama", algorithm="GRPO")
    save_final(policy.model, policy.tokenizer, tmp_path / "final", card)
    again = load_policy(str(tmp_path / "final"), dtype=torch.float32)
    assert rounded(again)
    assert torch.equal(policy.model(IDS).logits, again.model(IDS).logits)
    save_merged(tmp_path / "final", tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"), dtype=torch.float32)
    assert not has_int8_base(merged.model)
    lora.merge(policy.model)
    assert torch.equal(policy.model(IDS).logits, merged.model(IDS).logits)


def test_a_reward_model_on_a_base_in_8_bits_is_loaded_again(tmp_path):
    section = ModelSection(name="tiny:qwen2", dtype="float32", base="int8", lora={"rank": 4})  # type: ignore[arg-type]
    model = new_reward_model(section)
    assert has_int8_base(model.model)
    assert not isinstance(model.model.score, Int8Linear)
    save_final(model, model.tokenizer, tmp_path / "final", ModelCard("tiny:qwen2", "reward"))
    assert has_int8_base(load_reward_model(str(tmp_path / "final")).model)


@pytest.mark.parametrize(("family", "dtype"), BY_TRANSFORMERS)
def test_what_transformers_alone_computes_is_refused(family: str, dtype: str):
    with pytest.raises(ModelError, match=rf"model\.base int8 is not for 'tiny:{family}'.*leave model\.base out"):
        loaded(family, dtype)


def test_without_adapters_it_is_refused():
    section = ModelSection(name="tiny:llama", base="int8")
    with pytest.raises(ModelError, match=r"has no adapters.*model\.lora\.rank"):
        load_policy(section)


def test_a_damaged_note_of_the_base_is_refused(tmp_path):
    policy = loaded()
    save_final(policy.model, policy.tokenizer, tmp_path / "final", ModelCard("tiny:llama", "GRPO"))
    path = tmp_path / "final" / "base.json"
    path.write_text(path.read_text().replace("true", '"yes"'))
    with pytest.raises(ModelError, match=r"base\.json"):
        load_policy(str(tmp_path / "final"))


def test_older_folders_do_not_say():
    policy = loaded(base="model")
    assert not lora.base_of(policy.model).is_int8
    assert replace(lora.base_of(policy.model), is_int8=True).is_int8


@DTYPES
def test_a_reference_in_8_bits_is_near_the_model_and_leaves_it_alone(dtype: str):
    policy = load_policy(ModelSection(name="tiny:qwen2", dtype=dtype))  # type: ignore[arg-type]
    model = language_model(policy.model)
    before = fingerprint(policy.model, kernels=model.kernels)
    reference = reference_of(model, ModelSection(reference="int8"))
    assert has_int8_base(reference.module) and not has_int8_base(policy.model)
    assert fingerprint(policy.model, kernels=model.kernels) == before
    assert model.decoder is not None and reference.decoder is not None
    logps = []
    for decoder in (model.decoder, reference.decoder):
        with torch.no_grad():
            logps.append(decoder.logits(decoder.hidden_states(IDS[0], [IDS.shape[1]])).float().log_softmax(-1))
    kl = float((logps[0].exp() * (logps[0] - logps[1])).sum(-1).mean())
    assert 0 < kl < 0.01
    assert not any(parameter.requires_grad for parameter in reference.module.parameters())


def test_a_reward_model_computes_in_8_bits_where_its_source_says_so(tmp_path):
    model = new_reward_model(ModelSection(name="tiny:qwen2", dtype="float32"))
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    save_final(model, model.tokenizer, tmp_path / "final", ModelCard("tiny:qwen2", "reward"))
    source = RewardSource(source=str(tmp_path / "final"))
    scores = []
    for one in (source, source.model_copy(update={"weights": "int8"})):
        (reward,) = Scorer([one], policy_tokenizer=model.tokenizer).models.values()
        assert has_int8_base(reward.model) == (one.weights == "int8")
        with torch.no_grad():
            scores.append(reward(IDS, torch.tensor([IDS.shape[1]])))
    assert 0 < float((scores[0] - scores[1]).abs().max()) < 0.1 * float(scores[0].abs().max())
