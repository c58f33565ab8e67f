"""Use of an engine's slots, and the prompt tokens that it computed, in one call of `generate`."""

from dataclasses import dataclass

from tunesmith.base.core.trace import count


@dataclass(slots=True)
class Usage:
    """Sums over the decoding steps of a call, in which at most `num_slots` completions run at a time.

    `slot_s` is the seconds times the slots in use; `tail_s` and `starved_s` are those of the metrics of this name.
    `starved_s` is None for an engine without a cache of its own.
    """

    num_slots: int
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    slot_s: float = 0.0
    tail_s: float = 0.0
    starved_s: float | None = None

    def add(
        self,
        duration_s: float,
        slots_used: float,
        *,
        num_steps: int = 1,
        others_wait: bool,
        cache_is_full: bool = False,
    ) -> None:
        """Add `num_steps` steps with `slots_used` slots in use on average.

        `others_wait` says that there were completions without a slot, `cache_is_full` that free slots had no cache.
        """
        self.num_steps += num_steps
        self.decode_s += duration_s
        self.slot_s += duration_s * slots_used
        if not others_wait and slots_used < self.num_slots / 4:
            self.tail_s += duration_s
        if cache_is_full:
            self.starved_s = (self.starved_s or 0.0) + duration_s

    def record(self, prompt_tokens: int) -> None:
        """Add the figures to the open trace; `prompt_tokens` counts each prompt once for each of its completions."""
        count("decode_steps", self.num_steps)
        count("prefill_tokens", self.prefill_tokens)
        count("shared_tokens", prompt_tokens - self.prefill_tokens)
        if self.num_steps:
            count("slots_used", self.slot_s, out_of=self.num_slots * self.decode_s)
            count("tail_s", self.tail_s)
        if self.starved_s is not None:
            count("starved_s", self.starved_s)
