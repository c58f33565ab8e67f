"""Prompts and pairs as token ids and right-padded tensors.

Shape legend: B sequences, T positions (right padded), N pairs. Lengths say where padding begins: the pad id may equal
the end-of-sequence id. Tokenizers are those of `models.tokenizer`.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tunesmith.core import seeds
from tunesmith.core.errors import DataError
from tunesmith.models.tokenizer import PreTrainedTokenizerBase, decode, encode_pair_side, encode_prompt
from tunesmith.schema.records import Pair, Prompt

_NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """A pair as token ids: prompt and completion together, ending with the end-of-sequence token.

    Example: prompt `Hi` and completions `a`, `b` give `chosen_ids=(72, 97, 2)`, `rejected_ids=(72, 98, 2)`.
    """

    prompt_id: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float | None = None
    tie: bool = False


@dataclass(frozen=True, slots=True)
class PairBatch:
    """N pairs as B distinct sequences; `chosen_N` and `rejected_N` say which row is which side.

    A completion that meets several others of its prompt stands once and is scored once (Ouyang et al. 2022, section
    3.5). `margin_N` is 0 where a pair has none. Example: the pairs (a, b) and (a, c) give rows a, b, c; `chosen_N` is
    [0, 0], `rejected_N` is [1, 2].
    """

    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    chosen_N: torch.Tensor
    rejected_N: torch.Tensor
    margin_N: torch.Tensor
    tie_N: torch.Tensor

    @property
    def num_pairs(self) -> int:
        """Pairs in the batch."""
        return len(self.tie_N)

    def chosen_and_rejected(self, values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One number per sequence as two tensors of shape [N]: those of the chosen and those of the rejected."""
        return values_B[self.chosen_N], values_B[self.rejected_N]


def pad_right(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(ids_BT, lengths_B)`, int64: the sequences padded at the end to the longest one, and their own lengths."""
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths, default=0)
    rows = [[*sequence, *[pad_id] * (width - len(sequence))] for sequence in sequences]
    ids_BT = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(sequences), width)
    return ids_BT, torch.tensor(lengths, dtype=torch.int64, device=device)


def collate_pairs(pairs: Sequence[EncodedPair], pad_id: int, device: torch.device | str = "cpu") -> PairBatch:
    """The pairs as one padded batch on `device`."""
    rows: dict[tuple[int, ...], int] = {}
    chosen = [rows.setdefault(pair.chosen_ids, len(rows)) for pair in pairs]
    rejected = [rows.setdefault(pair.rejected_ids, len(rows)) for pair in pairs]
    ids_BT, lengths_B = pad_right(list(rows), pad_id, device)
    margin_N = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float32, device=device)
    tie_N = torch.tensor([pair.tie for pair in pairs], dtype=torch.bool, device=device)
    chosen_N, rejected_N = torch.tensor(chosen, device=device), torch.tensor(rejected, device=device)
    return PairBatch(ids_BT, lengths_B, chosen_N, rejected_N, margin_N, tie_N)


def encode_pairs(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedPair]:
    """The pairs as token ids, in order. Raises DataError that names and counts the pairs with a side of more than
    `max_tokens`.
    """
    encoded: list[EncodedPair] = []
    too_long: list[str] = []
    for pair in pairs:
        chosen_ids = encode_pair_side(tokenizer, pair.prompt, pair.chosen)
        rejected_ids = encode_pair_side(tokenizer, pair.prompt, pair.rejected)
        for name, ids in (("chosen", chosen_ids), ("rejected", rejected_ids)):
            if len(ids) > max_tokens:
                too_long.append(f"{pair.prompt.id}: prompt and `{name}` have {len(ids)} tokens")
        encoded.append(EncodedPair(pair.prompt.id, chosen_ids, rejected_ids, pair.margin, pair.tie))
    _refuse_long(too_long, f"{max_tokens}; shorten these rows or raise `pairs.max_tokens`")
    return encoded


def check_prompt_lengths(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
    """Raise DataError that names and counts the prompts of more than `max_tokens` tokens."""
    lengths = ((prompt, len(prompt.token_ids or encode_prompt(tokenizer, prompt))) for prompt in prompts)
    too_long = [f"{prompt.id}: {length} tokens" for prompt, length in lengths if length > max_tokens]
    _refuse_long(too_long, f"{max_tokens}; shorten these prompts or raise `prompts.max_tokens`")


def mean_prompt_tokens(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> float:
    """Tokens of a prompt, on average; 0 without prompts."""
    return sum(len(encode_prompt(tokenizer, prompt)) for prompt in prompts) / max(1, len(prompts))


def prefix_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, num_tokens: tuple[int, int], seed: int
) -> list[Prompt]:
    """Each text cut to its first n tokens, n drawn from `num_tokens` (both ends included) by (seed, index) alone.

    `token_ids` of the result hold the cut, special tokens that the tokenizer puts first not counted; `content` is its
    text. A shorter text is kept whole. A cut inside a character is moved to the nearest one that is not. Raises
    DataError for a conversation, and for a text with fewer tokens than the smaller number.
    """
    low, high = num_tokens
    special = set(tokenizer.all_special_ids)
    prefixes: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        if prompt.is_conversational:
            raise DataError(f"prompt {prompt.id} is a conversation; `prefix_tokens` cuts texts alone, set it to null")
        ids = encode_prompt(tokenizer, replace(prompt, token_ids=None))
        num_leading = next((i for i, token in enumerate(ids) if token not in special), len(ids))
        num_text = len(ids) - num_leading
        if num_text < low:
            raise DataError(
                f"prompt {prompt.id} has {num_text} tokens; `prefix_tokens` needs {low}, lower it or remove the row"
            )
        drawn = random.Random(seeds.derive(seed, "prefix", index)).randint(low, min(high, num_text))
        nearest = sorted(range(low, num_text + 1), key=lambda n, drawn=drawn: (n > high, abs(n - drawn), n))
        prefixes.append(_cut(prompt, tokenizer, ids, (num_leading + n for n in nearest)))
    return prefixes


def _cut(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...], ends: Iterable[int]) -> Prompt:
    """The prompt up to the first of `ends` that does not split a character (which would decode to U+FFFD)."""
    for end in ends:
        content = decode(tokenizer, ids[:end])
        if not content.endswith("\ufffd"):
            return replace(prompt, content=content, token_ids=ids[:end])
    return replace(prompt, content=decode(tokenizer, ids), token_ids=ids)


def _refuse_long(too_long: Sequence[str], limit: str) -> None:
    if not too_long:
        return
    shown = "\n  ".join(too_long[:_NUM_SHOWN])
    more = f"\n  and {len(too_long) - _NUM_SHOWN} more" if len(too_long) > _NUM_SHOWN else ""
    raise DataError(f"{len(too_long)} too long, the limit is {limit}:\n  {shown}{more}")
