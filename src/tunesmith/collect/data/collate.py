"""Prompts, pairs and rankings as token ids and right-padded tensors.

Shape legend: B sequences, T positions (right padded), N pairs, R rankings, K completions of a ranking. Lengths say
where padding begins: the pad id may equal the end-of-sequence id. Tokenizers are those of `models.tokenizer`.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from tunesmith.base.config.sections import Truncate
from tunesmith.base.core import seeds
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Pair, Prompt, Ranking, Text, every_two
from tunesmith.collect.data.rows import BadRows, RowError, usable
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, decode, encode_pair_side, encode_prompt

TokenIds = tuple[int, ...]
SideT = TypeVar("SideT")

EncodePair = Callable[[Prompt, Text], TokenIds]
"""The ids of a prompt and one of its completions."""


class Weighted(Protocol):
    """What has a weight in the loss."""

    @property
    def weight(self) -> float:
        """The weight."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedPreference:
    """A pair or ranking as token ids: the prompt with each completion, ending with the end-of-sequence token, and the
    place of each, 1 the best. The better side of a pair comes first, and a tie has the places (1, 1). `weight`
    multiplies its loss. `lengths` are the tokens of each completion alone.

    Example: prompt `Hi` and completions `a`, `b` give `sequences=((72, 97, 2), (72, 98, 2))` with `ranks=(1, 2)`.
    """

    prompt_id: str
    sequences: tuple[TokenIds, ...]
    ranks: tuple[int, ...]
    margin: float | None = None
    weight: float = field(default=1.0, repr=False)  # the hash of a run's data is that of what is shown
    lengths: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def answer_lengths(self) -> tuple[int, ...]:
        """Tokens of each completion; where they were not measured, those behind what all sequences begin with."""
        return self.lengths or lengths_behind_common(self.sequences)

    @property
    def is_tie(self) -> bool:
        """True if no completion is better than another."""
        return len(set(self.ranks)) == 1

    @property
    def decided(self) -> Sequence[tuple[TokenIds, TokenIds]]:
        """Every two sequences of different places, the better one first."""
        return [(self.sequences[a], self.sequences[b]) for a, b, tie in every_two(self.ranks) if not tie]

    def pairs(self) -> "list[EncodedPreference]":
        """Every two sequences as a pair, those of one place as a tie."""
        return [
            replace(
                self,
                sequences=(self.sequences[a], self.sequences[b]),
                ranks=(1, 1 if tie else 2),
                lengths=(self.lengths[a], self.lengths[b]) if self.lengths else (),
            )
            for a, b, tie in every_two(self.ranks)
        ]


@dataclass(frozen=True, slots=True)
class PairBatch:
    """N pairs as B distinct sequences; `chosen_N` and `rejected_N` say which row is which side.

    A completion that is in several pairs is one row, scored once (Ouyang et al. 2022, section 3.5). `margin_N` is 0
    where a pair has none; `weight_N` is None where all pairs weigh 1. Example: the pairs (a, b) and (a, c) give rows a,
    b, c; `chosen_N` is [0, 0], `rejected_N` is [1, 2].
    """

    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    chosen_N: torch.Tensor
    rejected_N: torch.Tensor
    margin_N: torch.Tensor
    tie_N: torch.Tensor
    weight_N: torch.Tensor | None = None

    @property
    def num_pairs(self) -> int:
        """Pairs in the batch."""
        return len(self.tie_N)


