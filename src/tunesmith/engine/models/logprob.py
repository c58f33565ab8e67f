"""Log-probs of completion tokens (PPO, GRPO, DPO) and of the learnt tokens of packed sequences (SFT).

Shape legend: B sequences, T completion positions, S positions of the whole sequence, N scored tokens in row order,
V vocabulary, H hidden.

Only the N states that predict a scored token go through the output layer. By backend (`LanguageModel.backend`):
- `Decoder`: packed tokens without padding, common prefixes of neighbouring rows computed once, the bits of the rollout
  engine; never holds all logits.
- `TrunkForward`: transformers' trunk over padded rows, then our output layer; never holds all logits.
- `FullForward`: the model's own forward over padded rows. A hook picks the N rows before its output layer, so that what
  the model does to its logits (scaling in Cohere and Granite) is done by its own code. If it is a textbook's, no row is
  picked before, and log-probs are what autograd makes of `log_softmax`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.trace import count
from tunesmith.engine.batch.pack import FrozenStates
from tunesmith.engine.batch.targets import Targets
from tunesmith.engine.kernels.attention.records import Segments
from tunesmith.engine.kernels.logprob import torch_impl
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.logprob.head import HeadScores, OutputLayer, head_logp_entropy, head_scores
from tunesmith.engine.kernels.native import Kernels, shared
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.language_model import FullForward, LanguageModel, TrunkForward
from tunesmith.engine.models.packed_rows import pack_rows, states_at

_LOGITS_BYTES = 256 * 1024 * 1024
"""Limit of the float32 logits of a chunk of rows, without gradients and with `FullForward`."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per completion token, right padded with zeros: column t is the t-th completion token of the row.

    `logp_BT`: nats; `entropy_BT`: nats, of the distribution the token was drawn from; `value_BT`: value of the state
    before the token was drawn, None without a value head. All float32.
    """

    logp_BT: torch.Tensor
    entropy_BT: torch.Tensor
    value_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CompletionLayout:
    """Right-padded rows, the prompt's share of each, and the number of completion columns of the result."""

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    num_columns: int
    frozen: FrozenStates | None = None

    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row_N, position_N, column_N): the state before each completion token, and its column in the result."""
        mask_BT = length_mask(self.lengths_B - self.prompt_lengths_B, self.num_columns)
        row_N, column_N = mask_BT.nonzero(as_tuple=True)
        return row_N, column_N + self.prompt_lengths_B[row_N] - 1, column_N

    def spread(self, score_N: torch.Tensor, row_N: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
        """score_BT with zeros in the padding columns."""
        zeros_BT = score_N.new_zeros((len(self.ids_BS), self.num_columns))
        return zeros_BT.index_put((row_N, column_N), score_N)


def token_logps(
    model: PreTrainedModel | LanguageModel,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    prompt_lengths_B: torch.Tensor,
    temperature: float = 1.0,
    value_head: nn.Module | None = None,
    frozen: FrozenStates | None = None,
) -> TokenScores:
    """Log-prob and entropy of each completion token under softmax(logits / temperature), and values with a head.

    `ids_BS` is right padded; row b has `lengths_B[b]` real ids, of which the first `prompt_lengths_B[b]` (at least 1)
    are the prompt. The log-softmax is in float32 whatever the dtype of the weights. T is the longest completion.
    Keep rows of one prompt together: a decoder computes their prompt once. Gradients flow to the model and the head.
    A bare transformers model is computed by its own forward. With `frozen` a decoder begins after those layers.

    Raises:
        ModelError: lengths that do not fit, an empty prompt, a temperature of 0 or less, a model without output layer.
    """
    layout = replace(completion_layout(ids_BS, lengths_B, prompt_lengths_B), frozen=frozen)
    if temperature <= 0:
        raise ModelError(f"temperature is {temperature}; log-probs need a temperature above 0")
    if not isinstance(model, LanguageModel):
        model = LanguageModel(model, FullForward(), Kernels())
    if not isinstance(model.backend, FullForward) or torch.is_grad_enabled():
        return _token_scores(model, layout, temperature, value_head)
    chunk = _rows_per_chunk(model.module, lengths_B - prompt_lengths_B)
    parts: list[TokenScores] = []
    for start in range(0, len(ids_BS), chunk):
        rows = slice(start, start + chunk)
        part = CompletionLayout(ids_BS[rows], lengths_B[rows], prompt_lengths_B[rows], layout.num_columns)
        parts.append(_token_scores(model, part, temperature, value_head))
    values = [part.value_BT for part in parts if part.value_BT is not None]
    return TokenScores(
        torch.cat([part.logp_BT for part in parts]),
        torch.cat([part.entropy_BT for part in parts]),
        torch.cat(values) if values else None,
    )


def completion_states(
    model: LanguageModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor, *, prompt_lengths_B: torch.Tensor
) -> tuple[torch.Tensor, OutputLayer | None]:
    """(Hidden states `[N, H]` that predict each completion token, row after row; the output layer that makes logits of
    them). With the backend `FullForward` (the logits `[N, V]` themselves; None).

    Arguments and errors as in `token_logps`; gradients flow to the model.
    """
    layout = completion_layout(ids_BS, lengths_B, prompt_lengths_B)
    row_N, position_N, _ = layout.indices()
    hidden_NH, output = _states(model, layout, row_N, position_N)
    return (hidden_NH, output) if isinstance(output, OutputLayer) else (output, None)


def completion_scores(
    model: LanguageModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor, *, prompt_lengths_B: torch.Tensor
) -> HeadScores:
    """Log-probs, entropies and top-1 hits of the completion tokens, row after row, at temperature 1.

    Arguments and errors as in `token_logps`; gradients flow to the model.
    """
    row_N, position_N, _ = completion_layout(ids_BS, lengths_B, prompt_lengths_B).indices()
    chosen_N = ids_BS[row_N, position_N + 1]
    states_N, output = completion_states(model, ids_BS, lengths_B, prompt_lengths_B=prompt_lengths_B)
    if output is None:
        return _scores_of_logits(model, states_N, chosen_N)
    return head_scores(states_N, output, chosen_N, kernels=model.kernels)


def next_token_scores(model: LanguageModel, targets: Targets) -> HeadScores:
    """Log-probs, entropies and top-1 hits of `targets.chosen_N`, at temperature 1, with gradients to the model.

    With a decoder each sequence is computed by itself, and none is padded.
    """
    if isinstance(model.backend, Decoder):
        count_pass(len(targets.ids_T), len(targets.ids_T))
        hidden_TH = model.backend.hidden_states(targets.ids_T, Segments.alone(targets.lengths))
        if model.is_elsewhere:
            return HeadScores(*_absent(targets.chosen_N), torch.zeros_like(targets.chosen_N, dtype=torch.bool))
        return head_scores(hidden_TH[targets.state_N], model.backend.output, targets.chosen_N, kernels=model.kernels)
    lengths_B = torch.tensor(targets.lengths, device=targets.ids_T.device)
    ids_BS = pad_sequence(list(targets.ids_T.split(targets.lengths)), batch_first=True)
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    start_B = lengths_B.cumsum(0) - lengths_B
    row_N = row_T[targets.state_N]
    position_N = targets.state_N - start_B[row_N]
    if isinstance(model.backend, TrunkForward):
        hidden_NH = trunk_states(model.module, None, ids_BS, lengths_B, row_N, position_N)
        return head_scores(hidden_NH, model.backend.output, targets.chosen_N, kernels=model.kernels)
    logits_NV, _ = _logits_at(model, ids_BS, lengths_B, row_N, position_N)
    return _scores_of_logits(model, logits_NV, targets.chosen_N)


def length_mask(lengths_B: torch.Tensor, num_columns: int) -> torch.Tensor:
    """mask_BT: True for the first `lengths_B[b]` of `num_columns` columns. Never derived from a pad id."""
    return torch.arange(num_columns, device=lengths_B.device)[None] < lengths_B[:, None]


def count_pass(num_tokens: torch.Tensor | int, num_positions: int) -> None:
    """Add a forward pass to the figures of the open trace: the positions that it computes; of one with gradients, which
    is an update's, also padding and sharing.

    It computes `num_positions` positions for `num_tokens` tokens: more if it pads rows, fewer if it shares prefixes.
    """
    if torch.is_grad_enabled():
        num_extra = num_positions - int(num_tokens)
        count("micro_batch_tokens", num_positions, out_of=1)
        count("padding_share", max(0, num_extra), out_of=num_positions)
        count("shared_tokens", max(0, -num_extra))
    else:
        count("computed_tokens", num_positions)


def trunk_states(
    model: PreTrainedModel,
    decoder: Decoder | None,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    row_N: torch.Tensor,
    position_N: torch.Tensor,
    frozen: FrozenStates | None = None,
) -> torch.Tensor:
    """hidden_NH of `model` before any output layer, at (row, position) of right-padded rows.

    With its `decoder` nothing is padded, common prefixes of neighbouring rows are computed once, unless it does not
    share them, and layers of `frozen` not at all; with None the trunk's own forward runs over the padded rows.
    """
    num_tokens = lengths_B.sum()
    if decoder is None:
        count_pass(num_tokens, ids_BS.numel())
        mask_BS = length_mask(lengths_B, ids_BS.shape[1])
        trunk = model.base_model
        states_BSH = trunk(input_ids=ids_BS, attention_mask=mask_BS.long(), use_cache=False).last_hidden_state
        return states_BSH[row_N, position_N]
    packed = pack_rows(ids_BS, lengths_B, shares_prefixes=decoder.shares_prefixes)
    count_pass(num_tokens, packed.segments.num_tokens)
    begun = None if frozen is None else (frozen.num_layers, packed.tokens_of(frozen.x_BSH))
    hidden_TH = decoder.hidden_states(packed.ids_T, packed.segments, frozen=begun)
    return states_at(hidden_TH, packed.index(row_N, position_N))


@torch.no_grad()
def frozen_states(decoder: Decoder, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """x_BSH of `FrozenStates`, zeros where there is none: those of the layers that `decoder` has frozen."""
    lengths_B = (lengths_B - 1).clamp(min=1)
    packed = pack_rows(ids_BS, lengths_B, shares_prefixes=decoder.shares_prefixes)
    x_TH = decoder.frozen_states(packed.ids_T, packed.segments)
    row_N, position_N = length_mask(lengths_B, ids_BS.shape[1]).nonzero(as_tuple=True)
    x_BSH = x_TH.new_zeros(*ids_BS.shape, x_TH.shape[1])
    x_BSH[row_N, position_N] = x_TH[packed.index(row_N, position_N)]
    return x_BSH


def completion_layout(
    ids_BS: torch.Tensor, lengths_B: torch.Tensor, prompt_lengths_B: torch.Tensor
) -> CompletionLayout:
    """The checked layout of right-padded rows.

    Raises:
        ModelError: a row has an empty prompt, or lengths that do not fit.
    """
    if int(prompt_lengths_B.min()) < 1:
        raise ModelError("a row has an empty prompt, so no state predicts its first token; give each a prompt token")
    completion_lengths_B = lengths_B - prompt_lengths_B
    if int(completion_lengths_B.min()) < 0 or int(lengths_B.max()) > ids_BS.shape[1]:
        raise ModelError(
            f"lengths do not fit: lengths {lengths_B.tolist()}, prompts {prompt_lengths_B.tolist()}, "
            f"{ids_BS.shape[1]} columns; need prompt <= length <= columns in each row"
        )
    return CompletionLayout(ids_BS, lengths_B, prompt_lengths_B, int(completion_lengths_B.max()))


def _token_scores(
    model: LanguageModel,
    layout: CompletionLayout,
    temperature: float,
    value_head: Callable[[torch.Tensor], torch.Tensor] | None,
) -> TokenScores:
    row_N, position_N, column_N = layout.indices()
    chosen_N = layout.ids_BS[row_N, position_N + 1]
    hidden_NH, output = _states(model, layout, row_N, position_N)
    if model.is_elsewhere:
        logp_N, entropy_N = _absent(chosen_N)
        value_head = None if value_head is None else _no_values
    elif isinstance(output, OutputLayer):
        logp_N, entropy_N = head_logp_entropy(hidden_NH, output, chosen_N, temperature, kernels=model.kernels)
    else:
        logp_N, entropy_N = _of_logits(model, output, chosen_N, temperature)
    value_BT = None if value_head is None else layout.spread(value_head(hidden_NH), row_N, column_N)
    return TokenScores(layout.spread(logp_N, row_N, column_N), layout.spread(entropy_N, row_N, column_N), value_BT)


def _absent(chosen_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for log-probs and entropies that another pipeline stage computes, and for a loss of them that counts there
    alone.
    """
    zero_N = torch.zeros_like(chosen_N, dtype=torch.float32, requires_grad=torch.is_grad_enabled())
    return zero_N, zero_N.detach()


