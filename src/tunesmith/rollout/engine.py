"""The interface of a rollout engine. Trainers, `generate`, `chat` and `compare` know nothing else about generation."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.schema.records import Prompt

OnProgress = Callable[[int, int], None]
"""Called with (completions finished, completions in all)."""

OnText = Callable[[int, int, str], None]
"""Called with (index of the prompt, sample, new text) while completions are drawn.

The texts of one completion, joined, are its `Completion.text`. Only whole characters are given, and nothing that may
yet turn out to be the beginning of a stop string.
"""

OnGroup = Callable[[int, Group], None]
"""Called with (index of the prompt, its group) as soon as all completions of the prompt have ended, in the order in
which groups end. It must return at once: the engine waits for it.
"""


class Engine(Protocol):
    """Draws completions from the weights that it was given; in process or remote, the methods are the same."""

    @property
    def is_exact(self) -> bool:
        """True if `Completion.raw_logps` equal, to the bit, what the trainer computes for the same tokens."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        *,
        on_progress: OnProgress | None = None,
        on_text: OnText | None = None,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """One group of `n` completions for each prompt, in the order of the prompts.

        `on_group` has been given every group when the call returns; an engine may hand them out at the end alone.

        Raises:
            InputError: for a request that cannot be served, before any work is done.
            GenerationInterrupted: on Ctrl-C, with what was finished by then.
        """
        ...

    def unload(self) -> None:
        """Free what the engine can rebuild, such as its cache and packed weights; the next `generate` rebuilds it."""
        ...


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C arrived while completions were drawn. A `KeyboardInterrupt`: who does not care for `groups` ignores it.

    `groups` are the prompts of which at least one completion was finished, with their finished completions alone, in
    the order of the request.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__("interrupted while completions were drawn")
        self.groups = tuple(groups)
