"""Log-probs of the tokens of completions: the hot path of PPO on a CPU.

Dimension letters: B sequences, T completion positions, S positions of the whole sequence, N completion tokens of the
batch in row order, V vocabulary, H hidden.

Logits are made for the N positions that predict a completion token and for no other. A `LanguageModel` with a decoder
computes packed tokens, without padding, what neighbouring rows begin with in common once, and with the bits of the
rollout engine; it never holds all logits. Any other model runs its own forward over padded rows; a hook in front of its
output layer picks the N rows, so that whatever the model does to its logits afterwards (scaling in Cohere and Granite)
is done by its own code.
"""

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tunesmith.core.errors import ModelError
from tunesmith.kernels.logprob.head import OutputLayer, head_logp_entropy
from tunesmith.kernels.logprob.torch_impl import chosen_logp_entropy_in_blocks as chosen_logp_entropy
from tunesmith.models.decoder import Decoder
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.packed_rows import pack_rows, states_at

_LOGITS_BYTES = 256 * 1024 * 1024
"""Without gradients, rows of the batch are taken in chunks whose float32 logits stay below this."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per completion token, right padded with zeros: column t belongs to the t-th completion token of the row.

    `logp_BT`: nats; `entropy_BT`: nats, of the distribution the token was drawn from; `value_BT`: value of the state
    before the token was drawn, None without a value head. All float32.
    """

    logp_BT: torch.Tensor
    entropy_BT: torch.Tensor
    value_BT: torch.Tensor | None = None


def token_logps(
    model: PreTrainedModel | LanguageModel,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    prompt_lengths_B: torch.Tensor,
    temperature: float = 1.0,
    value_head: nn.Module | None = None,
) -> TokenScores:
    """Log-prob and entropy of each completion token under softmax(logits / temperature), and values with a head.

    `ids_BS` is right padded; row b has `lengths_B[b]` real ids, of which the first `prompt_lengths_B[b]` (at least 1)
    are the prompt. The log-softmax is in float32 whatever the dtype of the weights. T is the longest completion.
    Rows of one prompt should stand together: a decoder computes it once. Gradients flow to the model and the head;
    without them, and without a decoder, rows go in chunks that bound the memory of the logits.
    """
    _check(ids_BS, lengths_B, prompt_lengths_B, temperature)
    module = model.module if isinstance(model, LanguageModel) else model
    decoder = model.decoder if isinstance(model, LanguageModel) else None
    output = model.output if isinstance(model, LanguageModel) else None
    takes_all = decoder is not None or output is not None or torch.is_grad_enabled()
    chunk = len(ids_BS) if takes_all else _rows_per_chunk(module, lengths_B - prompt_lengths_B)
    num_columns = int((lengths_B - prompt_lengths_B).max())
    parts: list[TokenScores] = []
    for start in range(0, len(ids_BS), chunk):
        rows = slice(start, start + chunk)
        layout = _Layout(ids_BS[rows], lengths_B[rows], prompt_lengths_B[rows], num_columns)
        if decoder is not None:
            parts.append(_packed_scores(decoder, value_head, layout, temperature))
        elif output is not None and isinstance(model, LanguageModel):
            parts.append(_trunk_scores(model, output, value_head, layout, temperature))
        else:
            parts.append(_scores(module, value_head, layout, temperature))
    if len(parts) == 1:
        return parts[0]
    values = [part.value_BT for part in parts if part.value_BT is not None]
    return TokenScores(
        torch.cat([part.logp_BT for part in parts]),
        torch.cat([part.entropy_BT for part in parts]),
        torch.cat(values) if values else None,
    )


def token_logps_reference(
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    prompt_lengths_B: torch.Tensor,
    temperature: float = 1.0,
) -> TokenScores:
    """The definition of `token_logps`: one row at a time, no padding, logits of every position, plain log-softmax."""
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


