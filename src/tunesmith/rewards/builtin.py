"""Rewards that come with Tunesmith. Each factory returns a function of TRL's call, `f(completions, **kwargs)`."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from tunesmith.core.errors import RewardError
from tunesmith.rewards.answers import arithmetic, gsm8k
from tunesmith.rewards.exchange import Exchange, RewardFunction, frozen, text_of
from tunesmith.rewards.rater import SimulatedRater


def sentiment() -> RewardFunction:
    """The simulated rater's score in [-1, 1]: a lexicon of rated words, no person. See `rater.SimulatedRater`."""
    rater = SimulatedRater()

    def sentiment(prompts: Sequence[Exchange], completions: Sequence[Exchange], **kwargs: object) -> list[float]:
        return [rater.score(frozen(p), frozen(c)) for p, c in zip(prompts, completions, strict=True)]

    return sentiment


def length(unit: Literal["tokens", "words", "characters"] = "tokens", target: float | None = None) -> RewardFunction:
    """The length of the completion; with a `target` the closeness to it, 0 at best and falling by 1 per unit.

    The end-of-sequence token counts as a token. Raises RewardError for another unit or a negative target.
    """
    units = ("tokens", "words", "characters")
    if unit not in units:
        raise RewardError(f"`unit` of the reward `length` is {unit!r}; allowed are {', '.join(units)}")
    if target is not None and (isinstance(target, bool | str) or not target >= 0):
        raise RewardError(f"`target` of the reward `length` is {target!r}; give a number of {unit}, at least 0")

    def length(
        completions: Sequence[Exchange], completion_ids: Sequence[Sequence[int]], **kwargs: object
    ) -> list[float]:
        if unit == "tokens":
            counts = [len(ids) for ids in completion_ids]
        else:
            texts = [text_of(completion) for completion in completions]
            counts = [len(text.split()) if unit == "words" else len(text) for text in texts]
        return [float(count) if target is None else -abs(count - target) for count in counts]

    return length


def match_format(pattern: str, whole: bool = False) -> RewardFunction:
    """1 if the regular expression `pattern` is found in the completion, else 0; with `whole` it must match all of it.

    `.` does not match a line break unless the pattern begins with `(?s)`. Raises RewardError for a bad expression.
    """
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RewardError(
            f"`pattern` of the reward `format` is {pattern!r}, no regular expression ({error})"
        ) from error

    def format(completions: Sequence[Exchange], **kwargs: object) -> list[float]:
        find = expression.fullmatch if whole else expression.search
        return [1.0 if find(text_of(completion)) else 0.0 for completion in completions]

    return format


def unique_chars() -> RewardFunction:
    """The number of different characters in the completion."""

    def unique_chars(completions: Sequence[Exchange], **kwargs: object) -> list[float]:
        return [float(len(set(text_of(completion)))) for completion in completions]

    return unique_chars


def overlong(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """0 for a short completion, -1 for one of `max_completion_len` tokens, and a straight line between them over the
    last `soft_punish_cache` tokens: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    Raises RewardError unless 0 < soft_punish_cache <= max_completion_len.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise RewardError(
            f"the reward `overlong` has max_completion_len {max_completion_len} and soft_punish_cache "
            f"{soft_punish_cache}; the second must be at least 1 and at most the first"
        )
    start = max_completion_len - soft_punish_cache

    def overlong(completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        return [-min(max(len(ids) - start, 0) / soft_punish_cache, 1.0) for ids in completion_ids]

    return overlong


BUILTINS: Mapping[str, Callable[..., RewardFunction]] = MappingProxyType(
    {
        "sentiment": sentiment,
        "length": length,
        "format": match_format,
        "unique_chars": unique_chars,
        "overlong": overlong,
        "arithmetic": arithmetic,
        "gsm8k": gsm8k,
    }
)
"""Factories of the built-in rewards by name; their parameters are the `arguments` of a recipe."""
