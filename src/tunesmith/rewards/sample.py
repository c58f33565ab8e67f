"""One completion with its prompt, as every kind of reward receives it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tunesmith.batch.rollout import Completion, Group
from tunesmith.schema.records import Prompt

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to score; `index` is its place in its group."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    index: int

    def __str__(self) -> str:
        shown = textwrap.shorten(self.completion.text, _SHOWN_CHARACTERS, placeholder="...")
        return f"prompt {self.prompt.id}, completion {self.index} ({shown!r})"


@runtime_checkable
class Reward(Protocol):
    """Anything that scores samples. `None` means that the reward does not apply to a sample."""

    @property
    def name(self) -> str:
        """Name in metrics and messages."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One finite number or None for each sample, in order. Raises RewardError naming the reward and the sample."""
        ...


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """The completions of all groups, group after group."""
    return [
        Sample(group.prompt, group.prompt_token_ids, completion, index)
        for group in groups
        for index, completion in enumerate(group.completions)
    ]
