"""The record of a loaded model, and changes that every loader makes to it."""

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
    """A model with its tokenizer; `source` is the name given by the user, `dtype` that of the weights."""

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
    """Train the embedding of the padding token like any other: if pad equals eos, the library would freeze it.

    Padding positions get no gradient, because no loss reads them.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None


def context_length(model: PreTrainedModel) -> int | None:
    """The model's maximum number of positions; None if its configuration has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype` and leave its buffers alone, as the library's loading does.

    Rotary frequencies are a float32 buffer; in bfloat16 the angles would be wrong.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


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
