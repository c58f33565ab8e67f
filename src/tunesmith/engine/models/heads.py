"""Scalar heads, and the models that carry one: separate critic, reward model.

Shape legend: B sequences, S positions of the whole sequence, T completion positions, H hidden, K labels.

Heads are float32 and work on `hidden.float()` whatever the dtype of the trunk: the differences of rewards and values
that matter are smaller than what bfloat16 resolves.
"""

from typing import Literal, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.schema.records import Prompt, Text
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.ensemble import HEADS, Known, describe_heads, num_heads_of
from tunesmith.engine.models.language_model import TrunkDecoder
from tunesmith.engine.models.length_trend import TREND, LengthTrend, describe_trend
from tunesmith.engine.models.logprob import completion_layout, count_pass, length_mask, trunk_states
from tunesmith.engine.models.lora import require_gradients, twin
from tunesmith.engine.models.proof import in_evaluation_mode, is_close
from tunesmith.engine.models.tokenizer import encode_as_others, encode_pair_side

RewardTransform = Literal["raw", "log_odds"]

_PROBE_LENGTHS = (3, 6, 11)

MADE_HERE = "tunesmith_reward_model"
"""The key in a config that says that Tunesmith trained this reward model."""


class ScalarHead(nn.Module):
    """One float32 number per hidden state. It starts at zero, so that a new value head predicts nothing at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The number for each state: the shape of `hidden` without its last dimension."""
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class Critic(nn.Module):
    """A separate value model: the trunk of `model`, trainable and shared with it, and a value head."""

    def __init__(self, model: PreTrainedModel, section: ModelSection | None = None) -> None:
        super().__init__()
        self.trunk = cast(PreTrainedModel, model.base_model)
        require_gradients(self.trunk)
        self.value_head = ScalarHead(hidden_size(model)).to(model.device)
        self._decoder = TrunkDecoder(section or ModelSection())

    @classmethod
    def from_policy(cls, model: PreTrainedModel, section: ModelSection | None = None) -> "Critic":
        """A critic on a copy of the policy's trunk, computed as the recipe's section says. With adapters, their frozen
        base is shared and not copied.
        """
        return cls(twin(cast(PreTrainedModel, model.base_model)), section)

    @property
    def decoder(self) -> Decoder | None:
        """The trunk's flat decoder; None where its own forward is used."""
        return self._decoder.get(self.trunk)

    def pin(self) -> None:
        """Keep the decoder as it is from now on."""
        self._decoder.is_pinned = True

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, prompt_lengths_B: torch.Tensor) -> torch.Tensor:
        """value_BT: the value of the state before each completion token, laid out as in `logprob.TokenScores`."""
        layout = completion_layout(ids_BS, lengths_B, prompt_lengths_B)
        row_N, position_N, column_N = layout.indices()
        used_B = (lengths_B - 1).clamp(min=1)  # the state after the last token is not needed
        ids_BS = ids_BS[:, : int(used_B.max())]
        hidden_NH = trunk_states(self.trunk, self.decoder, ids_BS, used_B, row_N, position_N)
        return layout.spread(self.value_head(hidden_NH), row_N, column_N)


