"""The interface of a rollout engine. Trainers, `generate`, `chat` and `compare` know nothing else about generation."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.errors import InputError
from tunesmith.schema.records import Prompt

OnProgress = Callable[[int, int], None]
"""Called with (completions finished, completions in all)."""


class Engine(Protocol):
    """Draws completions from the weights that it was given; in process or remote, the methods are the same."""

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, on_progress: OnProgress | None = None
    ) -> list[Group]:
        """One group of `n` completions for each prompt, in the order of the prompts."""
        ...


def check_request(prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> None:
    """Refuse a request that no engine can serve, before any work is done.

    Raises:
        InputError: naming the argument, its value and what is allowed.
    """
    if not prompts:
        raise InputError("no prompts were given; give at least one")
    if n < 1:
        raise InputError(f"n is {n}; ask for at least 1 completion of each prompt")
    if sampling.max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {sampling.max_new_tokens}; allow at least 1")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise InputError(
            f"min_new_tokens is {sampling.min_new_tokens}; it must lie between 0 and max_new_tokens, "
            f"{sampling.max_new_tokens}"
        )
    if not 0 <= sampling.temperature < float("inf"):
        raise InputError(f"temperature is {sampling.temperature}; give 0 (greedy) or a positive number")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p is {sampling.top_p}; it must lie in (0, 1], where 1 is off")
    if not 0 <= sampling.min_p < 1:
        raise InputError(f"min_p is {sampling.min_p}; it must lie in [0, 1), where 0 is off")
    if sampling.top_k < 0:
        raise InputError(f"top_k is {sampling.top_k}; it must be 0 (off) or more")
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise InputError(f"repetition_penalty is {sampling.repetition_penalty}; it must be positive, where 1 is off")


def check_prompt_lengths(
    prompts: Sequence[Prompt], lengths: Sequence[int], vocabulary_size: int, context_length: int, max_new_tokens: int
) -> None:
    """Refuse prompts that are empty, hold ids outside the vocabulary, or leave no room for `max_new_tokens`.

    Raises:
        InputError: naming the prompt by its id.
    """
    for prompt, length in zip(prompts, lengths, strict=True):
        if length == 0:
            raise InputError(f"prompt {prompt.id} is empty; give at least one token of text")
        if length + max_new_tokens > context_length:
            raise InputError(
                f"prompt {prompt.id} has {length} tokens and {max_new_tokens} are to be drawn, but the model's context "
                f"holds {context_length}; shorten the prompt or lower max_new_tokens"
            )
        bad = [token for token in prompt.token_ids or () if not 0 <= token < vocabulary_size]
        if bad:
            raise InputError(f"prompt {prompt.id} holds token id {bad[0]}; ids must lie in [0, {vocabulary_size})")
