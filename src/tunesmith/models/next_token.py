"""What a language model says of the learnt tokens of a packed micro-batch.

Shape legend: T tokens of all sequences, B sequences, S positions of a row, N learnt tokens, V vocabulary, H hidden.
"""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from tunesmith.batch.targets import Targets
from tunesmith.models.decoder import Decoder
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.logprob import chosen_logp_entropy, logits_at, packed_logp_entropy


@dataclass(frozen=True, slots=True)
class NextTokenScores:
    """Of each learnt token: its log-prob in nats, the entropy of the distribution in nats, both float32, and whether no
    token is more likely.
    """

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    is_top_N: torch.Tensor


def next_token_scores(model: LanguageModel, targets: Targets) -> NextTokenScores:
    """Scores of `targets.chosen_N`, with gradients to the model. Only the states before learnt tokens meet the head.

    A model with a decoder sees the packed tokens, each sequence for itself and none padded. Any other runs its own
    forward over right-padded rows.
    """
    if model.decoder is None:
        return _padded_scores(model, targets)
    hidden_TH = model.decoder.hidden_states(targets.ids_T, targets.lengths)
    return _head_scores(model.decoder, hidden_TH[targets.state_N], targets.chosen_N)


def _head_scores(decoder: Decoder, hidden_NH: torch.Tensor, chosen_N: torch.Tensor) -> NextTokenScores:
    """The head: the one place here where numbers of the size of the vocabulary stand."""
    logits_NV = decoder.logits(hidden_NH)
    is_top_N = _is_top(logits_NV, chosen_N)  # before the backward pass writes over the logits
    logp_N, entropy_N = packed_logp_entropy(logits_NV, chosen_N, 1.0, reuse_logits=True, kernels=decoder.kernels)
    return NextTokenScores(logp_N, entropy_N, is_top_N)


def _padded_scores(model: LanguageModel, targets: Targets) -> NextTokenScores:
    lengths_B = torch.tensor(targets.lengths, device=targets.ids_T.device)
    ids_BS = pad_sequence(list(targets.ids_T.split(targets.lengths)), batch_first=True)
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    start_B = lengths_B.cumsum(0) - lengths_B
    row_N = row_T[targets.state_N]
    logits_NV, _ = logits_at(model.module, ids_BS, lengths_B, row_N, targets.state_N - start_B[row_N])
    logp_N, entropy_N = chosen_logp_entropy(logits_NV, targets.chosen_N, 1.0)
    return NextTokenScores(logp_N, entropy_N, _is_top(logits_NV, targets.chosen_N))


@torch.no_grad()
def _is_top(logits_NV: torch.Tensor, chosen_N: torch.Tensor) -> torch.Tensor:
    return logits_NV.gather(1, chosen_N[:, None])[:, 0] >= logits_NV.amax(1)