@dataclass(frozen=True, slots=True)
class RankingBatch:
    """R rankings as B distinct sequences; row `index_RK` of the sequences is the k-th completion of a ranking.

    `rank_RK` is its place, 1 the best. Where a ranking has fewer completions, both are 0. The places stay on the CPU,
    where losses read them.
    """

    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    index_RK: torch.Tensor
    rank_RK: torch.Tensor


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(ids_BT, lengths_B)`, int64, on the CPU: sequences padded at the end to the longest, and their own lengths."""
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths, default=0)
    rows = [[*sequence, *[pad_id] * (width - len(sequence))] for sequence in sequences]
    ids_BT = torch.tensor(rows, dtype=torch.int64).reshape(len(sequences), width)
    return ids_BT, torch.tensor(lengths, dtype=torch.int64)


def collate_pairs(pairs: Sequence[EncodedPreference], pad_id: int) -> PairBatch:
    """The pairs as one padded batch on the CPU; the sides of a pair are adjacent, because they share a prompt."""
    rows: dict[TokenIds, int] = {}
    sides = [[rows.setdefault(ids, len(rows)) for ids in pair.sequences] for pair in pairs]
    chosen, rejected = [side[0] for side in sides], [side[1] for side in sides]
    ids_BT, lengths_B = pad_right(list(rows), pad_id)
    margin_N = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float32)
    tie_N = torch.tensor([pair.is_tie for pair in pairs], dtype=torch.bool)
    return PairBatch(
        ids_BT, lengths_B, torch.tensor(chosen), torch.tensor(rejected), margin_N, tie_N, weights_of(pairs)
    )


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens at the beginning of both."""
    differences = (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differences, min(len(first), len(second)))


def lengths_behind_common(sequences: Sequence[TokenIds]) -> tuple[int, ...]:
    """Tokens of each sequence behind what all of them begin with."""
    common = min(shared_length(sequences[0], other) for other in sequences)
    return tuple(len(ids) - common for ids in sequences)


def answer_lengths(pairs: Sequence[EncodedPreference]) -> torch.Tensor:
    """length_B, float32, on the CPU: the tokens of the completion of each row of `collate_pairs`."""
    lengths: dict[TokenIds, int] = {}
    for pair in pairs:
        for ids, length in zip(pair.sequences, pair.answer_lengths, strict=True):
            lengths.setdefault(ids, length)
    return torch.tensor(list(lengths.values()), dtype=torch.float32)


def weights_of(pairs: Sequence[Weighted]) -> torch.Tensor | None:
    """weight_N, float32, on the CPU; None if all weigh 1."""
    if all(pair.weight == 1.0 for pair in pairs):
        return None
    return torch.tensor([pair.weight for pair in pairs], dtype=torch.float32)


def collate_rankings(rankings: Sequence[EncodedPreference], pad_id: int) -> RankingBatch:
    """The rankings as one padded batch on the CPU."""
    rows: dict[TokenIds, int] = {}
    indices = [[rows.setdefault(ids, len(rows)) for ids in ranking.sequences] for ranking in rankings]
    ids_BT, lengths_B = pad_right(list(rows), pad_id)
    index_RK, _ = pad_right(indices, 0)
    rank_RK, _ = pad_right([ranking.ranks for ranking in rankings], 0)
    return RankingBatch(ids_BT, lengths_B, index_RK, rank_RK)


def as_pairs(items: Iterable[EncodedPreference]) -> list[EncodedPreference]:
    """The items with each ranking of K completions as K(K-1)/2 pairs."""
    return [pair for item in items for pair in item.pairs()]


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Tokens that a prompt and an answer may have together, and what is cut of those that have more."""

    max_tokens: int
    truncate: Truncate = "none"

    def kept_of_prompt(self, num_prompt: int, num_answer: int) -> int:
        """How many tokens of a prompt's end stay beside a longest answer of `num_answer` tokens: as many as that leaves
        if the prompt is cut, and at least half of the limit if answers are too.
        """
        if self.truncate == "none":
            return num_prompt
        least = self.max_tokens - self.max_tokens // 2 if self.truncate == "both" else 0
        return min(num_prompt, max(least, self.max_tokens - num_answer))


def encode_preferences(
    items: Sequence[Pair | Ranking],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    bad: BadRows | None = None,
    *,
    truncate: Truncate = "none",
    encode: EncodePair | None = None,
) -> list[EncodedPreference]:
    """The items as token ids, in order, by `encode` if it is given.

    One with a side of more than `max_tokens` is bad (see `rows.usable`), or `truncated`.
    Raises ModelError for messages without a chat template.
    """
    encode_pair, limit = encode or partial(encode_pair_side, tokenizer), TokenLimit(max_tokens, truncate)

    def within(sequences: Sequence[TokenIds], names: Sequence[str]) -> Sequence[TokenIds]:
        cut = truncated(sequences, limit)
        for name, ids in zip(names, cut, strict=True):
            if len(ids) > max_tokens:
                raise too_long(name, len(ids), max_tokens)
        return cut

    def encode_item(item: Pair | Ranking) -> EncodedPreference:
        whole: list[TokenIds] = []

        def encode_side(prompt: Prompt, text: Text) -> TokenIds:
            whole.append(encode_pair(prompt, text))
            return whole[-1]

        sequences, ranks = encode_sides(item, encode_side, within)
        margin, weight = (item.margin, item.weight) if isinstance(item, Pair) else (None, 1.0)
        num_cut, lengths = num_cut_of_prompt(whole, limit), completion_lengths(tokenizer, item.prompt, whole)
        lengths = tuple(
            min(length, len(left) - max(0, len(ids) - length - num_cut))
            for length, ids, left in zip(lengths, whole, sequences, strict=True)
        )
        return EncodedPreference(item.prompt.id, tuple(sequences), ranks, margin, weight, lengths)

    return usable(items, encode_item, bad, "pairs")


def completion_lengths(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, sequences: Sequence[TokenIds]
) -> tuple[int, ...]:
    """Tokens of each completion of `prompt` in the ids of both: those behind the prompt's, as far as these begin it."""
    try:
        prompt_ids = encode_prompt(tokenizer, prompt)
    except DataError:  # there is no prompt
        prompt_ids = ()
    return tuple(len(ids) - shared_length(prompt_ids, ids) for ids in sequences)


def encode_sides(
    item: Pair | Ranking,
    encode: Callable[[Prompt, Text], SideT],
    within: Callable[[Sequence[SideT], Sequence[str]], Sequence[SideT]],
) -> tuple[Sequence[SideT], tuple[int, ...]]:
    """(The completions of a pair or ranking by `encode`, then `within` a limit; the place of each, 1 the best).

    `within` is also given their names in messages. Raises RowError if completions in different places are the same to a
    model.
    """
    if isinstance(item, Ranking):
        texts = {f"completions[{index}]": text for index, text in enumerate(item.completions)}
        ranks = item.ranks
    else:
        texts, ranks = {"chosen": item.chosen, "rejected": item.rejected}, (1, 1 if item.tie else 2)
    sides = within([encode(item.prompt, text) for text in texts.values()], list(texts))
    for (one, name, place), (other, other_name, other_place) in itertools.combinations(
        zip(sides, texts, ranks, strict=True), 2
    ):
        if one == other and place != other_place:
            raise RowError(
                f"`{name}` and `{other_name}` are the same to the model, because the chat template, the tokenizer or "
                "`pairs.truncate` drops what differs; remove the row, or change that",
                "same completions",
            )
    return sides, ranks


def too_long(name: str, num_tokens: int, max_tokens: int) -> RowError:
    """The error of a completion, with its name, that is too long together with its prompt."""
    return RowError(
        f"too long: prompt and `{name}` have {num_tokens} tokens, the limit is {max_tokens} (`pairs.max_tokens`, or "
        "the model's context if that is less); shorten the row, or set `pairs.truncate` to left or both "
        "(`eval reward --truncate`)",
        "too long",
    )


def truncated(sequences: Sequence[TokenIds], limit: TokenLimit) -> tuple[TokenIds, ...]:
    """The sequences, which begin with one prompt, cut as `limit` says.

    All lose the same number of ids of the prompt, so that it stays shared. An answer that is too long all the same
    loses its own beginning (`left`) or its end (`both`).

    >>> truncated([(1, 2, 3, 4), (1, 2, 5)], TokenLimit(3, "left"))
    ((2, 3, 4), (2, 5))
    >>> truncated([(1, 2, 3, 4, 5, 6), (1, 2, 3, 7)], TokenLimit(4, "both"))
    ((2, 3, 4, 5), (2, 3, 7))
    """
    if limit.truncate == "none":
        return tuple(sequences)
    num_cut = num_cut_of_prompt(sequences, limit)
    part = slice(-limit.max_tokens, None) if limit.truncate == "left" else slice(limit.max_tokens)
    return tuple(ids[num_cut:][part] for ids in sequences)


def num_cut_of_prompt(sequences: Sequence[TokenIds], limit: TokenLimit) -> int:
    """How many ids `truncated` removes from the beginning that all sequences have in common."""
    if limit.truncate == "none":
        return 0
    behind = lengths_behind_common(sequences)
    num_common = len(sequences[0]) - behind[0]
    return num_common - limit.kept_of_prompt(num_common, max(behind))


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """A prompt and its number of tokens."""

    prompt: Prompt
    num_tokens: int


def measure_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int, bad: BadRows | None = None
) -> list[MeasuredPrompt]:
    """The prompts of at most `max_tokens` tokens, in order, with their lengths. Others are bad, see `rows.usable`."""

    def measured(prompt: Prompt) -> MeasuredPrompt:
        length = len(prompt.token_ids or encode_prompt(tokenizer, prompt))
        if length > max_tokens:
            raise RowError(
                f"too long: {length} tokens, the limit is {max_tokens} (`prompts.max_tokens`, or what the model's "
                "context leaves if that is less); shorten the prompt",
                "too long",
            )
        return MeasuredPrompt(prompt, length)

    return usable(prompts, measured, bad, "prompts")


def prefix_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: tuple[int, int],
    seed: int,
    bad: BadRows | None = None,
) -> list[Prompt]:
    """Each text cut to its first n tokens, n drawn from `num_tokens` (both ends included) by (seed, index) alone.

    `token_ids` of the result hold the cut, special tokens that the tokenizer puts first not counted; `content` is its
    text. A shorter text is kept whole. A cut inside a character is moved to the nearest one that is not. Conversations,
    and texts with fewer tokens than the smaller number, are bad, see `rows.usable`.
    """
    low, high = num_tokens
    special, index = frozenset(tokenizer.all_special_ids), itertools.count()

    def prefix(prompt: Prompt) -> Prompt:
        draw = random.Random(seeds.derive(seed, "prefix", next(index)))
        if prompt.is_conversational:
            raise RowError("a conversation; `prefix_tokens` cuts texts alone, set it to null", "wrong type")
        ids = encode_prompt(tokenizer, replace(prompt, token_ids=None))
        num_leading = next((i for i, token in enumerate(ids) if token not in special), len(ids))
        num_text = len(ids) - num_leading
        if num_text < low:
            raise RowError(f"{num_text} tokens; `prefix_tokens` needs {low}, lower it or remove the row", "too short")
        drawn = draw.randint(low, min(high, num_text))
        nearest = sorted(range(low, num_text + 1), key=lambda n: (n > high, abs(n - drawn), n))
        for cut in (ids[: num_leading + n] for n in nearest):
            content = decode(tokenizer, cut)
            if not content.endswith("\ufffd"):  # else the cut splits a character
                return replace(prompt, content=content, token_ids=cut)
        return replace(prompt, content=decode(tokenizer, ids), token_ids=ids)

    return usable(prompts, prefix, bad, "prompts")