def _no_values(hidden_NH: torch.Tensor) -> torch.Tensor:
    return hidden_NH.new_zeros(len(hidden_NH), dtype=torch.float32)


def _states(
    model: LanguageModel, layout: CompletionLayout, row_N: torch.Tensor, position_N: torch.Tensor
) -> tuple[torch.Tensor, OutputLayer | torch.Tensor]:
    """(hidden_NH, the output layer); with `FullForward` (hidden_NH, logits_NV)."""
    lengths_B = layout.lengths_B
    ids_BS = layout.ids_BS[:, : int(lengths_B.max())]
    if isinstance(model.backend, FullForward):
        logits_NV, hidden_NH = _logits_at(model, ids_BS, lengths_B, row_N, position_N)
        return hidden_NH, logits_NV
    if model.decoder is not None:  # the state after the last token predicts nothing, so it is not computed
        lengths_B = (lengths_B - 1).clamp(min=1)
    hidden_NH = trunk_states(model.module, model.decoder, ids_BS, lengths_B, row_N, position_N, layout.frozen)
    return hidden_NH, model.backend.output  # taken after the pass, which may have gathered its weight


def _of_logits(
    model: LanguageModel, logits_NV: torch.Tensor, chosen_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N) of the model's own logits."""
    if isinstance(model.backend, FullForward) and model.backend.is_textbook:
        return torch_impl.chosen_logp_entropy(logits_NV, chosen_N, temperature)
    return chosen_logp_entropy(logits_NV, chosen_N, temperature, kernels=shared("torch"))