class RewardModel(nn.Module):
    """A sequence classifier that gives each sequence one reward.

    A decoder in the standard layout (`score`) is read at one token of each row: the last one that is not `pad_id`. Any
    other classifier, such as a BERT, pools as its own forward does. With several labels, `label` picks the logit;
    `log_odds` subtracts the log-sum-exp of the others. One that was trained with several heads gives their mean, or
    with a `label` the reward of that head. `section` says how the trunk is computed. Raises ModelError for a label that
    the model lacks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: str | int | None = None,
        transform: RewardTransform = "raw",
        source: str = "",
        section: ModelSection | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.transform = transform
        self._decoder = TrunkDecoder(section or ModelSection())
        self.num_heads = 1 if label is not None else num_heads_of(model)
        _ = self.known, self.length_trend  # which a damaged config does not have
        if self.num_heads > 1 and transform != "raw":
            raise ModelError(
                f"the reward model has {self.num_heads} heads, whose mean is the reward; use transform raw"
            )
        self.label_index = 0 if self.num_heads > 1 else _label_index(model, label, transform)
        self.pad_id: int | None = None if self.is_made_here else padding_id(model)
        """The padding token of a classifier that other tools trained, which they read before it, even where it is the
        end-of-sequence token; None for ours, which is read at the last token, found by length."""
        self._pads_rows: bool | None = None
        if isinstance(score := self._score(), nn.Linear):
            score.float()

    @property
    def known(self) -> Known | None:
        """What several heads say of answers that people voted on; None with one head, and before that is known."""
        return Known.of_config(getattr(self.model.config, HEADS, None), self.num_heads) if self.num_heads > 1 else None

    def know(self, reward_NK: torch.Tensor) -> Known:
        """Keep what the heads say of N answers that people voted on, one at least; it is saved with the model."""
        known = Known.of_rewards(reward_NK)
        describe_heads(self.model, self.num_heads, known.to_json())
        return known

    @property
    def length_trend(self) -> LengthTrend | None:
        """The trend that is to be subtracted from the rewards of answers by their length, as `judge` and `ModelReward`
        do; None if there is none. It is saved with the model.
        """
        return LengthTrend.of_config(getattr(self.model.config, TREND, None))

    @length_trend.setter
    def length_trend(self, trend: LengthTrend | None) -> None:
        describe_trend(self.model, trend)

    @property
    def is_made_here(self) -> bool:
        """True for a reward model that Tunesmith trained, or is about to: its sequences end where a turn is closed."""
        return bool(getattr(self.model.config, MADE_HERE, False))

    def encode(self, prompt: Prompt, completion: Text) -> tuple[int, ...]:
        """Token ids of a prompt and its completion, as this reward model was trained on them.

        One that was made here reads a conversation up to the token that closes its last turn. Others read what their
        chat template writes; texts end with an end-of-sequence token if they give one reward (as TRL trains them).
        """
        if self.is_made_here:
            return encode_pair_side(self.tokenizer, prompt, completion)
        return encode_as_others(self.tokenizer, prompt, completion, ends_text=self.ends_text)

    @property
    def ends_text(self) -> bool:
        """True if a text ends with an end-of-sequence token."""
        return self.is_made_here or self.model.config.num_labels == 1

    @property
    def pools_last_token(self) -> bool:
        """True for the decoder layout, which reads the reward at one token, so ids of a rollout can be scored."""
        return isinstance(self._score(), nn.Linear)

    @property
    def packs_rows(self) -> bool:
        """True if rows are computed without padding, and common prefixes of neighbouring rows once."""
        return self.pools_last_token and self.decoder is not None

    @property
    def decoder(self) -> Decoder | None:
        """The trunk's flat decoder; None where its own forward is used."""
        return self._decoder.get(cast(PreTrainedModel, self.model.base_model))

    def pin(self) -> None:
        """Keep the decoder as it is from now on."""
        self._decoder.is_pinned = True

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """reward_B in float32, of right-padded rows with `lengths_B` real ids each (at least 1), `length_trend`
        included.
        """
        return self._pick(self._checked_logits(ids_BS, lengths_B))

    def heads(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """reward_BK in float32, the reward that each of K heads gives to the rows, as trained: without offsets."""
        logits_BK = self._checked_logits(ids_BS, lengths_B)
        return logits_BK if self.num_heads > 1 else self._pick(logits_BK)[:, None]

    def _checked_logits(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        if int(lengths_B.min()) < 1 or int(lengths_B.max()) > ids_BS.shape[1]:
            raise ModelError(
                f"lengths {lengths_B.tolist()} do not fit {ids_BS.shape[1]} columns; each row needs 1 token or more"
            )
        return self._logits(ids_BS[:, : int(lengths_B.max())], lengths_B)

    def _score(self) -> nn.Module | None:
        return getattr(self.model, "score", None)

    def _logits(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        score = self._score()
        if not isinstance(score, nn.Linear):
            return self._own_logits(ids_BS, lengths_B)
        row_B = torch.arange(len(ids_BS), device=ids_BS.device)
        position_B = last_tokens(ids_BS, lengths_B, self.pad_id)
        states_BH = trunk_states(self.model, self.decoder, ids_BS, lengths_B, row_B, position_B)
        bias = None if score.bias is None else score.bias.float()
        return functional.linear(states_BH.float(), score.weight.float(), bias)

    def _own_logits(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Logits of the model's own forward: of all rows at once if padding does not change them, else row by row."""
        if len(ids_BS) > 1 and self._pads_rows is None:
            self._pads_rows = _pads_rows(self.model)
        if len(ids_BS) > 1 and not self._pads_rows:
            rows = zip(ids_BS.split(1), lengths_B.split(1), strict=True)
            return torch.cat([self._own_logits(ids_1S[:, : int(length_1)], length_1) for ids_1S, length_1 in rows])
        count_pass(lengths_B.sum(), ids_BS.numel())
        return _own_forward(self.model, ids_BS, lengths_B)

    def _pick(self, logits_BK: torch.Tensor) -> torch.Tensor:
        if self.num_heads > 1:
            return logits_BK.mean(-1)
        chosen_B = logits_BK[:, self.label_index]
        if self.transform == "raw":
            return chosen_B
        others = [index for index in range(logits_BK.shape[1]) if index != self.label_index]
        return chosen_B - logits_BK[:, others].logsumexp(-1)


def last_tokens(ids_BS: torch.Tensor, lengths_B: torch.Tensor, pad_id: int | None) -> torch.Tensor:
    """position_B: the last of the first `lengths_B[b]` tokens of each row that is not `pad_id`, 0 if all are, as in the
    library's classifiers; with None the last one.
    """
    if pad_id is None:
        return lengths_B - 1
    is_read_BS = length_mask(lengths_B, ids_BS.shape[1]) & (ids_BS != pad_id)
    return (torch.arange(ids_BS.shape[1], device=ids_BS.device) * is_read_BS).amax(-1)


def padding_id(model: PreTrainedModel) -> int | None:
    """The padding token in the model's config."""
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def hidden_size(model: PreTrainedModel) -> int:
    """Width of the model's hidden states."""
    return int(model.config.get_text_config().hidden_size)


def _own_forward(model: PreTrainedModel, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """logits_BK in float32 of rows that are padded as the model expects it."""
    mask_BS = length_mask(lengths_B, ids_BS.shape[1])
    pad_id = padding_id(model)
    if pad_id is not None:
        ids_BS = ids_BS.masked_fill(~mask_BS, pad_id)
    return model(input_ids=ids_BS, attention_mask=mask_BS.long()).logits.float()


@torch.no_grad()
def _pads_rows(model: PreTrainedModel) -> bool:
    """True if fixed rows that are padded on the right have the logits that each has alone.

    Not so where a model reads its last column (XLNet), mixes all columns (FNet) or refuses several rows.
    """
    config = model.config.get_text_config()
    end = [id_ for id_ in (getattr(config, "eos_token_id", None),) if isinstance(id_, int)]  # some pool there
    special = {getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None), *end}
    plain = [index for index in range(int(getattr(config, "vocab_size", 256))) if index not in special]
    rows = [[plain[7919 * (i + 1) % len(plain)] for i in range(length)] + end for length in _PROBE_LENGTHS]
    device, width = model.device, max(map(len, rows))
    ids_BS = torch.tensor([[*row, *[plain[0]] * (width - len(row))] for row in rows], device=device)
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    try:
        with in_evaluation_mode(model):
            together_BK = _own_forward(model, ids_BS, lengths_B)
            ones = zip(ids_BS.split(1), lengths_B.split(1), strict=True)
            alone = [_own_forward(model, ids_1S[:, : int(length_1)], length_1) for ids_1S, length_1 in ones]
    except ValueError:  # how the library's classifiers refuse several rows
        return False
    return is_close(together_BK, torch.cat(alone), model.dtype)


def _label_index(model: PreTrainedModel, label: str | int | None, transform: RewardTransform) -> int:
    num_labels = int(model.config.num_labels or 1)
    names = {int(index): str(name) for index, name in (model.config.id2label or {}).items() if index is not None}
    allowed = ", ".join(f"{index} ({names.get(index, '?')})" for index in range(num_labels))
    if num_labels == 1:
        if transform == "log_odds":
            raise ModelError(
                "log_odds compares a label with the others, but the model has one label; use transform raw"
            )
        if label not in (None, 0, names.get(0)):
            raise ModelError(f"the model has no label {label!r}; it has one label, so leave label out")
        return 0
    if label is None:
        raise ModelError(f"the model has {num_labels} labels and none was chosen; set label to one of {allowed}")
    if isinstance(label, int) or label.isdecimal():
        if 0 <= int(label) < num_labels:
            return int(label)
    else:
        for index, name in names.items():
            if name.lower() == label.lower():
                return index
    raise ModelError(f"the model has no label {label!r}; its labels are {allowed}")
