"""One call of `generate` by an engine of our own: what it needs, and what it gives back however it ends."""

from collections.abc import Callable
from dataclasses import dataclass

from tunesmith.batch.rollout import Group
from tunesmith.rollout.asked import Asked
from tunesmith.rollout.engine import GenerationInterrupted
from tunesmith.rollout.kv_cache import KVCache, blocks_for
from tunesmith.rollout.scheduler import Request, Scheduler


@dataclass(frozen=True, slots=True)
class CallSize:
    """What a call needs at most: prompts, and `num_slots` completions of up to `new_tokens` at a time."""

    num_prompts: int
    prompt_tokens: int
    num_slots: int
    new_tokens: int

    @classmethod
    def of(cls, asked: Asked, num_slots: int) -> "CallSize":
        """The size of a request that at most `num_slots` completions are drawn of at a time."""
        longest = max(map(len, asked.prompt_ids))
        return cls(len(asked.prompts), longest, min(num_slots, asked.num_completions), asked.limits.max_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks with which nothing ever waits."""
        # A completion begins in the middle of a block, of which it may need a copy.
        of_completions = self.num_slots * (blocks_for(self.new_tokens) + 2)
        return min(self.num_prompts, 2 * self.num_slots) * blocks_for(self.prompt_tokens) + of_completions


def open_scheduler(asked: Asked, cache: KVCache, *, num_slots: int, prefill_tokens: int) -> Scheduler:
    """A scheduler with all that was asked for."""
    scheduler = Scheduler(cache, asked.decode, num_slots=num_slots, prefill_tokens=prefill_tokens)
    scheduler.add(Request(index, ids, asked.n, asked.limits) for index, ids in enumerate(asked.prompt_ids))
    return scheduler


def drawn_groups(asked: Asked, scheduler: Scheduler, version: int, draw: Callable[[], None]) -> list[Group]:
    """The groups of a call once `draw` has drawn them; whatever it raises, the scheduler's blocks are free behind it.

    Raises:
        GenerationInterrupted: on Ctrl-C, with what was finished by then.
    """
    interrupted = False
    try:
        draw()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        finished = scheduler.cancel_all()
    groups = asked.groups(finished, version)
    if interrupted:
        raise GenerationInterrupted([group for group in groups if group.completions])
    return groups
