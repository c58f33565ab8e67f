"""The interface of a rollout engine, used by the trainers, `generate`, `chat` and `compare`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.schema.records import Prompt

OnProgress = Callable[[int, int], None]
"""Called with (completions finished, completions in all)."""

OnText = Callable[[int, int, str], None]
"""Called with (index of the prompt, sample, new text) while completions are drawn.

The texts of one completion, joined, are its `Completion.text`. Only whole characters are passed, and no possible
beginning of a stop string.
"""

OnGroup = Callable[[int, Group], None]
"""Called with (index of the prompt, its group) when all completions of the prompt have ended, in the order in which
groups end. The engine waits for it, so it must return at once.
"""


class Engine(Protocol):
    """Draws completions from a model's current weights; opened by `factory.open_engine`."""

    @property
    def is_exact(self) -> bool:
        """True if `Completion.raw_logps` are known to equal the trainer's log-probs to the bit.

        Measured by the first `generate`; False before it.
        """
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

        `on_group` has been called with every group when the call returns; an engine may do so only at the end.

        Raises:
            InputError: the request cannot be served; nothing was drawn.
            TrainingError: logits are not finite, or no token is allowed; or the engine's log-probs of fixed tokens are
                not the trainer's.
            GenerationInterrupted: on Ctrl-C, with the completions that had ended.
        """
        ...

    def unload(self) -> None:
        """Free cache and packed weights; the next `generate` rebuilds them."""
        ...


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; a `KeyboardInterrupt`, so it need not be handled.

    `groups` are the prompts with at least one finished completion, with the finished completions only, in the order of
    the request.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__("interrupted while completions were drawn")
        self.groups = tuple(groups)
