"""GGUF files: of a model folder, tensor by tensor, or of the adapters in a folder."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.engine.models.about import About
from tunesmith.engine.models.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, is_reward_adapter, read_base
from tunesmith.engine.models.architecture import Architecture
from tunesmith.engine.models.conversation import closing_of
from tunesmith.engine.models.folder_check import check_adapter_folder
from tunesmith.engine.models.gguf_out.families import Family, add_header, check_family, family_of, rope_factors
from tunesmith.engine.models.gguf_out.vocabulary import Vocabulary, vocabulary_of
from tunesmith.engine.models.gguf_out.writing import begin_data, writing
from tunesmith.engine.models.load import find_folder, is_built_in, load_policy, load_tokenizer
from tunesmith.engine.models.loaded import LIBRARY_ERRORS, quiet_transformers
from tunesmith.engine.models.lora import has_transposed_weights
from tunesmith.engine.models.reader import describe
from tunesmith.engine.models.tokenizer import configured_stop_ids

TYPES: Mapping[str, tuple[Kind, LlamaFileType]] = {
    "bf16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (Kind.F16, LlamaFileType.MOSTLY_F16),
    "f32": (Kind.F32, LlamaFileType.ALL_F32),
    "q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (Kind.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (Kind.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (Kind.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
"""The types of weights that the `gguf` package can write. Vectors are float32 in each."""

_PLAIN = {Kind.BF16: torch.bfloat16, Kind.F16: torch.float16, Kind.F32: torch.float32}
_ROWS = 4096
"""Rows that are quantised at a time."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the file: `name` there, `source` in the safetensors files; `shape` as torch has it."""

    name: str
    source: str
    kind: Kind
    shape: tuple[int, ...]
    is_transposed: bool

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Of the stored bytes."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.kind)

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return int(np.prod(self.byte_shape))


@dataclass(frozen=True, slots=True)
class _Source:
    """A model folder: what llama.cpp needs to know of it. `model` has no weights."""

    config: Any
    model: PreTrainedModel
    architecture: Architecture
    family: Family
    is_tied: bool


def write_gguf(folder: Path, file: Path, kind: str, about: About, *, replaces: bool = False) -> int:
    """Write the model in `folder`, a plain model folder, to `file`. Returns the number of bytes.

    Weights are written one at a time, so memory holds the largest of them. The file appears when it is complete.

    Raises:
        ModelError: llama.cpp has no place for the model or its tokenizer, a weight is missing, the disk is full, or the
            file exists and is not to be replaced.
    """
    name = about.name
    source = _read_source(folder, name)
    tokenizer = load_tokenizer(folder, name)
    rows = int(source.model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index]
    vocabulary = vocabulary_of(tokenizer, rows, name)
    with _weights(folder) as weights:
        tensors = _plan(source, TYPES[kind][0], weights, name)
        factors_F = rope_factors(source.family, source.architecture, source.config)
        with writing(file, source.family.arch, sum(one.num_bytes for one in tensors), replaces=replaces) as writer:
            writer.add_type(gguf.GGUFType.MODEL)
            about.add_to(writer, has_phi3_vocabulary=_is_of_phi3(tokenizer))
            add_header(writer, source.family, source.architecture, source.config)
            writer.add_file_type(TYPES[kind][1])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            _add_vocabulary(writer, vocabulary, tokenizer, stop_ids(folder, tokenizer))
            if factors_F is not None:
                writer.add_tensor_info("rope_freqs.weight", factors_F.shape, np.dtype("float32"), 4 * len(factors_F))
            for one in tensors:
                writer.add_tensor_info(one.name, one.byte_shape, np.dtype("uint8"), one.num_bytes, one.kind)
            begin_data(writer)
            if factors_F is not None:
                writer.write_tensor_data(factors_F.numpy())
            for one in tensors:
                stored = cast(torch.Tensor, weights[one.source].get_tensor(one.source))
                writer.write_tensor_data(_encoded(_ordered(stored, one, source), one))
    return file.stat().st_size


