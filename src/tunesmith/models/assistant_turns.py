"""Where the assistant speaks in a conversation that a chat template has rendered, whether or not the template marks it.

A template is a function from messages to text. The text before a turn is what the template writes for the messages
before it with the opening of the assistant's turn, just as for generation; the turn ends where the template's text for
the messages up to it ends. Both hold only if the text of the first messages is the beginning of the whole, which is
checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from tunesmith.core.errors import DataError, ModelError
from tunesmith.schema.records import Message

LossOn = Literal["assistant", "last", "all"]
"""Which tokens of a demonstration are learnt."""

Render = Callable[[Sequence[Message], bool], str]
"""The template's text for some messages, with the opening of the assistant's next turn if the second argument is true.
"""


def assistant_spans(
    render: Render, messages: Sequence[Message], turns: Sequence[int], closing: Sequence[str]
) -> list[range]:
    """The characters of `render(messages, False)` that the assistant writes in each of `turns` (indices of messages).

    A span holds the turn's text and the token of `closing` that ends it; the white space that a template writes behind
    that token is left out. Raises DataError if the template writes a turn, or what comes before it, otherwise once more
    messages follow, so that the turn cannot be found.
    """
    whole = render(messages, False)
    spans: list[range] = []
    for turn in turns:
        before = render(messages[:turn], True) if turn else ""
        after = whole if turn + 1 == len(messages) else render(messages[: turn + 1], False)
        if not whole.startswith(before):
            raise DataError(_unstable("what comes before", turn, len(messages)))
        if not whole.startswith(after) or len(after) <= len(before):
            raise DataError(_unstable("the", turn, len(messages)))
        spans.append(range(len(before), _end(after, closing)))
    return spans


def _end(text: str, closing: Sequence[str]) -> int:
    """Where a turn at the end of `text` ends."""
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tuple(closing)) else len(text)


def _unstable(what: str, turn: int, num_messages: int) -> str:
    return (
        f"the chat template writes {what} turn {turn} of {num_messages} otherwise alone than inside of the "
        "conversation (some templates leave out earlier reasoning), so the assistant's tokens cannot be told apart; "
        "learn the last turn alone (loss_on: last), everything (loss_on: all), or take another template"
    )


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Token ids of a text, and the characters from which each was made: `starts[i]` to `ends[i]`."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def spans(self, characters: Sequence[range]) -> list[range]:
        """For each range of characters the range of tokens that begin inside of it.

        A token that begins before it and reaches into it is left out: in generation no token stands across the place
        where the assistant begins.
        """
        return [range(self._first_from(span.start), self._first_from(span.stop)) for span in characters]

    def _first_from(self, character: int) -> int:
        # Byte-level tokenizers leave leading white space out of a token's characters: it begins where the one before
        # ends. The tokens that share one character of several bytes all begin with it.
        ends = (0, *self.ends)
        begins = (min(start, end) for start, end in zip(self.starts, ends, strict=False))
        return next((index for index, begin in enumerate(begins) if begin >= character), len(self.ids))


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> PlacedTokens:
    """The tokens of a rendered conversation. Raises ModelError for a tokenizer that does not say where tokens stand."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} does not say which characters a token was made from; give the model a "
            "tokenizer.json, or the demonstrations as text"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return PlacedTokens(
        tuple(encoded["input_ids"]), tuple(start for start, _ in offsets), tuple(end for _, end in offsets)
    )
