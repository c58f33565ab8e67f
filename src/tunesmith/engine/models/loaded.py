"""The record of a loaded model, and changes that are made to it after loading."""

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tunesmith.base.core.errors import ConfigError, ModelError

LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
    struct.error,
)
"""Raised by the library for invalid values in a file of a model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer; `source` is the name given by the user, `dtype` that of the weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    dtype: torch.dtype


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of `model` to zero; its config, and so the exported one, is unchanged.

    The ratio of PPO compares two passes over the same tokens; with dropout it would differ from 1 before any update.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def unmask_padding_embedding(model: PreTrainedModel) -> None:
    """Train the embedding of the padding token like any other: if pad equals eos, the library would freeze it.

    Padding positions get no gradient, because no loss reads them.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def context_length(model: PreTrainedModel) -> int | None:
    """The model's maximum number of positions; None if its configuration has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def room_for_prompts(model: PreTrainedModel, max_new_tokens: int) -> int | None:
    """Tokens that a prompt may have beside a completion; None if the model's context has no limit.

    Raises:
        ConfigError: the completion alone fills the context.
    """
    context = context_length(model)
    if context is not None and max_new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens is {max_new_tokens}, but the model's context holds {context} tokens, those of the "
            f"prompt included; set it to less, such as {max(1, context // 2)}"
        )
    return None if context is None else context - max_new_tokens


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype` and leave its buffers alone, as the library's loading does.

    Rotary frequencies are a float32 buffer; in bfloat16 the angles would be wrong.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def freeze_lower_layers(model: PreTrainedModel, num_trainable_layers: int | None) -> None:
    """Leave the last `num_trainable_layers` layers and the final norm of `model` trainable and freeze the rest.

    None trains everything. The embedding and a tied output head are frozen, as are all layers below: the backward pass
    ends where the frozen part begins (the `num_layers_unfrozen` of trlX).

    Raises:
        ModelError: if the model has fewer layers, or its layers cannot be found.
    """
    if num_trainable_layers is None:
        return
    layers = _layers(model, num_trainable_layers, "model.num_trainable_layers")
    model.requires_grad_(False)
    for layer in layers[-num_trainable_layers:]:
        layer.requires_grad_(True)
    for name, module in model.base_model.named_children():
        if "norm" in name or name == "ln_f":
            module.requires_grad_(True)


def keep_lower_layers(model: PreTrainedModel, num_layers: int | None) -> None:
    """Keep the lowest `num_layers` transformer layers of `model`, and the final norm; None keeps all.

    A scalar head needs less depth than a language model, and then costs a fraction to train and to run.

    Raises:
        ModelError: if the model has fewer layers, or its layers cannot be found.
    """
    if num_layers is None:
        return
    layers = _layers(model, num_layers, "reward_model.num_layers")
    del layers[num_layers:]
    config = model.config.get_text_config()
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of transformer layers: the module list of the trunk with the most parameters. Raises ModelError if
    there is none.
    """
    lists = [module for module in model.base_model.children() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(f"the layers of {type(model).__name__} cannot be found; leave its layers as they are")
    return max(lists, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def _layers(model: PreTrainedModel, num_wanted: int, key: str) -> nn.ModuleList:
    """The stack of transformer layers; `key` is the recipe's key that asks for `num_wanted` of them."""
    layers = layers_of(model)
    if num_wanted > len(layers):
        raise ModelError(
            f"{key} is {num_wanted}, but the model has {len(layers)} layers; "
            f"give 1 to {len(layers)}, or null for all of them"
        )
    return layers


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers; errors still raise."""
    had_bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
