"""What is set in a config from the metadata of a GGUF file, and what is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.base.core.errors import ModelError

gguf = pytest.importorskip("gguf")

from tunesmith.engine.models.gguf_in import GgufFacts, check_loaded, complete  # noqa: E402

VALUES = {"context_length": 131072, "rope.dimension_count": 64, "attention.key_length": 64, "rope.freq_base": 500000.0}


def config_of(**fields):
    return LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **fields)


def factors_of(positions):
    """The divisors that llama.cpp's converter writes for a config."""
    scaled_F, _ = ROPE_INIT_FUNCTIONS["llama3"](config_of(rope_parameters=positions), torch.device("cpu"))
    plain_F = positions["rope_theta"] ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    return plain_F / scaled_F


def facts_of(values=VALUES, factors_F=None):
    kind = gguf.GGMLQuantizationType.F32
    tensors = (
        {} if factors_F is None else {"rope_freqs.weight": SimpleNamespace(data=factors_F.numpy(), tensor_type=kind)}
    )
    return GgufFacts("small.gguf", values, tensors)


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},  # Llama 3.1
        {"factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},  # Llama 3.2
        {"factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 5000},
    ],
)
def test_the_scaling_of_llama_3_is_found_in_the_divisors(scaling):
    given = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, **scaling}
    config = config_of()
    complete(config, facts_of(factors_F=factors_of(given)))
    assert config.rope_parameters == given


def test_a_scaling_with_other_parameters_has_the_same_divisors():
    given = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 2.0}
    given |= {"high_freq_factor": 8.0, "original_max_position_embeddings": 16384}  # which is 1, 4 and 8192
    config = config_of()
    complete(config, facts_of(factors_F=factors_of(given)))
    torch.testing.assert_close(factors_of(config.rope_parameters), factors_of(given), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "factors_F", "said"),
    [
        ({**VALUES, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, None, "positions of the kind 'yarn'"),
        ({**VALUES, "rope.dimension_count": 32}, None, "rotary positions of 32 of 64 numbers of a head"),
        (VALUES, torch.linspace(1, 3, 32), "divisors of frequencies (rope_freqs.weight) that are not Llama 3's"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_refused(values, factors_F, said):
    with pytest.raises(ModelError) as refused:
        complete(config_of(), facts_of(values, factors_F))
    assert said in str(refused.value)
    assert "give a folder or a hub id of the model" in str(refused.value)


def test_a_window_that_the_file_does_not_have_is_none():
    config = MistralConfig(hidden_size=256, num_attention_heads=4, head_dim=64)
    assert config.sliding_window == 4096
    complete(config, facts_of())
    assert config.sliding_window is None


def test_weights_without_a_place_are_refused():
    model = AutoModelForCausalLM.from_config(config_of(num_hidden_layers=1, vocab_size=50, intermediate_size=8))
    num_loaded = model.num_parameters()
    tensors = {"all": SimpleNamespace(n_elements=num_loaded), "rope_freqs.weight": SimpleNamespace(n_elements=32)}
    check_loaded(model, GgufFacts("small.gguf", {}, tensors))
    with pytest.raises(ModelError, match="it would compute something else"):
        check_loaded(model, GgufFacts("small.gguf", {}, {**tensors, "bias": SimpleNamespace(n_elements=8)}))