def _scores_of_logits(model: LanguageModel, logits_NV: torch.Tensor, chosen_N: torch.Tensor) -> HeadScores:
    logp_N, entropy_N = _of_logits(model, logits_NV, chosen_N, 1.0)
    with torch.no_grad():
        is_top_N = logits_NV.gather(1, chosen_N[:, None])[:, 0] >= logits_NV.amax(1)
    return HeadScores(logp_N, entropy_N, is_top_N)


def _logits_at(
    model: LanguageModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor, row_N: torch.Tensor, position_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits_NV, hidden_NH) at (row, position), from the model's own forward."""
    module, backend = model.module, model.backend
    output_layer = module.get_output_embeddings()
    if output_layer is None:
        raise ModelError(f"{type(module).__name__} has no output layer; give a causal language model")
    picks = not (isinstance(backend, FullForward) and backend.is_textbook)
    count_pass(lengths_B.sum(), ids_BS.numel())
    picked: list[torch.Tensor] = []

    def pick(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        picked.append(inputs[0][row_N, position_N])
        return (picked[0][None],) if picks else None

    handle = output_layer.register_forward_pre_hook(pick)
    try:
        mask_BS = length_mask(lengths_B, ids_BS.shape[1])
        logits_BSV = module(input_ids=ids_BS, attention_mask=mask_BS.long(), use_cache=False).logits
    finally:
        handle.remove()
    return logits_BSV[0] if picks else logits_BSV[row_N, position_N], picked[0]


def _rows_per_chunk(model: PreTrainedModel, completion_lengths_B: torch.Tensor) -> int:
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[union-attr]
    row_bytes = 4 * vocabulary * int(completion_lengths_B.max())
    return max(1, _LOGITS_BYTES // max(1, row_bytes))
