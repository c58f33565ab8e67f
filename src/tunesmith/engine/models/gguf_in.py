"""What transformers' reader of GGUF files leaves out, read from the file itself.

The reader (`transformers.modeling_gguf_pytorch_utils`) knows some keys of each family and takes its own defaults for
the rest, without a word: the scaling of rotary positions, Qwen3's size of heads, the caps and scales of Gemma. What
llama.cpp would compute by the file is set in the config here, and what is not known is refused by name.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.base.core.errors import ModelError

FAMILIES = frozenset(
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "phi3",
        "stablelm",
        "starcoder2",
    ]
)
"""By transformers' `model_type`. Other families are read as transformers reads them."""

_FACTORS = "rope_freqs.weight"
_LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
_PARTIAL = ("phi3", "stablelm")
_SCALE_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the sizes of 27 billion parameters, whose attention scores llama.cpp scales by the width of the model."""

_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Metadata and tensors of a file: `values` without the name of the architecture before each key."""

    name: str
    values: Mapping[str, Any]
    tensors: Mapping[str, "gguf.ReaderTensor"]

    @classmethod
    def of(cls, file: Path) -> "GgufFacts":
        """The facts of `file`. Raises whatever the `gguf` package does for a damaged one, or ModelError."""
        reader = gguf.GGUFReader(file)
        prefix = f"{reader.fields['general.architecture'].contents()}."
        values = {
            key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
        }
        _check_places(file, reader)
        _check_sizes(file, values, len(reader.tensors))
        return cls(file.name, values, {one.name: one for one in reader.tensors})

    @property
    def num_elements(self) -> int:
        """Of all weights; divisors of frequencies are none."""
        return sum(int(one.n_elements) for name, one in self.tensors.items() if name != _FACTORS)


def complete(config: PreTrainedConfig, facts: GgufFacts) -> None:
    """Set in `config`, as transformers read it of a file, what the file says beside that.

    Raises:
        ModelError: for what transformers cannot compute, or would compute otherwise.
    """
    family = config.model_type
    if family not in FAMILIES:
        return
    fields: Any = config
    values = facts.values
    if family == "gpt2":
        fields.n_positions = values["context_length"]
        return
    width = fields.hidden_size // fields.num_attention_heads
    head_dim = values.get("attention.key_length", width)
    if head_dim != width or getattr(fields, "head_dim", None) is not None:
        fields.head_dim = head_dim
    if family in ("mistral", "starcoder2"):  # their windows are 4096 by default
        fields.sliding_window = values.get("attention.sliding_window")
    if family in _SCALE_BY_WIDTH:
        is_wide = fields.num_hidden_layers == _SCALE_BY_WIDTH[family]
        fields.query_pre_attn_scalar = width if is_wide else head_dim
        _set_windows(fields, values)
    if family == "gemma2":
        fields.attn_logit_softcapping = values.get("attn_logit_softcapping", fields.attn_logit_softcapping)
        fields.final_logit_softcapping = values.get("final_logit_softcapping", fields.final_logit_softcapping)
    if family == "llama":
        _set_biases(fields, facts)
    _set_positions(fields, facts, head_dim)


def check_loaded(model: PreTrainedModel, facts: GgufFacts) -> None:
    """Raise ModelError if weights of the file have no place in the model, or of the model none in the file."""
    if model.config.model_type not in FAMILIES:
        return
    num_loaded = model.num_parameters()
    if num_loaded != facts.num_elements:
        raise ModelError(
            f"{facts.name} has {facts.num_elements:,} weights, and transformers' {model.config.model_type} "
            f"{num_loaded:,}: it would compute something else; give a folder or a hub id of the model"
        )


def _check_places(file: Path, reader: "gguf.GGUFReader") -> None:
    """Raise ModelError unless the weights lie one behind the other within the file, as all writers put them.

    The readers take whatever bytes are at the place that the header names, such as those of another weight.
    """
    end = int(reader.data_offset)
    for one in sorted(reader.tensors, key=lambda one: int(one.data_offset)):
        begin = int(one.data_offset)
        if begin < end or begin % reader.alignment:
            raise _damaged(file, f"{one.name} begins within something else, at byte {begin:,}")
        end = begin + int(one.n_bytes)
    if end > file.stat().st_size:
        raise _damaged(file, f"its weights end at byte {end:,}, and the file at {file.stat().st_size:,}")


def _check_sizes(file: Path, values: Mapping[str, Any], num_tensors: int) -> None:
    """Raise ModelError for sizes with which building the model would not end, or nothing could be computed."""
    context, num_layers = values.get("context_length", 1), values.get("block_count", 1)
    if isinstance(num_layers, int) and num_layers > num_tensors:
        raise _damaged(file, f"it has {num_layers:,} layers, but only {num_tensors:,} weights")
    if isinstance(context, int) and context < 1:
        raise _damaged(file, f"its context length is {context}")


