"""Records of text: prompts, preference pairs, rankings and votes. Column names are TRL's."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "..."}`. Fields are texts, but for an assistant's
`tool_calls`: a list of `{"type": "function", "function": {"name": "...", "arguments": {...}}}`, perhaps with `id`."""

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

    @property
    def template_arguments(self) -> dict[str, object]:
        """Arguments of the chat template beside the messages: the row's `tools`, and its `chat_template_kwargs`."""
        tools, others = self.columns.get("tools"), self.columns.get("chat_template_kwargs")
        found: dict[str, object] = {"tools": tools} if tools else {}
        return {**found, **cast(Mapping[str, object], others or {})}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A completion to learn from and its prompt, empty if there is none.

    Example: `Demonstration(Prompt("1", "The film was"), " a joy.")`. Of a conversation without a prompt every turn of
    the assistant is a completion; the turns between them are context.
    """

    prompt: Prompt
    completion: Text

    @property
    def opening(self) -> Text:
        """The text or turns before the first answer; the whole text if nothing precedes it."""
        if isinstance(self.prompt.content, str):
            messages = () if isinstance(self.completion, str) else self.completion
        else:
            messages = self.prompt.content
        roles = [message["role"] for message in messages]
        before = messages[: roles.index("assistant")] if "assistant" in roles else messages
        return before or self.prompt.content or self.completion


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of a prompt and which one was preferred.

    `margin` says by how much (reward units, None where unknown). With `tie` set the order of the two has no meaning.
    `weight` multiplies the loss of the pair.
    """

    prompt: Prompt
    chosen: Text
    rejected: Text
    margin: float | None = None
    tie: bool = False
    weight: float = 1.0


MAX_TIED = 8
"""Most completions of a `Ranking` that may share a place: m of them make 2^m - 1 sets to choose from in its loss."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Two or more completions of a prompt, each with its place: 1 is the best, equal places are ties.

    Example: `Ranking(prompt, ("warm", "dull", "a mess"), ranks=(1, 2, 2))`.
    """

    prompt: Prompt
    completions: tuple[Text, ...]
    ranks: tuple[int, ...]

    def pairs(self) -> list[Pair]:
        """Every two of the completions as a pair, the better one chosen; those of one place are marked as ties."""
        texts = self.completions
        return [Pair(self.prompt, texts[a], texts[b], tie=tie) for a, b, tie in every_two(self.ranks)]


def every_two(ranks: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Every two of the indices of `ranks`, that of the smaller rank first, and whether both have the same one."""
    order = sorted(range(len(ranks)), key=lambda index: ranks[index])
    return [(a, b, ranks[a] == ranks[b]) for a, b in itertools.combinations(order, 2)]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A single completion of a prompt and whether it was wanted: a thumb up or down."""

    prompt: Prompt
    completion: Text
    is_wanted: bool


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


Severity = Literal["note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a run that deserves a look.

    Example: `Finding(step=12, name="kl", severity="warning", message="the KL to the reference is 55 nats")`.
    """

    step: int
    name: str
    severity: Severity
    message: str
