"""What reward functions are called with and what they return, in TRL's form."""

from collections.abc import Callable, Sequence

from tunesmith.schema.records import Message, Text, plain_text

RewardFunction = Callable[..., object]
"""`f(prompts=, completions=, completion_ids=, **columns)` -> one float or None for each completion."""

Exchange = str | Sequence[Message]
"""A prompt or completion as functions receive it: text, or a list of messages."""


def frozen(exchange: Exchange) -> Text:
    """`exchange` as records hold it: text, or a tuple of messages."""
    return exchange if isinstance(exchange, str) else tuple(exchange)


def text_of(exchange: Exchange) -> str:
    """The text itself, or the contents of the messages joined by newlines."""
    return plain_text(frozen(exchange))
