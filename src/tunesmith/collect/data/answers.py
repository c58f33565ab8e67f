"""Prompts and their completions as token ids, each distinct one once, and pairs and labels that refer to them.

Shape legend: A distinct answers, B sequences, S positions (right padded).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch

from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.schema.records import Judgement, Pair, Prompt, Ranking, Text, every_two
from tunesmith.collect.data.collate import TokenIds, TokenLimit, encode_sides, pad_right, too_long
from tunesmith.collect.data.pairs import pairs_of, with_shared_opening
from tunesmith.collect.data.rows import BadRows, RowError, usable
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, encode_completed


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and one completion of it, which ends with the end-of-sequence token.

    Example: prompt `Hi` and completion `a` give `prompt_ids=(72,)`, `completion_ids=(97, 2)`. `between` are the ranges
    of `completion_ids` that are not the model's, such as results of tools. `is_cut`: the end was cut off.
    """

    prompt_ids: TokenIds
    completion_ids: TokenIds
    between: tuple[range, ...] = ()
    is_cut: bool = field(default=False, repr=False, compare=False)

    def begun(self, num_tokens: int) -> "Answer":
        """The answer with the first `num_tokens` tokens of its completion."""
        between = (range(one.start, min(one.stop, num_tokens)) for one in self.between if one.start < num_tokens)
        is_cut = self.is_cut or num_tokens < len(self.completion_ids)
        return Answer(self.prompt_ids, self.completion_ids[:num_tokens], tuple(between), is_cut)

    @property
    def num_said(self) -> int:
        """Tokens that are the model's."""
        return len(self.completion_ids) - sum(map(len, self.between))


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, by their places among the distinct answers. With `tie` their order has no meaning;
    `weight` multiplies the loss.
    """

    prompt_id: str
    chosen: int
    rejected: int
    tie: bool = False
    weight: float = field(default=1.0, repr=False)  # the hash of a run's data is that of what is shown

    @property
    def answers(self) -> tuple[int, ...]:
        """The places of both answers."""
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class AnswerLabel:
    """An answer and a label. `mismatched` is a completion of another prompt after this prompt, -1 if there is none;
    `weight` multiplies the loss.
    """

    prompt_id: str
    answer: int
    is_wanted: bool
    mismatched: int = -1
    weight: float = field(default=1.0, repr=False)

    @property
    def answers(self) -> tuple[int, ...]:
        """The place of the answer."""
        return (self.answer,)


class AnswerTable:
    """The distinct answers, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[Answer, int] = {}

    def place(self, answer: Answer) -> int:
        """Index of `answer`; a new one is appended."""
        return self._places.setdefault(answer, len(self._places))

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All of them."""
        return tuple(self._places)


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """B answers as padded rows, those of one prompt side by side; `answer_B` are their places. `mask_BT` is true for
    the completion tokens that are the model's.
    """

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    mask_BT: torch.Tensor
    answer_B: torch.Tensor


def collate_answers(answers: Sequence[Answer], places: Iterable[int]) -> AnswerBatch:
    """The answers at `places`, each once, as one batch on the CPU."""
    order = in_order(answers, places)
    chosen = [answers[place] for place in order]
    ids_BS, lengths_B = pad_right([(*one.prompt_ids, *one.completion_ids) for one in chosen], 0)
    prompt_lengths_B = torch.tensor([len(one.prompt_ids) for one in chosen])
    mask_BT = torch.arange(int((lengths_B - prompt_lengths_B).max()))[None, :] < (lengths_B - prompt_lengths_B)[:, None]
    for row, part in ((row, part) for row, one in enumerate(chosen) for part in one.between):
        mask_BT[row, part.start : part.stop] = False
    return AnswerBatch(ids_BS, lengths_B, prompt_lengths_B, mask_BT, torch.tensor(order))


def in_order(answers: Sequence[Answer], places: Iterable[int]) -> list[int]:
    """The distinct `places`, those of one prompt side by side, so that a prompt can be computed once."""
    return sorted(set(places), key=lambda place: (answers[place].prompt_ids, place))


def encode_pairs(
    items: Sequence[Pair | Ranking],
    tokenizer: PreTrainedTokenizerBase,
    limit: TokenLimit,
    table: AnswerTable,
    bad: BadRows,
) -> list[AnswerPair]:
    """The items as pairs of places in `table`, in order, each ranking as every two of its completions.

    Two texts without a prompt have the words that both begin with as one. Items beyond `limit`, without a prompt, or
    that the chat template refuses, go to `bad`, for its owner to check.
    Raises ModelError for messages without a chat template.
    """

    def encode(item: Pair | Ranking) -> list[AnswerPair]:
        item = with_shared_opening(item) if isinstance(item, Pair) else item
        texts = item.completions if isinstance(item, Ranking) else (item.chosen, item.rejected)
        if not item.prompt.content and any(map(_begins_a_conversation, texts)):
            raise RowError("`chosen` and `rejected` share no prompt; give two answers to the same messages")
        answers, ranks = encode_sides(item, partial(encode_answer, tokenizer), partial(fitting, limit=limit))
        weight = item.weight if isinstance(item, Pair) else 1.0
        return [
            AnswerPair(item.prompt.id, table.place(answers[a]), table.place(answers[b]), tie, weight)
            for a, b, tie in every_two(ranks)
        ]

    return list(chain.from_iterable(usable(items, encode, bad, "pairs")))


def encode_labels(
    items: Sequence[Judgement | Pair | Ranking],
    tokenizer: PreTrainedTokenizerBase,
    limit: TokenLimit,
    table: AnswerTable,
    bad: BadRows,
) -> list[AnswerLabel]:
    """The judgements of the items as labels of places in `table`, in order; errors as in `encode_pairs`.

    Of two completions the better one was wanted, the other not. A tie says nothing.
    """
    encode_one, within = partial(encode_answer, tokenizer), partial(fitting, limit=limit)

    def encode(item: Judgement | Pair | Ranking) -> list[AnswerLabel]:
        if isinstance(item, Judgement):
            (answer,) = within([encode_one(item.prompt, item.completion)], ["completion"])
            return [AnswerLabel(item.prompt.id, table.place(answer), item.is_wanted)]
        if all(pair.tie for pair in pairs_of(item)):
            return []
        answers, ranks = encode_sides(item, encode_one, within)
        weight = item.weight if isinstance(item, Pair) else 1.0
        return [
            AnswerLabel(item.prompt.id, table.place(answers[place]), is_wanted, weight=weight)
            for a, b, tie in every_two(ranks)
            for place, is_wanted in ((a, True), (b, False))
            if not tie
        ]

    return list(chain.from_iterable(usable(items, encode, bad, "judgements")))


def _begins_a_conversation(completion: Text) -> bool:
    return not isinstance(completion, str) and completion[0]["role"] != "assistant"


def with_mismatched(
    units: Sequence[AnswerPair | AnswerLabel], table: AnswerTable, max_tokens: int, seed: int
) -> list[AnswerLabel]:
    """The labels among `units` with a completion of another prompt for each, drawn by `seed`: in a shuffled circle that
    of the next row whose prompt differs, cut to `max_tokens` tokens together with the prompt. Of one prompt alone, -1.
    """
    labels = [unit for unit in units if isinstance(unit, AnswerLabel)]
    answers, order = table.answers, permutation(derive(seed, "mismatched"), 0, len(labels))
    circle = [answers[labels[index].answer] for index in order]
    found = list(labels)
    for position, index in enumerate(order):
        prompt_ids = circle[position].prompt_ids
        following = (circle[(position + step) % len(circle)] for step in range(1, len(circle)))
        other = next((answer for answer in following if answer.prompt_ids != prompt_ids), None)
        if other is not None:
            mixed = replace(other.begun(max_tokens - len(prompt_ids)), prompt_ids=prompt_ids)
            found[index] = replace(labels[index], mismatched=table.place(mixed))
    return found


def encode_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text) -> Answer:
    """The answer as token ids, however long. Without a prompt the begin-of-sequence token is the prompt.

    Raises DataError if the chat template refuses it, or if there is neither a prompt nor a begin-of-sequence token.
    """
    found = encode_completed(tokenizer, prompt, completion)
    return Answer(found.prompt_ids, found.completion_ids, found.between)


def fitting(answers: Sequence[Answer], names: Sequence[str], limit: TokenLimit) -> list[Answer]:
    """The answers, which have one prompt, each within `limit`.

    All lose the same number of tokens from the beginning of the prompt, so that it stays shared, and with `both` also
    from their ends, as in `collate.truncated`. One token of the prompt stays: the first token of a completion is
    predicted from something. Raises RowError, with the name of the answer, for what is too long all the same.
    """
    longest = max((len(one.completion_ids) for one in answers), default=0)
    cut: list[Answer] = []
    for answer, name in zip(answers, names, strict=True):
        kept = max(1, limit.kept_of_prompt(len(answer.prompt_ids), longest))
        one = replace(answer, prompt_ids=answer.prompt_ids[-kept:])
        if limit.truncate == "both":
            one = one.begun(max(1, limit.max_tokens - kept))
        num_completion = len(answer.completion_ids)
        num_tokens = len(one.prompt_ids) + len(one.completion_ids)
        if num_tokens > limit.max_tokens and limit.truncate != "none":
            remedy = "raise it to 2 or more" if limit.truncate == "both" else "or set `pairs.truncate: both`"
            raise RowError(
                f"too long: `{name}` has {num_completion} tokens without its prompt, of which one must be left, and "
                f"the limit is {limit.max_tokens} (`pairs.max_tokens`, or the model's context if that is less); "
                f"shorten the row, {remedy}",
                "too long",
            )
        if num_tokens > limit.max_tokens:
            raise too_long(name, num_tokens, limit.max_tokens)
        cut.append(one)
    return cut
