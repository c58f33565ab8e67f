"""The record of a loaded model, and what every loader applies to it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer; `source` is the name that it was asked for by, `dtype` that of its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    dtype: torch.dtype


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of `model` to zero; its config, and so what is exported, stays as it was.

    The ratio of PPO compares two passes over the same tokens; with dropout it would differ from 1 before any update.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def unmask_padding_embedding(model: PreTrainedModel) -> None:
    """Let the embedding of the padding token learn like any other: where pad equals eos, the library would freeze it.

    Padding positions themselves get no gradient, because no loss reads them.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model's positions reach; None where its configuration names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype` and leave its buffers alone, as the library's loading does.

    Rotary frequencies are a float32 buffer: in bfloat16 they would turn positions by wrong angles.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back the bars and warnings of transformers while local files are read or written; errors still raise."""
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
