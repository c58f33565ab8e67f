"""Rewards that check an answer: 1 if the completion gives the number that the row's `answer` column holds, else 0.

Numbers are compared exactly, as fractions. Each search looks at a character a bounded number of times, so that no
completion, however odd, takes long to check.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from tunesmith.core.errors import RewardError
from tunesmith.rewards.exchange import Exchange, RewardFunction, text_of

_MINUS = str.maketrans({"\u2212": "-", "\uff0d": "-"})  # the minus sign of typesetters, and the wide one

# What stands together with a digit, so that 47.5, 47/2, 47%, 47th and 1,2 are seen as other things than 47.
_WITH_DIGIT = re.compile(r"[\w.,:/^%]+")
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")

# A sign counts where it stands right before the number or its currency, and not after a word, where it is an operator
# or a hyphen. Two numbers with `/` between them are a fraction.
_DECIMAL = r"(?:[0-9](?:,?[0-9])*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
_SIGN = r"(?:(?<![\w)\]}%])(?P<sign>[-+]))?(?:\\?[$\u00a3\u20ac] ?(?P<inner>[-+])?)?"
_NUMBER = re.compile(rf"{_SIGN}(?P<over>{_DECIMAL})(?:/(?P<under>{_DECIMAL}))?")
_MARKED = re.compile(rf"####[^\w\n]{{0,8}}?{_NUMBER.pattern}")
_LATEX_COMMA = re.compile(r"\{,\}|,\\!")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9.,]{1,40})\}\{([0-9.,]{1,40})\}")
_BOX = "\\boxed{"
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
    boxed = list(_NUMBER.finditer(inside.partition("}")[0])) if box else []
    numbers = boxed or list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


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
    is_negative = (match["sign"] == "-") != (match["inner"] == "-")
    return -value if is_negative else value


def _fraction(digits: str) -> Fraction:
    return Fraction(Decimal(digits.replace(",", "")))


def _shown(gold: object) -> str:
    if gold is None:
        return "missing"
    text = repr(gold)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
