"""What a language model says of the learnt tokens of a packed micro-batch.

Shape legend: T tokens of all sequences, B sequences, S positions of a row, N learnt tokens, V vocabulary, H hidden.
"""

from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tunesmith.batch.targets import Targets
from tunesmith.kernels.attention.packing import Segments
from tunesmith.kernels.logprob.head import HeadScores, head_scores
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.logprob import States, chosen_logp_entropy, logits_at, trunk_states


def next_token_scores(model: LanguageModel, targets: Targets) -> HeadScores:
    """Scores of `targets.chosen_N`, with gradients to the model. Only the states before learnt tokens meet the head.

    A model with a decoder sees the packed tokens, each sequence for itself and none padded. Any other runs its own
    forward over right-padded rows, and never holds all logits where its output layer is known.
    """
    if model.decoder is None:
        return _padded_scores(model, targets)
    hidden_TH = model.decoder.hidden_states(targets.ids_T, Segments.alone(targets.lengths))
    return model.decoder.scores(hidden_TH[targets.state_N], targets.chosen_N)


def _padded_scores(model: LanguageModel, targets: Targets) -> HeadScores:
    lengths_B = torch.tensor(targets.lengths, device=targets.ids_T.device)
    ids_BS = pad_sequence(list(targets.ids_T.split(targets.lengths)), batch_first=True)
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    start_B = lengths_B.cumsum(0) - lengths_B
    row_N = row_T[targets.state_N]
    position_N = targets.state_N - start_B[row_N]
    if model.output is not None:
        trunk = cast(PreTrainedModel, model.module.base_model)
        hidden_NH = trunk_states(trunk, None, ids_BS, lengths_B, States(row_N, position_N))
        return head_scores(hidden_NH, model.output, targets.chosen_N, kernels=model.kernels)
    logits_NV, _ = logits_at(model.module, ids_BS, lengths_B, row_N, position_N)
    logp_N, entropy_N = chosen_logp_entropy(logits_NV, targets.chosen_N, 1.0)
    with torch.no_grad():
        is_top_N = logits_NV.gather(1, targets.chosen_N[:, None])[:, 0] >= logits_NV.amax(1)
    return HeadScores(logp_N, entropy_N, is_top_N)
