"""Episodes in which the model's whole answer is the action."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.learn.environments.contract import Await, Message, Reply, Said, ToolEpisode

TASK = "task"
"""The column with the number of a row that a source brings itself."""


class TextEpisode(ABC):
    """An environment that takes the model's answers as they are. A turn with a call of one of `functions` is a turn
    with that tool, which the environment does not see.
    """

    environment: Any = None
    """See `contract.instance_in`."""

    def __init__(self, functions: Sequence[Callable[..., Any]], wait: Await) -> None:
        self._calls = ToolEpisode(None, functions, wait)
        self._wait = wait

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """See `Episode.tools`."""
        return self._calls.tools

    def reset(self, row: Mapping[str, object]) -> str | Sequence[Message] | None:
        """See `Episode.reset`."""
        return opening(row, self.begin(row))

    def begin(self, row: Mapping[str, object]) -> str:
        """The first words of the environment; empty if it has nothing to add to the prompt."""
        return ""

    def step(self, said: Said) -> Reply:
        """See `Episode.step`."""
        return self._calls.step(said) if said.calls and self.tools else self.act(said.text)

    @abstractmethod
    def act(self, text: str) -> Reply:
        """The answer to a turn without calls."""

    def reward(self) -> float | None:
        """See `Episode.reward`: that of the turns is all there is."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """See `Episode.close`."""


def placeholder(number: int) -> str:
    """The prompt of a row whose text is what `reset` says. Rows may not be empty."""
    return f"Task {number}"


def opening(row: Mapping[str, Any], text: str) -> str | Sequence[Message] | None:
    """The result of `reset` for the first words of an environment: they follow the prompt, or replace a placeholder."""
    if not text:
        return None
    *before, last = row["prompt"]
    if last["content"] == placeholder(row.get(TASK, -1)):
        return [*before, user(text)]
    return f"\n\n{text}"


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}


def text_from(value: object, method: str) -> str:
    """`value`, which `method` returned. Raises TypeError if it is no text."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{method} returned an observation of type {type(value).__name__}; a language model reads text")


def seed_of(row: Mapping[str, Any]) -> int:
    """The seed of a row in 31 bits, which all generators take."""
    return int(row["seed"]) & 0x7FFFFFFF
