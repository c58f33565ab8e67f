"""The interface of a rollout engine. Trainers, `generate`, `chat` and `compare` know nothing else about generation."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Protocol

from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.core.errors import InputError
from tunesmith.kernels.sample.records import SMALLEST_TEMPERATURE, TEMPERATURE_RULE
from tunesmith.rollout.sequence import Limits
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


def check_request(
    prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, vocabulary_size: int | None = None
) -> None:
    """Refuse a request that no engine can serve, before any work is done.

    With `vocabulary_size`, stop ids and biased tokens must be ids of the vocabulary.

    Raises:
        InputError: naming the argument, its value and what is allowed.
    """
    if not prompts:
        raise InputError("no prompts were given; give at least one")
    if n < 1:
        raise InputError(f"n is {n}; ask for at least 1 completion of each prompt")
    temperature = sampling.temperature
    if not (temperature == 0 or SMALLEST_TEMPERATURE <= temperature < float("inf")):
        raise InputError(f"temperature is {temperature}; it must be {TEMPERATURE_RULE}")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p is {sampling.top_p}; it must lie in (0, 1], where 1 is off")
    if not 0 <= sampling.min_p < 1:
        raise InputError(f"min_p is {sampling.min_p}; it must lie in [0, 1), where 0 is off")
    if sampling.top_k < 0:
        raise InputError(f"top_k is {sampling.top_k}; it must be 0 (off) or more")
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise InputError(f"repetition_penalty is {sampling.repetition_penalty}; it must be positive, where 1 is off")
    stop_ids = _stop_ids(sampling)
    # A record that checks itself: both limits of length, and the types of ids and strings.
    Limits(sampling.max_new_tokens, sampling.min_new_tokens, stop_ids, sampling.stop_strings)
    _check_bias(sampling.logit_bias)
    if vocabulary_size is not None:
        _check_ids(stop_ids, sampling.logit_bias, vocabulary_size)


def _stop_ids(sampling: SamplingParams) -> frozenset[int]:
    given = sampling.stop_token_ids
    if isinstance(given, str | int):
        raise InputError(f"stop_token_ids is {given!r}; give a tuple of token ids, and texts as stop_strings")
    return frozenset(given)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users may not check types
        raise InputError(f"logit_bias is {bias!r}; give a mapping of token ids to numbers")
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"logit_bias is for {token!r}; its keys must be token ids, whole numbers from 0 up")
        if not isinstance(value, Real) or math.isnan(value) or value == float("inf"):
            raise InputError(f"logit_bias of token {token} is {value!r}; give a finite number, or -inf to forbid it")


def _check_ids(stop_ids: frozenset[int], bias: Mapping[int, float], vocabulary_size: int) -> None:
    for name, ids in (("stop_token_ids", stop_ids), ("logit_bias", bias)):
        if ids and max(ids) >= vocabulary_size:
            raise InputError(f"{name} names token id {max(ids)}; ids must lie in [0, {vocabulary_size})")
    if sum(value == float("-inf") for value in bias.values()) == vocabulary_size:
        raise InputError(
            f"logit_bias forbids all {vocabulary_size} tokens of the vocabulary; leave at least one that can be drawn"
        )


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
