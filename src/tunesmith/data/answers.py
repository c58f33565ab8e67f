"""Prompts and their completions as token ids, each distinct one once, and pairs and labels that refer to them.

Shape legend: A distinct answers, B sequences, S positions (right padded).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tunesmith.core.errors import DataError
from tunesmith.core.seeds import derive, permutation
from tunesmith.data.collate import TokenIds, pad_right
from tunesmith.data.judgements import judgements_of, pairs_of
from tunesmith.data.tally import BadRows, RowError
from tunesmith.models.tokenizer import PreTrainedTokenizerBase, encode_pair_side, encode_prompt
from tunesmith.schema.records import Judgement, Pair, Prompt, Ranking, Text

ItemT = TypeVar("ItemT", bound=Judgement | Pair | Ranking)
UnitT = TypeVar("UnitT")


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and one completion of it, which ends with the end-of-sequence token.

    Example: prompt `Hi` and completion `a` give `prompt_ids=(72,)`, `completion_ids=(97, 2)`.
    """

    prompt_ids: TokenIds
    completion_ids: TokenIds


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, by their places among the distinct answers. With `tie` their order has no meaning."""

    prompt_id: str
    chosen: int
    rejected: int
    tie: bool = False

    @property
    def answers(self) -> tuple[int, ...]:
        """The places of both answers."""
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class AnswerLabel:
    """An answer and whether it was wanted. `mismatched` is a completion of another prompt behind this prompt, -1 where
    there is none.
    """

    prompt_id: str
    answer: int
    is_wanted: bool
    mismatched: int = -1

    @property
    def answers(self) -> tuple[int, ...]:
        """The place of the answer."""
        return (self.answer,)


class AnswerTable:
    """The distinct answers, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[Answer, int] = {}

    def place(self, answer: Answer) -> int:
        """Where `answer` stands; a new one is put at the end."""
        return self._places.setdefault(answer, len(self._places))

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All of them."""
        return tuple(self._places)


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """B answers as padded rows, those of one prompt side by side; `answer_B` are their places."""

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    answer_B: torch.Tensor


def collate_answers(
    answers: Sequence[Answer], places: Iterable[int], device: torch.device | str = "cpu"
) -> AnswerBatch:
    """The answers at `places`, each once, as one batch on `device`."""
    order = in_order(answers, places)
    chosen = [answers[place] for place in order]
    ids_BS, lengths_B = pad_right([(*one.prompt_ids, *one.completion_ids) for one in chosen], 0, device)
    prompt_lengths_B = torch.tensor([len(one.prompt_ids) for one in chosen], device=device)
    return AnswerBatch(ids_BS, lengths_B, prompt_lengths_B, torch.tensor(order, device=device))


def in_order(answers: Sequence[Answer], places: Iterable[int]) -> list[int]:
    """The distinct `places`, those of one prompt side by side, so that a prompt can be computed once."""
    return sorted(set(places), key=lambda place: (answers[place].prompt_ids, place))


def encode_pairs(
    items: Sequence[Pair | Ranking],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    table: AnswerTable,
    bad: BadRows,
) -> list[AnswerPair]:
    """The items as pairs of places in `table`, in order, each ranking as every two of its completions.

    Items with a side of more than `max_tokens` tokens, without a prompt, or that the chat template refuses, go to
    `bad`, for its owner to check. Raises ModelError if messages meet a tokenizer without a chat template.
    """

    def encode(pair: Pair) -> AnswerPair:
        chosen = encode_answer(tokenizer, pair.prompt, pair.chosen, max_tokens, "chosen")
        rejected = encode_answer(tokenizer, pair.prompt, pair.rejected, max_tokens, "rejected")
        return AnswerPair(pair.prompt.id, table.place(chosen), table.place(rejected), pair.tie)

    return _encoded(items, lambda item: [encode(pair) for pair in pairs_of(item)], bad)


def encode_labels(
    items: Sequence[Judgement | Pair | Ranking],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    table: AnswerTable,
    bad: BadRows,
) -> list[AnswerLabel]:
    """The judgements of the items as labels of places in `table`, in order; errors as in `encode_pairs`."""

    def encode(one: Judgement) -> AnswerLabel:
        answer = encode_answer(tokenizer, one.prompt, one.completion, max_tokens, "completion")
        return AnswerLabel(one.prompt.id, table.place(answer), one.is_wanted)

    return _encoded(items, lambda item: [encode(one) for one in judgements_of(item)], bad)


def _encoded(items: Sequence[ItemT], encode: Callable[[ItemT], list[UnitT]], bad: BadRows) -> list[UnitT]:
    """What `encode` makes of each item, all of it or nothing."""
    units: list[UnitT] = []
    for item in items:
        try:
            units += encode(item)
        except RowError as error:
            bad.add(item.prompt.id, error)
    return units


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
            mixed = Answer(prompt_ids, other.completion_ids[: max_tokens - len(prompt_ids)])
            found[index] = replace(labels[index], mismatched=table.place(mixed))
    return found


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text, max_tokens: int, name: str
) -> Answer:
    """The answer as token ids. Without a prompt the begin-of-sequence token is the prompt.

    Raises RowError if it has more than `max_tokens` tokens, if the chat template refuses it, if the prompt is rendered
    otherwise when an answer follows, or if there is neither a prompt nor a begin-of-sequence token.
    """
    try:
        prompt_ids, ids = encode_prompt(tokenizer, prompt), encode_pair_side(tokenizer, prompt, completion)
    except RowError:
        raise
    except DataError as error:
        raise RowError(str(error), "refused by the chat template") from error
    if not prompt.content and ids[: len(prompt_ids)] != prompt_ids:
        ids = prompt_ids + ids
    if ids[: len(prompt_ids)] != prompt_ids or len(ids) == len(prompt_ids):
        raise RowError(
            "the chat template renders the prompt otherwise when an answer follows, so that the answer cannot be told "
            "from it; give prompt and completions as text, or change the template",
            "refused by the chat template",
        )
    if len(ids) > max_tokens:
        raise RowError(
            f"too long: prompt and `{name}` have {len(ids)} tokens, the limit is {max_tokens} (`pairs.max_tokens`, or "
            "the model's context if that is less); shorten the row",
            "too long",
        )
    return Answer(prompt_ids, ids[len(prompt_ids) :])
