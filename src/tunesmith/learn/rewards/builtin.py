"""Built-in rewards. Each factory returns a function of TRL's signature, `f(completions, **kwargs)`.

Numbers of answers are compared exactly, as fractions, in time linear in the length of the completion.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from tunesmith.base.config.sections import BUILTIN_REWARDS
from tunesmith.base.core.errors import RewardError
from tunesmith.base.schema.records import Message, Prompt, Text, Vote, plain_text
from tunesmith.engine.batch.rollout import Trajectory

RewardFunction = Callable[..., object]
"""`f(prompts=, completions=, completion_ids=, **columns)` -> one float or None for each completion."""

Exchange = str | Sequence[Message]
"""A prompt or completion as functions receive it: text, or a list of messages."""


def frozen(exchange: Exchange) -> Text:
    """`exchange` as records hold it: text, or a tuple of messages."""
    return exchange if isinstance(exchange, str) else tuple(exchange)


def text_of(exchange: Exchange) -> str:
    """The text itself, or the contents of the messages joined by newlines."""
    return plain_text(frozen(exchange))


RATER_NAME = "simulated rater (VADER lexicon)"
"""Name of this rater in votes, tables and reports; always says that it is simulated."""

TIE_BELOW = 0.05
"""Scores closer than this are a tie: VADER itself calls a compound between -0.05 and 0.05 neutral."""


class SimulatedRater:
    """Scores text by its sentiment and votes for the more positive of two completions.

    The score is the compound of VADER (Hutto and Gilbert 2014): in [-1, 1], from a lexicon of about 7,500 words rated
    by people, with rules for negation, degree and punctuation. No person votes.
    """

    name = RATER_NAME

    def __init__(self) -> None:
        self._analyzer = SentimentIntensityAnalyzer()

    def score(self, prompt: Text, completion: Text) -> float:
        """The compound sentiment in [-1, 1].

        A text prompt and its completion are one running text and are rated as one: "was not" + " good" is negative. In
        a conversation the reply alone is rated, not the words of the other side.
        """
        text = plain_text(completion)
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + text
        return float(self._analyzer.polarity_scores(text)["compound"])

    def vote(self, prompt: Prompt, a: Text, b: Text) -> Vote:
        """The vote between completions `a` and `b`: the higher score wins, a difference below `TIE_BELOW` is a tie."""
        score_a, score_b = self.score(prompt.content, a), self.score(prompt.content, b)
        if abs(score_a - score_b) < TIE_BELOW:
            preference = "tie"
        else:
            preference = "a" if score_a > score_b else "b"
        return Vote(prompt, a, b, preference, rater=self.name, score_a=score_a, score_b=score_b)


def sentiment() -> RewardFunction:
    """The simulated rater's score in [-1, 1]: a lexicon of rated words, no person. See `SimulatedRater`."""
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


_MINUS = str.maketrans({"\u2212": "-", "\uff0d": "-"})  # the minus sign of typesetters, and the wide one

# What belongs together with a digit, so that 47.5, 47/2, 47%, 47th and 1,2 are seen as other things than 47.
_WITH_DIGIT = re.compile(r"[\w.,:/^%]+")
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")

# A sign counts if it is right before the number or its currency, and not after a word, where it is an operator
# or a hyphen. Two numbers with `/` between them are a fraction, and a mixed number with a whole one before them.
_DECIMAL = r"(?:(?:[0-9](?:,?[0-9])*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?!\w))?)"
_SIGN = r"(?:(?<![\w)\]}%])(?P<sign>[-+]))?(?:\\?[$\u00a3\u20ac] ?(?P<inner>[-+])?)?"
_MIXED = r"(?:(?<![0-9.,/])(?P<whole>[0-9]{1,6}) (?=[0-9]+/[0-9]))?"
_NUMBER = re.compile(rf"{_SIGN}{_MIXED}(?P<over>{_DECIMAL})(?:/(?P<under>{_DECIMAL}))?")
_MARKED = re.compile(rf"####[^\w\n]{{0,8}}?{_NUMBER.pattern}")
_LATEX_COMMA = re.compile(r"\{,\}|,\\!")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9.,]{1,40})\}\{([0-9.,]{1,40})\}")
_BOX = "\\boxed{"
_SPACED = re.compile(r"(?<=[0-9])(?:\\[,; ]|[ ~\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
"""A space between thousands."""
_MAX_DIGITS = 1000  # nobody means a longer number, and its arithmetic takes long


def arithmetic() -> RewardFunction:
    """1 if the first integer on the first line of the completion is the row's `answer`, else 0.

    For prompts such as `a + b =`. A minus right before the digits belongs to the number, thousands may be separated by
    commas. What clings to the digits must be no part of another number or word: `47.5`, `47/2`, `47%` and `47th` are
    not 47, `47.` is. A row without an integer as its `answer` is a RewardError.
    """

    def arithmetic(completions: Sequence[Exchange], answer: Sequence[object], **kwargs: object) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(_first_integer(text_of(completion)) == _integer_of(gold)) for completion, gold in pairs]

    return arithmetic


