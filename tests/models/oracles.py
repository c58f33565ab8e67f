"""Definitions that the tests compare with, and models that only tests build."""

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tunesmith.engine.models import tiny
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import TokenScores


def plain_token_logps(
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    prompt_lengths_B: torch.Tensor,
    temperature: float = 1.0,
) -> TokenScores:
    """`token_logps` by its definition: one row at a time, no padding, logits of every position, plain log-softmax."""
    num_columns = int((lengths_B - prompt_lengths_B).max())
    logp_BT, entropy_BT = [], []
    for ids_S, length, prompt_length in zip(ids_BS, lengths_B.tolist(), prompt_lengths_B.tolist(), strict=True):
        logits_SV = model(ids_S[None, :length]).logits[0, prompt_length - 1 : length - 1].float() / temperature
        logp_TV = logits_SV.log_softmax(-1)
        padding = (0, num_columns - (length - prompt_length))
        chosen_T = logp_TV.gather(-1, ids_S[prompt_length:length, None])[:, 0]
        logp_BT.append(nn.functional.pad(chosen_T, padding))
        entropy_BT.append(nn.functional.pad(-(logp_TV.exp() * logp_TV).sum(-1), padding))
    return TokenScores(torch.stack(logp_BT), torch.stack(entropy_BT))


def tiny_classifier(
    family: str, seed: int = 0, *, num_labels: int = 1, dtype: torch.dtype = torch.float32, **overrides: object
) -> LoadedModel:
    """As `tiny_model`, in the sequence-classification layout with `num_labels` logits.

    Its padding token is `<|endoftext|>` (id 0), so that the class's own forward finds the last token.
    """
    config = tiny._tiny_config(family, {"num_labels": num_labels, "pad_token_id": 0, **overrides})
    model = tiny._build(AutoModelForSequenceClassification, config, seed, dtype)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.pad_token = tiny.SPECIAL_TOKENS[0]
    return LoadedModel(model, tokenizer, f"tiny:{family}", dtype)
