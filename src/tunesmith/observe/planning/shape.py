"""Sizes of a model, and its number of parameters, from a `config.json` alone.

Legend: H hidden size, Q query heads, K key and value heads, D size of a head, F size of the MLP.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.core.errors import ModelError

_LLAMA_2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192}
_QWEN = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")

KNOWN: Mapping[str, Mapping[str, object]] = {
    name: {**family, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": is_tied}
    for name, family, sizes, is_tied in (
        ("smollm2", {**_LLAMA_3, "vocab_size": 49152}, (576, 30, 9, 3, 1536), True),
        ("llama-2-7b", _LLAMA_2, (4096, 32, 32, 32, 11008), False),
        ("llama-2-13b", _LLAMA_2, (5120, 40, 40, 40, 13824), False),
        ("llama-2-70b", _LLAMA_2, (8192, 80, 64, 8, 28672), False),
        ("llama-3-8b", _LLAMA_3, (4096, 32, 32, 8, 14336), False),
        ("llama-3-70b", _LLAMA_3, (8192, 80, 64, 8, 28672), False),
        ("llama-3.1-405b", _LLAMA_3, (16384, 126, 128, 8, 53248), False),
        ("qwen2.5-0.5b", {**_QWEN, "vocab_size": 151936}, (896, 24, 14, 2, 4864), True),
        ("qwen2.5-7b", _QWEN, (3584, 28, 28, 4, 18944), False),
        ("qwen2.5-72b", _QWEN, (8192, 80, 64, 8, 29568), False),
    )
}
"""Configs of published models by short name."""

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "gpt2": {"tie_word_embeddings": True},
}
"""Defaults of each family's config, as in transformers."""

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; `num_parameters` counts tied embeddings once, `layer_parameters` are those of one layer."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    layer_parameters: int
    num_parameters: int

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: the layers and the output layer."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    def cache_values(self, num_tokens: float) -> float:
        """Keys and values of `num_tokens` in all layers."""
        return 2 * num_tokens * self.num_layers * self.num_kv_heads * self.head_dim


def read_shape(given: str) -> Shape:
    """The shape of `given`: a `config.json`, a folder or run that has one, a name of `KNOWN`, a hub id in the cache.

    Raises:
        ModelError: there is no such model, its family is unknown, or a size is missing or no positive whole number.
    """
    path = Path(given).expanduser()
    if path.is_dir() and (path / "final" / "config.json").is_file():  # a run
        path = path / "final"
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_of(_read_object(path), str(path))
    if given.lower() in KNOWN:
        return shape_of(KNOWN[given.lower()], given)
    if cached := _cached_config(given):
        return shape_of(_read_object(cached), given)
    raise ModelError(
        f"--model is {given}: no config.json, no folder with one, no model of the local hub cache, and none of "
        f"{', '.join(KNOWN)}{did_you_mean(given, KNOWN)}; give the config.json of the model"
    )


def _read_object(path: Path) -> Mapping[str, object]:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not is_mapping(found):
        raise ModelError(f"{path} holds no JSON object; give the config.json of a model")
    return found


def _cached_config(hub_id: str) -> Path | None:
    """`config.json` of a model that transformers has downloaded before."""
    home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    folder = Path(home).expanduser() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return max(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime, default=None)


def shape_of(config: Mapping[str, object], name: str) -> Shape:
    """The shape that `config`, called `name` in errors, describes. Raises ModelError as `read_shape` does."""
    nested = config.get("text_config")
    if is_mapping(nested):  # a model of text and images: its language model
        config = {**nested, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    family = str(config.get("model_type"))
    if family not in _DEFAULTS:
        raise ModelError(f"{name}: model_type is {family}; a plan can be made for {', '.join(_DEFAULTS)}")
    values = {**_DEFAULTS[family], **{key: value for key, value in config.items() if value is not None}}

    def size(key: str, default: int | None = None) -> int:
        own = _GPT2_NAMES.get(key, key) if family == "gpt2" else key
        value = values.get(own, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{name}: {own} is {value}; it must be a whole number from 1 on")
        return value

    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", max(1, hidden // heads))
    mlp = size("intermediate_size", 4 * hidden if family == "gpt2" else None)
    vocab, context = size("vocab_size"), size("max_position_embeddings")
    layer = _layer_parameters(family, values, (hidden, heads, kv_heads, head_dim, mlp))
    outside = vocab * hidden * (1 if values.get("tie_word_embeddings") else 2)
    outside += (context + 2) * hidden if family == "gpt2" else hidden  # learned positions, and the final norm
    total = layers * layer + outside
    return Shape(family, vocab, hidden, layers, heads, kv_heads, head_dim, context, layer, total)


def _layer_parameters(family: str, values: Mapping[str, object], sizes: tuple[int, int, int, int, int]) -> int:
    H, Q, K, D, F = sizes
    if family == "gpt2":  # weights and biases of qkv, output and both MLP layers, two norms with biases
        return (H * 3 * H + 3 * H) + (H * H + H) + (2 * H * F + F + H) + 4 * H
    attention, mlp = H * (Q + 2 * K) * D + Q * D * H, 3 * H * F
    if family == "qwen2" or values.get("attention_bias"):
        attention += (Q + 2 * K) * D
    if values.get("attention_bias"):
        attention += H
    if values.get("mlp_bias"):
        mlp += 2 * F + H
    norms = (4 if family.startswith("gemma") else 2) * H
    if family in ("qwen3", "gemma3_text"):
        norms += 2 * D
    return attention + mlp + norms