def _damaged(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} is damaged: {what}; get it again, or give a folder or a hub id of the model")


def _set_windows(fields: Any, values: Mapping[str, Any]) -> None:
    """Set the layers that have a sliding window, where the file says so."""
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [index % pattern < pattern - 1 for index in range(fields.num_hidden_layers)]
    if isinstance(pattern, Sequence):
        fields.layer_types = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _set_biases(fields: Any, facts: GgufFacts) -> None:
    """Biases, of which Llama has all of attention and all of the MLP, or none."""
    groups = {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    }
    for key, names in groups.items():
        setattr(fields, key, any(f"blk.0.{name}.bias" in facts.tensors for name in names))


def _set_positions(fields: Any, facts: GgufFacts, head_dim: int) -> None:
    """The base and scaling of rotary positions, and the share of a head that they turn."""
    values = facts.values
    by_kind: dict[str, Any] = dict(fields.rope_parameters)
    plain: dict[str, Any] = dict(by_kind.get("full_attention", by_kind))
    plain["rope_theta"] = float(values.get("rope.freq_base", plain["rope_theta"]))
    num_turned = values.get("rope.dimension_count", head_dim)
    if fields.model_type in _PARTIAL:
        plain["partial_rotary_factor"] = num_turned / head_dim
    elif num_turned != head_dim:
        raise _refused(facts, f"rotary positions of {num_turned} of {head_dim} numbers of a head")
    plain |= _scaling(facts, plain["rope_theta"], head_dim)
    if "full_attention" not in by_kind:
        fields.rope_parameters = plain
        return
    other = {**by_kind["sliding_attention"], "rope_theta": float(values.get("rope.freq_base_swa", 10_000.0))}
    fields.rope_parameters = {"full_attention": plain, "sliding_attention": other}


def _scaling(facts: GgufFacts, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of rotary positions, as a part of `rope_parameters`."""
    values = facts.values
    kind = values.get("rope.scaling.type", "linear")
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    if kind not in ("linear", "none") or any(name in facts.tensors for name in _LONG):
        raise _refused(facts, f"rotary positions of the kind {kind if kind != 'linear' else 'longrope'!r}")
    if _FACTORS in facts.tensors:
        tensor = facts.tensors[_FACTORS]
        factors_F = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if torch.equal(factors_F, torch.ones_like(factors_F)):
            return {"rope_type": "default"}
        for found in _llama3_scalings(factors_F, theta, head_dim, int(values.get("context_length", 0))):
            if torch.allclose(_factors(found, theta, head_dim), factors_F, rtol=_TOLERANCE, atol=0):
                return found
        raise _refused(facts, f"divisors of frequencies ({_FACTORS}) that are not Llama 3's")
    return {"rope_type": "default"} if factor == 1 or kind == "none" else {"rope_type": "linear", "factor": factor}


def _llama3_scalings(factors_F: torch.Tensor, theta: float, head_dim: int, context: int) -> Iterator[dict[str, Any]]:
    """Candidates of the parameters of Llama 3's scaling by which the frequencies were divided by `factors_F`.

    Low frequencies are divided by `factor`, high ones by 1, and between them 1 / divisor is linear in the frequency:
    with s = (1 / divisor - 1 / factor) / (1 - 1 / factor), s = (original / wavelength - low) / (high - low). Two
    frequencies there give original / (high - low) and low / (high - low); low is 1 in all models that were published.
    """
    factor = round(float(factors_F.max()), 4)
    frequency_F = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns_F = frequency_F / (2 * math.pi)
    smooth_F = (1 / factors_F.double() - 1 / factor) / (1 - 1 / factor)
    between = torch.nonzero((smooth_F > 1e-4) & (smooth_F < 1 - 1e-4)).flatten()
    originals = [8192, *(2**power for power in range(6, 18))]
    if len(between) > 1:
        first, last = int(between[0]), int(between[-1])
        slope = float((smooth_F[first] - smooth_F[last]) / (turns_F[first] - turns_F[last]))
        shift = float(slope * turns_F[first] - smooth_F[first])
        if shift > 0:
            high = 1 + 1 / shift
            original = round(slope * (high - 1))
            yield _llama3(factor, round(high, 3), original)
    elif context and factor:
        originals.insert(1, round(context / factor))
    for original in originals:
        yield _llama3(factor, 4.0, original)


def _llama3(factor: float, high: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> torch.Tensor:
    """The divisors of frequencies that transformers' own function gives, `[head_dim / 2]`."""

    positions = {**scaling, "rope_theta": theta}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=positions)
    scaled_F, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain_F = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain_F / scaled_F


def _refused(facts: GgufFacts, what: str) -> ModelError:
    return ModelError(
        f"{facts.name} has {what}, which are not read from GGUF files; give a folder or a hub id of the model"
    )
