"""Numbers of parameters, counted from a config alone, are those of the model that transformers builds from it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.tiny import FAMILIES, scratch_model, tiny_model
from tunesmith.observe.planning.shape import KNOWN, Shape, read_shape, shape_of

LLAMA = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}


def counted(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def saved_shape(config: PretrainedConfig, folder: Path) -> Shape:
    config.save_pretrained(folder)
    return read_shape(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_model_of_each_family_has_as_many_parameters_as_counted(family: str, tmp_path: Path):
    model = tiny_model(family).model
    assert saved_shape(model.config, tmp_path).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
        LlamaConfig(**LLAMA, num_key_value_heads=1, head_dim=24, tie_word_embeddings=True),
        MistralConfig(**{**LLAMA, "num_attention_heads": 16}),
        Qwen2Config(**{**LLAMA, "num_attention_heads": 32}),
        Qwen3Config(**{**LLAMA, "num_attention_heads": 32, "attention_bias": True}),
        scratch_model().model.config,
    ],
)
def test_biases_ties_and_sizes_of_heads_count(config: PretrainedConfig, tmp_path: Path):
    assert saved_shape(config, tmp_path).num_parameters == counted(config)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("smollm2", 134_515_008),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_published_models_have_their_published_sizes(name: str, num_parameters: int):
    assert read_shape(name).num_parameters == num_parameters


@pytest.mark.parametrize("name", KNOWN)
def test_known_configs_are_counted_as_transformers_does(name: str):
    types = {"llama": LlamaConfig, "qwen2": Qwen2Config}
    config = types[str(KNOWN[name]["model_type"])](**{k: v for k, v in KNOWN[name].items() if k != "model_type"})
    assert read_shape(name.upper()).num_parameters == counted(config)


def test_the_cache_of_transformers_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "models--own--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(KNOWN["llama-2-7b"])))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape("own/model") == read_shape("llama-2-7b")


def test_the_language_model_of_a_composed_model_is_planned():
    inner = {**KNOWN["llama-2-7b"], "tie_word_embeddings": True}
    composed = shape_of({"model_type": "x", "text_config": inner}, "x")
    assert composed == shape_of(inner, "x")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "model_type is mamba"),
        ({**KNOWN["smollm2"], "hidden_size": 0}, "hidden_size is 0"),
        ({**KNOWN["smollm2"], "num_hidden_layers": "many"}, "num_hidden_layers is many"),
        ({**KNOWN["smollm2"], "vocab_size": True}, "vocab_size is True"),
        ({"model_type": "gpt2"}, "n_embd is None"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(config: dict[str, object], named: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(str(tmp_path / "config.json"))


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(ModelError, match="did you mean llama-2-70b"):
        read_shape("llama2-70b")