def write_lora_gguf(folder: Path, file: Path, about: About, *, replaces: bool = False) -> int:
    """Write the LoRA adapters in `folder`, in PEFT's layout, to `file`, as float32. Returns the number of bytes.

    llama.cpp adds them to a GGUF file of their base (`--lora`).

    Raises:
        ModelError: as of `write_gguf`; the adapters are DoRA, or have several scales.
    """
    name = about.name
    values = cast(dict[str, Any], check_adapter_folder(folder, name)[CONFIG_FILE])
    if is_reward_adapter(folder, name):
        raise ModelError(f"{name} holds the adapters of a reward model, which llama.cpp does not run")
    if values.get("use_dora") or values.get("rank_pattern") or values.get("alpha_pattern"):
        raise ModelError(
            f"{name} holds DoRA adapters or several ranks, for which a LoRA GGUF has no place; leave out --lora"
        )
    base = read_base(folder, name)
    if is_built_in(base.name):
        source = _source_of(load_policy(ModelSection(name=base.name, seed=base.seed)).model.config, base.name)
    else:
        source = _read_source(find_folder(base.name), base.name)
    alpha = values["lora_alpha"] * (values["r"] ** 0.5 if values.get("use_rslora") else 1)
    tensors = _adapter_tensors(folder / WEIGHTS_FILE, source)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with writing(file, source.family.arch, num_bytes, replaces=replaces) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        about.add_to(writer)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
        for target, tensor in tensors.items():
            writer.add_tensor(target, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return file.stat().st_size


def _adapter_tensors(file: Path, source: _Source) -> dict[str, np.ndarray]:
    """The factors of all adapters by their names in a GGUF file, with rows in the order of the weights there."""
    table = gguf.get_tensor_name_map(_arch_of(source.family), len(source.architecture.blocks))
    found: dict[str, np.ndarray] = {}
    with _opened(file) as stored:
        for one in sorted(stored.keys()):
            module, _, factor = one.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
            target = table.get_name(module)
            if target is None or factor not in ("A", "B"):
                raise ModelError(f"llama.cpp's {source.family.arch!r} has no place for the adapter {one}")
            tensor = stored.get_tensor(one).float()
            order = source.family.orders.get(target.rpartition(".")[2])
            if factor == "B" and order is not None:
                tensor = order(tensor, source.architecture)
            found[f"{target}.weight.lora_{factor.lower()}"] = tensor.contiguous().numpy()
    return found


def _read_source(folder: Path, name: str) -> _Source:
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder)
    except LIBRARY_ERRORS as error:
        raise ModelError(f"cannot read the configuration of {name} ({error}); get the folder again") from error
    return _source_of(config, name)


def _source_of(config: Any, name: str) -> _Source:
    if any("SequenceClassification" in str(one) for one in config.architectures or ()):
        raise ModelError(f"{name} is a reward model, which writes no text, so there is no GGUF file of it")
    family = family_of(config.model_type, name)
    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = describe(model)
    is_tied = bool(config.tie_word_embeddings)
    check_family(family, architecture, is_tied=is_tied)
    return _Source(config, model, architecture, family, is_tied)


def _plan(source: _Source, kind: Kind, weights: Mapping[str, Any], name: str) -> list[_Tensor]:
    """The tensors of the file, in its order.

    Raises:
        ModelError: the folder lacks a weight or has one that the model does not have.
    """
    table = gguf.get_tensor_name_map(_arch_of(source.family), len(source.architecture.blocks))
    transposed = has_transposed_weights(source.model)
    inputs, outputs = (f"{_name_of(source.model, module())}.weight" for module in _ends(source.model))
    found: list[_Tensor] = []
    for key, parameter in source.model.state_dict().items():
        stored = inputs if key == outputs and source.is_tied else key
        if key == outputs and source.is_tied and not source.family.untied:
            continue
        if stored not in weights:
            raise ModelError(f"the weights of {name} lack {stored}; export the run again, or get the model again")
        module, _, suffix = key.rpartition(".")
        target = table.get_name(module)
        if target is None:
            raise ModelError(f"llama.cpp's {source.family.arch!r} has no place for {key} of {name}")
        turned = transposed and parameter.dim() == 2 and target.startswith("blk.")
        shape = tuple(reversed(parameter.shape)) if turned else tuple(parameter.shape)
        one_kind = _kind_of(target, shape, kind, is_end=key in (inputs, outputs))
        found.append(_Tensor(f"{target}.{suffix}", stored, one_kind, shape, turned))
    strange = sorted(set(weights) - {one.source for one in found} - {outputs})
    if strange:
        raise ModelError(f"the weights of {name} hold {strange[0]}, for which a language model has no place")
    return found


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.get_input_embeddings, model.get_output_embeddings