def length_mask(lengths_B: torch.Tensor, num_columns: int) -> torch.Tensor:
    """mask_BT: True for the first `lengths_B[b]` of `num_columns` columns. Never made from a pad id."""
    return torch.arange(num_columns, device=lengths_B.device)[None] < lengths_B[:, None]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Some rows of the batch, and the number of columns of the result."""

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    num_columns: int

    def trimmed_ids(self) -> torch.Tensor:
        """ids_BS without the columns that are padding in every row."""
        return self.ids_BS[:, : int(self.lengths_B.max())]

    def state_positions(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row_N, position_N, column_N): the state before each completion token, and its column in the result."""
        mask_BT = length_mask(self.lengths_B - self.prompt_lengths_B, self.num_columns)
        row_N, column_N = mask_BT.nonzero(as_tuple=True)
        return row_N, column_N + self.prompt_lengths_B[row_N] - 1, column_N

    def spread(self, score_N: torch.Tensor, row_N: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
        """score_BT with zeros in the padding columns."""
        zeros_BT = score_N.new_zeros((len(self.ids_BS), self.num_columns))
        return zeros_BT.index_put((row_N, column_N), score_N)


def _scores(model: PreTrainedModel, value_head: nn.Module | None, layout: _Layout, temperature: float) -> TokenScores:
    ids_BS = layout.trimmed_ids()
    row_N, position_N, column_N = layout.state_positions()
    logits_NV, hidden_NH = logits_at(model, ids_BS, layout.lengths_B, row_N, position_N)
    logp_N, entropy_N = chosen_logp_entropy(logits_NV, ids_BS[row_N, position_N + 1], temperature)
    value_BT = None if value_head is None else layout.spread(value_head(hidden_NH), row_N, column_N)
    return TokenScores(layout.spread(logp_N, row_N, column_N), layout.spread(entropy_N, row_N, column_N), value_BT)


def _trunk_scores(
    model: LanguageModel,
    output: OutputLayer,
    value_head: nn.Module | None,
    layout: _Layout,
    temperature: float,
) -> TokenScores:
    """By transformers' own trunk over padded rows, and the output layer in chunks."""
    ids_BS = layout.trimmed_ids()
    row_N, position_N, column_N = layout.state_positions()
    trunk = cast(PreTrainedModel, model.module.base_model)
    hidden_NH = _padded_states(trunk, ids_BS, layout.lengths_B)[row_N, position_N]
    chosen_N = ids_BS[row_N, position_N + 1]
    logp_N, entropy_N = head_logp_entropy(hidden_NH, output, chosen_N, temperature, kernels=model.kernels)
    value_BT = None if value_head is None else layout.spread(value_head(hidden_NH), row_N, column_N)
    return TokenScores(layout.spread(logp_N, row_N, column_N), layout.spread(entropy_N, row_N, column_N), value_BT)


def _packed_scores(decoder: Decoder, value_head: nn.Module | None, layout: _Layout, temperature: float) -> TokenScores:
    row_N, position_N, column_N = layout.state_positions()
    # Nothing follows the last token, so its state is not needed.
    packed = pack_rows(layout.ids_BS, (layout.lengths_B - 1).clamp(min=1))
    hidden_TH = decoder.hidden_states(packed.ids_T, packed.segments)
    hidden_NH = states_at(hidden_TH, packed.index(row_N, position_N))
    logp_N, entropy_N = decoder.logp_entropy(hidden_NH, layout.ids_BS[row_N, position_N + 1], temperature)
    value_BT = None if value_head is None else layout.spread(value_head(hidden_NH), row_N, column_N)
    return TokenScores(layout.spread(logp_N, row_N, column_N), layout.spread(entropy_N, row_N, column_N), value_BT)


def logits_at(
    model: PreTrainedModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor, row_N: torch.Tensor, position_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits_NV, hidden_NH) of the states at (row, position), from one pass of the model."""
    output_layer = model.get_output_embeddings()
    if output_layer is None:
        raise ModelError(f"{type(model).__name__} has no output layer; give a causal language model")
    picked: list[torch.Tensor] = []

    def pick(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        picked.append(inputs[0][row_N, position_N])
        return (picked[0][None],)

    handle = output_layer.register_forward_pre_hook(pick)
    try:
        mask_BS = length_mask(lengths_B, ids_BS.shape[1])
        logits_1NV = model(input_ids=ids_BS, attention_mask=mask_BS.long(), use_cache=False).logits
    finally:
        handle.remove()
    return logits_1NV[0], picked[0]


@dataclass(frozen=True, slots=True)
class States:
    """Which states are asked for: `position_N` of the rows `row_N`."""

    row_N: torch.Tensor
    position_N: torch.Tensor


def trunk_states(
    trunk: PreTrainedModel, decoder: Decoder | None, ids_BS: torch.Tensor, lengths_B: torch.Tensor, states: States
) -> torch.Tensor:
    """hidden_NH of a model without output layer, at some places of right-padded rows.

    By its `decoder` no padding is computed, and what neighbouring rows begin with in common once; without one it is the
    model's own forward over padded rows.
    """
    if decoder is None:
        return _padded_states(trunk, ids_BS, lengths_B)[states.row_N, states.position_N]
    packed = pack_rows(ids_BS, lengths_B)
    hidden_TH = decoder.hidden_states(packed.ids_T, packed.segments)
    return states_at(hidden_TH, packed.index(states.row_N, states.position_N))


def _padded_states(trunk: PreTrainedModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    mask_BS = length_mask(lengths_B, ids_BS.shape[1])
    return trunk(input_ids=ids_BS, attention_mask=mask_BS.long(), use_cache=False).last_hidden_state


class TrunkAndHead(Protocol):
    """What `critic_values` needs: `heads.Critic` has it."""

    @property
    def trunk(self) -> PreTrainedModel:
        """The model without output layer."""
        ...

    @property
    def value_head(self) -> nn.Module:
        """One number for each hidden state."""
        ...

    @property
    def decoder(self) -> Decoder | None:
        """The trunk's flat decoder; None where its own forward is used."""
        ...


def critic_values(
    critic: TrunkAndHead, ids_BS: torch.Tensor, lengths_B: torch.Tensor, prompt_lengths_B: torch.Tensor
) -> torch.Tensor:
    """value_BT: a critic's value of the state before each completion token, laid out as in `TokenScores`."""
    _check(ids_BS, lengths_B, prompt_lengths_B)
    layout = _Layout(ids_BS, lengths_B, prompt_lengths_B, int((lengths_B - prompt_lengths_B).max()))
    row_N, position_N, column_N = layout.state_positions()
    used_B = (lengths_B - 1).clamp(min=1)  # nothing follows the last token
    ids_BS = ids_BS[:, : int(used_B.max())]
    hidden_NH = trunk_states(critic.trunk, critic.decoder, ids_BS, used_B, States(row_N, position_N))
    return layout.spread(critic.value_head(hidden_NH), row_N, column_N)


def _rows_per_chunk(model: PreTrainedModel, completion_lengths_B: torch.Tensor) -> int:
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[union-attr]
    row_bytes = 4 * vocabulary * int(completion_lengths_B.max())
    return max(1, _LOGITS_BYTES // row_bytes)


def _check(
    ids_BS: torch.Tensor, lengths_B: torch.Tensor, prompt_lengths_B: torch.Tensor, temperature: float = 1.0
) -> None:
    if temperature <= 0:
        raise ModelError(f"temperature is {temperature}; log-probs need a temperature above 0")
    if int(prompt_lengths_B.min()) < 1:
        raise ModelError(
            "a row has an empty prompt; its first token has no state before it, so give each row a prompt token"
        )
    if int((lengths_B - prompt_lengths_B).min()) < 0 or int(lengths_B.max()) > ids_BS.shape[1]:
        raise ModelError(
            f"lengths do not fit: lengths {lengths_B.tolist()}, prompts {prompt_lengths_B.tolist()}, "
            f"{ids_BS.shape[1]} columns; need prompt <= length <= columns in each row"
        )
