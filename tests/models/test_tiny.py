"""Tiny models, `scratch` and their tokenizer."""

import pytest
import torch
from oracles import tiny_classifier

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.tiny import FAMILIES, byte_tokenizer, scratch_model, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator_alone(family):
    before = torch.get_rng_state()
    first, second, other = (tiny_model(family, seed).model.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_in_training_mode(family):
    model = tiny_model(family).model.train()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_overrides_reach_the_config_and_an_unknown_family_is_refused():
    assert tiny_model("llama", num_hidden_layers=1).model.config.num_hidden_layers == 1
    assert tiny_classifier("qwen3", num_labels=3).model.config.num_labels == 3
    with pytest.raises(ModelError, match=r"mamba.*families are llama"):
        tiny_model("mamba")


def test_the_tokenizer_keeps_any_text_and_pads_with_its_eos():
    tokenizer = byte_tokenizer()
    text = "Schöne  Grüße,\n\tworld 🙂 <tag>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (259, 2, 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_scratch_is_four_layers_of_eight_heads():
    config = scratch_model().model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.vocab_size) == (4, 8, 259)