def _name_of(model: PreTrainedModel, module: torch.nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _kind_of(target: str, shape: Sequence[int], kind: Kind, *, is_end: bool) -> Kind:
    """Vectors and learned positions stay float32, as llama.cpp wants them. With few bits the embedding and the output
    layer have eight, and rows that fill no whole blocks are bfloat16.
    """
    if len(shape) < 2 or target == "position_embd":
        return Kind.F32
    if is_end and kind not in _PLAIN:
        kind = Kind.Q8_0
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block_size == 0 else Kind.BF16


def _ordered(stored: torch.Tensor, one: _Tensor, source: _Source) -> torch.Tensor:
    """The weight as llama.cpp reads it."""
    tensor = stored.t() if one.is_transposed else stored
    if tuple(tensor.shape) != one.shape:
        raise ModelError(f"the weight {one.source} is {list(tensor.shape)}, but its config.json says {list(one.shape)}")
    part = one.name.split(".")[-2]
    order = source.family.orders.get(part)
    if order is not None:
        tensor = order(tensor, source.architecture)
    if source.family.offset and part.endswith("norm"):
        tensor = tensor.float() + source.family.offset
    return tensor.contiguous()


def _encoded(tensor: torch.Tensor, one: _Tensor) -> np.ndarray:
    """The bytes of a tensor in its kind."""
    if one.kind in _PLAIN:
        plain = tensor.to(_PLAIN[one.kind]).contiguous()
        if one.kind == Kind.F16 and not bool(plain.isfinite().all()):
            raise ModelError(f"the weight {one.source} is too large for float16; take --type bf16")
        return plain.reshape(-1).view(torch.uint8).numpy().reshape(one.byte_shape)
    encoded = np.empty(one.byte_shape, np.uint8)
    for start in range(0, len(tensor), _ROWS):
        rows = tensor[start : start + _ROWS].float().numpy()
        encoded[start : start + _ROWS] = gguf.quants.quantize(rows, one.kind)
    return encoded


def _is_of_phi3(tokenizer: PreTrainedTokenizerBase) -> bool:
    return {"<unk>", "<s>", "</s>", "<|endoftext|>"} <= tokenizer.get_vocab().keys()


def _arch_of(family: Family) -> Any:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)


def _add_vocabulary(
    writer: gguf.GGUFWriter, vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_key_value(
            gguf.Keys.Tokenizer.MERGES, vocabulary.merges, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
        )
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    ids: dict[Any, object] = {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_eos_token_id: tokenizer.eos_token_id if tokenizer.eos_token_id is not None else stops[:1],
        writer.add_unk_token_id: tokenizer.unk_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
    }
    others = [index for index in stops if index != tokenizer.eos_token_id]
    # The first also ends the turns of a chat; llama.cpp has two places, and knows the usual ones by their text.
    ids |= dict(zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False))
    for add, index in ids.items():
        if isinstance(index, int) and index < len(vocabulary.tokens):
            add(index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)


def stop_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a text, that which closes the turn of a chat first."""
    has_config = (folder / "generation_config.json").is_file()
    config = GenerationConfig.from_pretrained(folder) if has_config else None
    closing = closing_of(tokenizer).token_id if tokenizer.chat_template else None
    return tuple(dict.fromkeys(([] if closing is None else [closing]) + [*configured_stop_ids(config, tokenizer)]))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged ({error}); get it again") from error


@contextmanager
def _weights(folder: Path) -> Iterator[dict[str, Any]]:
    """The open safetensors file of each weight in `folder`, by the weight's name."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            stored = stack.enter_context(_opened(file))
            found |= dict.fromkeys(stored.keys(), stored)
        yield found
