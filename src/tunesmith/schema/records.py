"""Records of text: prompts, preference pairs and votes. Column names are TRL's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Message = Mapping[str, str]
"""One turn of a conversation: `{"role": "user", "content": "..."}`."""

Text = str | tuple[Message, ...]
"""Plain text, or a conversation as a tuple of messages."""

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended the completion (an end-of-sequence token or a stop string); `length`: the limit did."""

Preference = Literal["a", "b", "tie"]


def plain_text(content: Text) -> str:
    """The text itself, or the contents of the messages joined by newlines: for printing and for lexical scorers."""
    if isinstance(content, str):
        return content
    return "\n".join(message["content"] for message in content)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the other columns of its row, which reward functions receive by name.

    Example: `Prompt(id="films.jsonl:3", content="The movie was", columns={"genre": "drama"})`.
    """

    id: str
    content: Text
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    token_ids: tuple[int, ...] | None = None
    """Set where the prompt was cut by tokens: engines take these ids as they are, and `content` is their text."""

    @property
    def is_conversational(self) -> bool:
        """True if the content is a list of messages, which a chat template turns into tokens."""
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of a prompt and which one was preferred.

    `margin` says by how much (reward units, None where unknown). With `tie` set the order of the two has no meaning.
    """

    prompt: Prompt
    chosen: Text
    rejected: Text
    margin: float | None = None
    tie: bool = False


@dataclass(frozen=True, slots=True)
class Vote:
    """A rater's choice between completions `a` and `b` of a prompt, with their scores where the rater gives any."""

    prompt: Prompt
    a: Text
    b: Text
    preference: Preference
    rater: str
    score_a: float | None = None
    score_b: float | None = None