def gsm8k() -> RewardFunction:
    """1 if the final number of the completion equals the one after `####` in the row's `answer`, else 0.

    The final number is the first that follows a `####`; without one the last in the last `\\boxed{...}`; without that
    the last in the text. Commas, currency, percent signs and a closing period do not matter, and 18.0 is 18. A row
    without a number as its `answer` is a RewardError.
    """

    def gsm8k(completions: Sequence[Exchange], answer: Sequence[object], **kwargs: object) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(final_number(text_of(completion)) == _gold_number(gold)) for completion, gold in pairs]

    return gsm8k


def final_number(text: str) -> Fraction | None:
    """The number that `text` ends in, as `gsm8k` reads it; None if it holds none."""
    text = _LATEX_FRACTION.sub(r"\1/\2", _LATEX_COMMA.sub(",", text.translate(_MINUS)))
    marked = _MARKED.search(text)
    if marked:
        return _value(marked)
    _, box, inside = text.rpartition(_BOX)
    boxed = list(_NUMBER.finditer(_SPACED.sub("", _up_to_brace(inside)))) if box else []
    numbers = boxed or list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _up_to_brace(text: str) -> str:
    """`text` up to the brace that closes the one before it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place]
    return text


def _first_integer(text: str) -> Fraction | None:
    line = re.split(r"[\r\n]", text.translate(_MINUS), maxsplit=1)[0]
    digit = re.search(r"\d", line)
    if digit is None:
        return None
    before = line[: digit.start()][-1:]
    if before and (before.isalnum() or before in "_."):
        return None
    word = _WITH_DIGIT.match(line, digit.start())
    number = ("-" if before == "-" else "") + (word.group().rstrip(".,:") if word else "")
    return _fraction(number) if len(number) <= _MAX_DIGITS and _INTEGER.fullmatch(number) else None


def _integer_of(gold: object) -> Fraction:
    text = gold.strip().translate(_MINUS) if isinstance(gold, str) else ""
    if _INTEGER.fullmatch(text):
        return _fraction(text)
    if isinstance(gold, int | float) and not isinstance(gold, bool) and gold == gold // 1:
        return Fraction(gold)
    raise RewardError(f"the row's `answer` is {_shown(gold)}; it must be an integer, such as 47 or '47'")


def _gold_number(gold: object) -> Fraction:
    if isinstance(gold, int | float) and not isinstance(gold, bool) and gold - gold == 0:
        return Fraction(str(gold))
    if isinstance(gold, str):
        text = gold.translate(_MINUS)
        match = _MARKED.search(text) or _NUMBER.fullmatch(text.strip())
        value = _value(match) if match else None
        if value is not None:
            return value
    raise RewardError(f"the row's `answer` is {_shown(gold)}; it must be a number, or a text with one after `####`")


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match of `_NUMBER`; None for a division by zero and for a number without end."""
    if len(match[0]) > _MAX_DIGITS:
        return None
    value = _fraction(match["over"])
    if match["under"]:
        under = _fraction(match["under"])
        if under == 0:
            return None
        value /= under
    if match["whole"]:
        value += _fraction(match["whole"])
    is_negative = (match["sign"] == "-") != (match["inner"] == "-")
    return -value if is_negative else value


def _fraction(digits: str) -> Fraction:
    return Fraction(Decimal(digits.replace(",", "")))


def _shown(gold: object) -> str:
    if gold is None:
        return "missing"
    text = repr(gold)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def environment() -> RewardFunction:
    """The sum of what an environment gave for the whole trajectory and for its turns; None if it gave nothing, and no
    number if something broke.
    """

    def environment(trajectories: Sequence[Trajectory | None]) -> list[float | None]:
        known = [one for one in trajectories if one is not None]
        if len(known) < len(trajectories):
            raise RewardError(
                "the reward `environment` is that of an environment, but there is none; set `environment`"
            )
        return [one.reward if one.error is None else math.nan for one in known]

    return environment


BUILTINS: Mapping[str, Callable[..., RewardFunction]] = MappingProxyType(
    dict(
        zip(
            BUILTIN_REWARDS,
            (sentiment, length, match_format, unique_chars, overlong, arithmetic, gsm8k, environment),
            strict=True,
        )
    )
)
"""Factories of the built-in rewards by name; their parameters are the `arguments` of a recipe."""
